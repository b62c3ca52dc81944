"""Predicts the peak memory of a GPU in training, part by part, and what to change when it does not fit.

    python -m tools.plan.memory --model qwen2.5-3b --seq-length 524288 --cp 8 --recompute full
        --attn-type minfer --gpu-memory 139

bf16 weights, float32 gradients, float32 master weights and Adam, attention through megatron_mtrain. The peak
is what stays (weights, gradients, optimizer) plus what the forward has saved plus the widest moment of the
backward: attention, MLP or loss. It is what torch.cuda.max_memory_allocated would say; the CUDA context, NCCL
and what the allocator cannot reuse come on top (`RESERVE`, `FRAGMENTS`).

How each part (memory_parts.py) is known:
- parameters: counted against Megatron's model in the tests;
- what a layer saves with --transformer-impl local: counted on a CPU through saved-tensor hooks in the tests;
- attention backward without context parallelism: within 0.5 % of the peaks that tools/bench/bench_layer.py
  measured on an H200 at 131072 and 524288 tokens (tools/bench/results);
- not measured, read off the code: Transformer Engine layers, ring buffers, the loss, what moba and xattn
  keep. No peak of a whole training step has been compared yet.

With --gpu-memory the exit code is 1 when the run does not fit.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace

from megatron_mtrain import AttentionConfig
from megatron_mtrain.config import ATTN_TYPES
from megatron_mtrain.presets import model_shape

from .memory_parts import Run, host_bytes, moments, resident, saved

GIB = 2**30
RESERVE = 3 * GIB  # CUDA context, NCCL, cuBLAS workspaces: an estimate
FRAGMENTS = 0.05  # share of the peak that the allocator cannot reuse: an estimate


def peak(run: Run) -> tuple[str, dict[str, int]]:
    """(the widest moment of the widest stage, bytes by part)."""
    best = ("", {})
    for stage in sorted({0, run.pp - 1}):
        for name, parts in moments(run, stage):
            everything = resident(run, stage) | saved(run, stage) | parts
            if sum(everything.values()) > sum(best[1].values()):
                best = (name if run.pp == 1 else f"{name}, pipeline stage {stage}", everything)
    return best


def needed(run: Run) -> int:
    """Bytes of GPU memory that the run should have."""
    return int(sum(peak(run)[1].values()) * (1 + FRAGMENTS)) + RESERVE


def advice(run: Run, limit: int) -> list[str]:
    """Changes, each on top of those before, after which the run needs at most `limit` bytes, or []."""
    steps = []
    for words, changed in _changes(run):
        try:
            smaller = replace(run, **changed)
        except ValueError:  # such as a context-parallel size into which the sequence does not fit
            continue
        if needed(smaller) < needed(run):
            run = smaller
            steps.append(words)
        if needed(run) <= limit:
            return steps
    return []


def _changes(run: Run) -> Iterator[tuple[str, dict]]:
    """Changes from cheap to dear, as words and as fields."""
    yield "--loss-chunk-size 2048", {"loss_chunk_size": 2048}
    yield "--use-distributed-optimizer", {"distributed_optimizer": True}
    if run.tp > 1:
        yield "--sequence-parallel", {"sequence_parallel": True}
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    yield full, {"recompute": "full"}
    yield "--attn-reuse index", {"attn_reuse": "index"}
    yield "--ring-comm ring", {"ring_comm": "ring"}
    yield "--mlp-chunk-size 16384", {"mlp_chunk_size": 16384}
    yield "--offload-layer-inputs", {"recompute": "full", "offload_layer_inputs": True}
    for cp in (run.cp * 2, run.cp * 4, run.cp * 8):
        yield f"--context-parallel-size {cp}", {"cp": cp}


def report(run: Run) -> str:
    """The parts as a Markdown table in GiB."""
    moment, parts = peak(run)
    lines = [f"Peak of one GPU, at the {moment}", "", "| part | GiB |", "|---|---|"]
    lines += [f"| {name} | {size / GIB:.2f} |" for name, size in parts.items() if size >= GIB / 200]
    total = sum(parts.values())
    lines += [f"| **peak** | **{total / GIB:.2f}** |", f"| with reserve | {needed(run) / GIB:.2f} |"]
    if host_bytes(run):
        lines += ["", f"Pinned host memory per GPU: {host_bytes(run) / GIB:.1f} GiB"]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--model", required=True, help="preset such as qwen2.5-3b, or a Hugging Face folder")
    flag("--seq-length", type=int, required=True, help="tokens")
    for name in ("tp", "cp", "pp", "dp", "micro-batch"):
        flag(f"--{name}", type=int, default=1)
    flag("--sequence-parallel", action="store_true")
    flag("--no-distributed-optimizer", dest="distributed_optimizer", action="store_false")
    flag("--transformer-impl", choices=["transformer_engine", "local"], default="transformer_engine")
    flag("--recompute", choices=["none", "full"], default="none", help="activation recomputation")
    flag("--attn-type", choices=ATTN_TYPES, default="dense")
    flag("--train-attn-config", help="YAML of the method, for its budgets")
    flag("--attn-reuse", choices=["nothing", "index", "output"], default="index")
    flag("--ring-comm", choices=["ring", "allgather"], default="ring")
    flag("--loss-chunk-size", type=int, default=Run.loss_chunk_size, help="tokens; 0: Megatron's own loss")
    flag("--mlp-chunk-size", type=int, default=0, help="tokens; 0: all")
    flag("--offload-layer-inputs", action="store_true")
    flag("--gpu-memory", type=float, help="GiB: says whether the run fits, and what to change")
    return parser.parse_args()


def run_of(args: argparse.Namespace) -> Run:
    """The run that the arguments describe. Raises ValueError for one that cannot be."""
    fields = {name: value for name, value in vars(args).items() if name in Run.__dataclass_fields__}
    if args.train_attn_config:
        fields |= budgets(AttentionConfig.from_yaml(args.attn_type, args.train_attn_config))
    te = args.transformer_impl == "transformer_engine"
    return Run(shape=model_shape(args.model), transformer_engine=te, **fields)


def budgets(attention: AttentionConfig) -> dict:
    """Fields of Run that the settings of a method decide."""
    method, found = attention.method, {"block_size": attention.block_size}
    if attention.attn_type == "minfer":
        heads = [head for layer in method.pattern for head in layer]
        found["columns"] = max(head.vertical_cap for head in heads) + method.sink_tokens
    if attention.attn_type == "moba":
        found["moba"] = (method.moba_chunk_size, method.moba_topk)
    return found


def main() -> None:
    args = arguments()
    try:
        run = run_of(args)
    except ValueError as error:
        sys.exit(f"memory.py: error: {error}")
    print(report(run))
    if args.gpu_memory:
        limit = int(args.gpu_memory * GIB)
        print(f"\n{verdict(run, limit)}")
        sys.exit(0 if needed(run) <= limit else 1)


def verdict(run: Run, limit: int) -> str:
    """Whether the run fits into `limit` bytes, and what to change."""
    sizes = f"needs {needed(run) / GIB:.1f} GiB of {limit / GIB:.1f} GiB"
    if needed(run) <= limit:
        return f"Fits: {sizes}."
    steps = advice(run, limit)
    if not steps:
        return f"Does not fit: {sizes}. No change known here helps; use more GPUs (--tp, --pp)."
    return f"Does not fit: {sizes}. It would with {', then '.join(steps)}."


if __name__ == "__main__":
    main()
