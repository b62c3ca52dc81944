"""What sparse attention does, in TensorBoard, in W&B and in one line per --log-interval.

Only steps that are logged are sampled: their micro batches leave tensors on the device (samples.py) and
moments (clock.py). When Megatron has logged the step, ranks add up what they have, and the rank that holds
the writers writes it. Training only; a layer that is recomputed counts once. The tags:

    attention/density/layer_03, .../mean     attended pairs over causal pairs of the sequence, mean over heads
    attention/recall/layer_03, .../mean      share of the last queries' probability that is attended, see
                                             samples.py; not for exact attention
    attention/columns/layer_03, .../mean     minfer: columns of a head
    attention/slashes/layer_03, .../mean     minfer: block diagonals of a head
    attention/index_ms/layer_03, .../mean    time to build one index
    attention/by_head/density, .../recall    tensors [layers, heads]; TensorBoard alone
    ring/worker_imbalance                    attended pairs of the busiest context-parallel rank over the mean
    ring/step_imbalance                      the same in every step of the ring, summed
    step/ms, step/tokens_per_second          mean of the interval; all ranks together
    step/tflops_per_gpu, step/mfu            operations of the model, attended pairs counted (flops.py), and
                                             their share of the GPU's peak rate; Qwen models alone
    step/mfu_dense_equivalent                the same, as if all causal pairs had been attended
    step/peak_memory_gib                     of the fullest GPU, since the start

and with --log-ring-timing, of every step of the ring in a sampled layer, forward and backward:

    ring/forward/step_02/compute_ms          mean over ranks, layers and micro batches
    ring/forward/step_02/wait_ms             before the step's compute, see passes.py
    ring/forward/step_02/compute_ms_max      of the slowest rank; likewise wait_ms_max
"""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import (
    get_args,
    get_tensorboard_writer,
    get_timers,
    get_wandb_writer,
    print_rank_last,
    training,
)

from .core_attention import SparseRingAttention
from .flops import attention_flops, linear_flops, peak_tflops, utilisation
from .passes import DIRECTIONS
from .qwen_shape import from_arguments
from .totals import METRICS, PHASES, Totals, gather


class Telemetry:
    """Attach it to the model's configuration and train inside of `written`; off, it does nothing at all."""

    def __init__(self, args: Namespace):
        self.attention, self.ring = args.log_attention, args.log_ring_timing
        self.layers: list[SparseRingAttention] = []

    def attach(self, model_config) -> None:
        """Makes the layers of the model of a Megatron GPTModelConfig take notes in steps that are logged."""
        if self.attention or self.ring:
            model_config.pre_wrap_hooks.append(self._watch)

    @contextmanager
    def written(self) -> Iterator[None]:
        """Inside, what the layers noted is written after each step that Megatron logs."""
        original = training.training_log
        if self.attention or self.ring:
            training.training_log = self._followed(original)
        try:
            yield
        finally:
            training.training_log = original

    def _watch(self, models: list) -> list:
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, SparseRingAttention):
                self.layers.append(module)
                if self.attention:
                    module.sampled = _is_logged
                if self.ring:
                    module.passes.timed = _is_logged
        return models

    def _followed(self, training_log):
        def log(loss_dict, total_loss_dict, learning_rate, iteration, *others, **named):
            passed = (loss_dict, total_loss_dict, learning_rate, iteration, *others)
            if iteration % get_args().log_interval:
                return training_log(*passed, **named)
            steps = 1 + sum(total_loss_dict.get(f"{kind} iterations", 0) for kind in ("advanced", "skipped"))
            seconds = get_timers()("interval-time").elapsed(reset=False) / steps  # waits for the device
            result = training_log(*passed, **named)
            self._write(iteration, seconds)
            return result

        return log

    def _write(self, iteration: int, seconds: float) -> None:
        """All ranks call it together; the last one has Megatron's writers."""
        args = get_args()
        totals = gather(
            self.layers,
            num_layers=args.num_layers,
            num_heads=args.num_attention_heads,
            world_size=args.context_parallel_size,
            device=torch.cuda.current_device() if torch.cuda.is_available() else "cpu",
        )
        numbers = {}
        if self.attention:
            numbers |= attention_numbers(totals) | step_numbers(args, totals, seconds)
        if self.ring:
            numbers |= ring_numbers(totals)
        print_rank_last(summary(numbers))
        if writer := get_tensorboard_writer():
            for tag, number in numbers.items():
                writer.add_scalar(tag, number, iteration)
            for name in ("density", "recall"):
                if f"attention/{name}/mean" in numbers:
                    by_head = totals.by_head[METRICS.index(name)].float()
                    writer.add_tensor(f"attention/by_head/{name}", by_head, iteration)
        if wandb := get_wandb_writer():
            wandb.log(numbers, iteration)


