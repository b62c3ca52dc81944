"""One run of pretrain_qwen.py, measured from inside; bench_train.py starts it once per row, on every rank.

    python -m tools.bench.measured_run row.json STEPS [flags of pretrain_qwen.py ...]

The run is the script's own: model, batch, loss, optimizer and Megatron's loop. Around each training step this
takes the time; WARM_UP steps come first, then STEPS timed ones, then STEPS with marks for the parts, then one
in which the attended pairs are counted. Rank 0 writes the row.
"""

import json
import math
import sys
import time
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from megatron.training import get_args, training

import pretrain_qwen
from megatron_mtrain import core_attention
from megatron_mtrain.checks import attention_config
from megatron_mtrain.flops import attention_flops, linear_flops, peak_tflops, utilisation
from megatron_mtrain.kernels.pairs import attended_pairs
from megatron_mtrain.qwen_shape import QwenShape, from_arguments
from tools.bench.step_parts import Recorder, watch_functions, watch_modules, watch_training
from tools.plan.memory import budgets, peak
from tools.plan.memory_parts import Run

WARM_UP = 2


def main() -> None:
    out, steps, *flags = sys.argv[1:]
    iterations = WARM_UP + 2 * int(steps) + 1
    sys.argv = ["pretrain_qwen.py", *flags, "--train-iters", str(iterations)]
    bench = Bench(int(steps))
    bench.install()
    pretrain_qwen.main()
    if int(bench.rank) == 0:
        Path(out).write_text(json.dumps(bench.row()))


class Bench:
    """Stands in for Megatron's train_step and build_index, and keeps what they took."""

    def __init__(self, steps: int):
        self.steps, self.done, self.rank = steps, 0, 0
        self.recorder = Recorder()
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.pairs = None  # attended and causal pairs of this rank, while they are counted
        self.density, self.parts, self.peak_bytes = 1.0, {}, 0

    def install(self, patch=setattr) -> None:
        """Takes the place of both functions; `patch` as in watch_functions."""
        self.train_step, self.build_index = training.train_step, core_attention.build_index
        patch(core_attention, "build_index", self.counted_index)
        watch_functions(self.recorder, patch)
        patch(training, "train_step", self.step)

    def step(self, forward_step, data, model, optimizer, *others, **named):
        """One call of Megatron's train_step."""
        config = others[1] if len(others) > 1 else named["config"]
        if self.done == 0:
            self.rank = dist.get_rank()
            watch_modules(self.recorder, model)
            watch_training(self.recorder, optimizer, config)
        if self.done == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        timed = WARM_UP <= self.done < WARM_UP + self.steps
        self.recorder.on = WARM_UP + self.steps <= self.done < WARM_UP + 2 * self.steps
        counts = self.done == WARM_UP + 2 * self.steps
        self.pairs = [0.0, 0.0] if counts else None
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.recorder.mark("other", True)
        result = self.train_step(forward_step, data, model, optimizer, *others, **named)
        self.recorder.mark("other", False)
        torch.cuda.synchronize()
        if timed:
            self.seconds.append(time.perf_counter() - start)
            self.peak_bytes = torch.cuda.max_memory_allocated()
        if result[0]:
            self.losses.append(float(result[0]["lm loss"]))
        if counts:
            self.finish()
        self.done += 1
        return result

    def counted_index(self, config, query, key, layout, rings, layer, **named):
        """build_index; in the last step it also counts what is attended."""
        index = self.build_index(config, query, key, layout, rings, layer, **named)
        if self.pairs is not None:
            whole = query.shape[1] * query.shape[2] * layout.num_tokens * (layout.num_tokens + 1) / 2
            sources = range(layout.world_size)
            self.pairs[0] += sum(int(attended_pairs(index.tiles(source)).sum()) for source in sources)
            self.pairs[1] += whole / layout.world_size
        return index

    def finish(self) -> None:
        """Adds up over ranks: pairs as a sum, memory as the most."""
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        total = torch.tensor(self.pairs, dtype=torch.float64, device=device)
        most = torch.tensor(float(self.peak_bytes), dtype=torch.float64, device=device)
        dist.all_reduce(total)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        attended, whole = total.tolist()
        self.density, self.peak_bytes = attended / whole, most.item()
        self.parts = {name: ms / self.steps for name, ms in self.recorder.milliseconds().items()}
        self.on_gpus = dist.get_world_size()

    def row(self) -> dict:
        """The measurements of rank 0 and what follows from them. Raises ValueError for a loss that is no
        number."""
        args = get_args()
        if not all(math.isfinite(value) for value in self.losses):
            raise ValueError(f"losses {self.losses} are not all finite; such a run must not be timed")
        shape, gpus = from_arguments(args, "this run"), self.on_gpus
        seconds, tokens = median(self.seconds), args.seq_length * args.global_batch_size
        low, *_, high = quantiles(self.seconds * 2, n=5, method="inclusive")  # * 2: takes a single one too
        gpu = torch.cuda.is_available()
        rate = peak_tflops(torch.cuda.get_device_name()) if gpu else None
        linear = linear_flops(shape, tokens)
        exact, active = (
            attention_flops(shape, args.seq_length, args.global_batch_size, share)
            for share in (1.0, self.density)
        )
        return {
            "tokens": args.seq_length, "method": args.attn_type, "density": self.density, "gpus": gpus,
            "step_ms": seconds * 1e3, "step_ms_20": low * 1e3, "step_ms_80": high * 1e3,
            "tokens_per_s": tokens / seconds, "mfu": utilisation(linear + active, seconds, gpus, rate),
            "mfu_dense": utilisation(linear + exact, seconds, gpus, rate),
            "light_ms": rate and (linear + active) / gpus / rate / 1e9,
            "peak_gib": self.peak_bytes / 2**30 if gpu else None,
            "predicted_gib": sum(peak(planned(args, shape))[1].values()) / 2**30,
            **{f"{name}_ms": ms for name, ms in self.parts.items()},
            "losses": self.losses,
        }  # fmt: skip


def planned(args, shape: QwenShape) -> Run:
    """This run as the memory estimate (tools/plan/memory.py) takes it."""
    attention = attention_config(args)
    return Run(
        shape, args.seq_length, tp=args.tensor_model_parallel_size, cp=args.context_parallel_size,
        pp=args.pipeline_model_parallel_size, dp=args.data_parallel_size, micro_batch=args.micro_batch_size,
        sequence_parallel=args.sequence_parallel, distributed_optimizer=args.use_distributed_optimizer,
        transformer_engine=args.transformer_impl == "transformer_engine",
        recompute="full" if args.recompute_granularity == "full" else "none",
        attn_type=args.attn_type, attn_reuse=attention.reuse, ring_comm=attention.ring_comm,
        loss_chunk_size=args.loss_chunk_size, mlp_chunk_size=args.mlp_chunk_size,
        offload_layer_inputs=args.offload_layer_inputs, **budgets(attention),
    )  # fmt: skip


if __name__ == "__main__":
    main()