def _is_logged() -> bool:
    """Whether the step under way will be logged."""
    args = get_args()
    return (args.curr_iteration + 1) % args.log_interval == 0


def attention_numbers(totals: Totals) -> dict[str, float]:
    """Means over heads, layer by layer and over all layers, and imbalance, by tag."""
    numbers = {}
    for metric, by_layer in zip(METRICS, totals.by_head.mean(-1), strict=True):
        if by_layer.isfinite().all():
            tags = [*(f"layer_{layer:02d}" for layer in range(len(by_layer))), "mean"]
            values = [*by_layer.tolist(), by_layer.mean().item()]
            numbers |= {f"attention/{metric}/{tag}": value for tag, value in zip(tags, values, strict=True)}
    return numbers | {
        "ring/worker_imbalance": totals.worker_imbalance,
        "ring/step_imbalance": totals.step_imbalance,
    }


def step_numbers(args: Namespace, totals: Totals, seconds: float) -> dict[str, float]:
    """Rates of a step that took `seconds`, by tag; MFU for Qwen models on GPUs with a known peak rate."""
    sequences = args.micro_batch_size * args.data_parallel_size * get_num_microbatches()
    tokens = sequences * args.seq_length
    numbers = {"step/ms": 1e3 * seconds, "step/tokens_per_second": tokens / seconds}
    gpu = torch.cuda.is_available()
    if gpu:
        numbers["step/peak_memory_gib"] = totals.peak_gib
    try:
        shape = from_arguments(args, "this run")
    except ValueError:
        return numbers
    peak = peak_tflops(torch.cuda.get_device_name()) if gpu else None
    density = totals.by_head[METRICS.index("density")].mean().item()
    for name, share in (("mfu", density), ("mfu_dense_equivalent", 1.0)):
        flops = linear_flops(shape, tokens) + attention_flops(shape, args.seq_length, sequences, share)
        if name == "mfu":
            numbers["step/tflops_per_gpu"] = flops / seconds / args.world_size / 1e12
        if peak is not None:
            numbers[f"step/{name}"] = utilisation(flops, seconds, args.world_size, peak)
    return numbers


def ring_numbers(totals: Totals) -> dict[str, float]:
    """Times of every step of the ring, by tag."""
    numbers = {}
    for suffix, times in (("", totals.ring_ms), ("_max", totals.slowest_ms)):
        for direction, steps in zip(DIRECTIONS, times.tolist(), strict=True):
            for step, phases in enumerate(steps):
                tag = f"ring/{direction}/step_{step:02d}"
                numbers |= {f"{tag}/{phase}_ms{suffix}": ms for phase, ms in zip(PHASES, phases, strict=True)}
    return numbers


SUMMARY = (
    ("attention/density/mean", " density {:.1%}"),
    ("attention/recall/mean", " recall {:.3f}"),
    ("attention/columns/mean", " columns {:.0f}"),
    ("attention/slashes/mean", " slashes {:.0f}"),
    ("attention/index_ms/mean", " index {:.1f} ms"),
    ("ring/worker_imbalance", " imbalance {:.2f}"),
    ("ring/step_imbalance", " by step {:.2f}"),
    ("step/tokens_per_second", " tokens/s {:.0f}"),
    ("step/mfu", " MFU {:.1%}"),
)


def summary(numbers: dict[str, float]) -> str:
    """One line: means over layers, and the time that one layer's passes round the ring compute and wait."""
    line = " attention:" + "".join(form.format(numbers[tag]) for tag, form in SUMMARY if tag in numbers)
    for direction in DIRECTIONS:
        compute, wait = (
            [ms for tag, ms in numbers.items() if tag.startswith(f"ring/{direction}") and tag.endswith(phase)]
            for phase in ("/compute_ms", "/wait_ms")
        )
        if compute:
            line += f" {direction} {sum(compute):.1f} ms + {sum(wait):.1f} ms waiting"
    return line
