"""Predicts the time of a training step, and searches the parallel layouts for the fastest that fit in memory.

    python -m tools.plan.step_time --model qwen2.5-3b --seq-length 524288 --gpus 32 --global-batch 16
        --attn-type minfer

Prints the best five with tokens a second and GPU, memory, where the time goes, and what each of them pays
that the best does not. --tp, --cp and --pp fix a size. Ranks are in Megatron's order: tensor, context, data,
pipeline; tensor parallelism stays within a node, and a context-parallel ring that leaves it runs on two
levels. step_cost.py says of every part whether it is measured, counted or modelled. No whole step has been
compared with a measured one yet: trust the order of the layouts more than the seconds.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace

from megatron_mtrain.config import ATTN_TYPES
from megatron_mtrain.presets import model_shape

from . import work
from .memory import GIB, needed
from .memory_parts import Run
from .ring_time import A100, H200
from .step_cost import Plan, parts

MACHINES = {"h200": (H200, 989.5e12), "a100": (A100, 312e12)}  # and nominal operations a second


def layouts(plan: Plan, fixed: dict[str, int], gpus: int) -> Iterator[Plan]:
    """`plan` on every layout of `gpus` GPUs that model, sequence, batch and `fixed` sizes allow."""
    shape, node = plan.run.shape, plan.machine.cluster.node_size
    for tp in _divisors(gpus):
        # Tensor parallelism stays in a node, and key heads are split or repeated, never both.
        uneven = shape.num_heads % tp or shape.ffn_hidden_size % tp
        if tp > node or uneven or (shape.num_groups % tp and tp % shape.num_groups):
            continue
        for pp in _divisors(gpus // tp):
            for cp in _divisors(gpus // tp // pp):
                sizes = {"tp": tp, "cp": cp, "pp": pp, "dp": gpus // tp // pp // cp}
                if plan.batch % sizes["dp"] or any(sizes[name] != size for name, size in fixed.items()):
                    continue
                for recompute in ("none", "full"):
                    change = sizes | {"recompute": recompute, "sequence_parallel": tp > 1}
                    try:
                        yield replace(plan, run=replace(plan.run, **change))
                    except ValueError:  # a length or a number of layers that these sizes do not divide
                        continue


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def search(plans: Iterator[Plan], memory: int) -> tuple[list[tuple[float, Plan]], int]:
    """(step seconds, plan) of those that fit in `memory` bytes, fastest first; how many do not fit."""
    tried = list(plans)
    fitting = [plan for plan in tried if needed(plan.run) <= memory]
    timed = [(sum(parts(plan).values()), plan) for plan in fitting]
    return sorted(timed, key=lambda pair: pair[0]), len(tried) - len(fitting)


def reasons(plan: Plan, best: Plan) -> str:
    """Where the time of a step goes, as shares, and what differs from the best plan, in seconds."""
    found, least = parts(plan), parts(best)
    total = sum(found.values())
    largest = sorted(found.items(), key=lambda item: -item[1])
    words = ", ".join(f"{name} {100 * s / total:.0f} %" for name, s in largest if s >= 0.01 * total)
    change = {name: found[name] - least[name] for name in found}
    names = sorted(change, key=lambda name: -abs(change[name]))
    against = ", ".join(
        f"{name} {change[name]:+.2f} s" for name in names if abs(change[name]) > 0.002 * total
    )
    return f"{words}. Against the first: {against}" if against else words


def flags(plan: Plan) -> str:
    """The layout as Megatron's flags."""
    run = plan.run
    words = [f"--tensor-model-parallel-size {run.tp}", f"--context-parallel-size {run.cp}",
             f"--pipeline-model-parallel-size {run.pp}"]  # fmt: skip
    if len(plan.ring) > 1:
        sizes = " ".join(map(str, plan.ring))
        words.append(f"--hierarchical-context-parallel-sizes {sizes} --attn-implementation dr_stripe")
    if run.sequence_parallel:
        words.append("--sequence-parallel")
    if run.recompute == "full":
        words.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    return " ".join(words)


def report(best: list[tuple[float, Plan]], misfits: int) -> str:
    """The best layouts as Markdown."""
    head = ["", "tp", "cp", "pp", "dp", "rings", "recompute", "s a step", "tokens / s / GPU", "GiB"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for place, (seconds, plan) in enumerate(best, 1):
        run, rings = plan.run, " x ".join(map(str, plan.ring))
        speed = plan.batch * run.seq_length / seconds / plan.gpus
        row = [place, run.tp, run.cp, run.pp, run.dp, rings, run.recompute, f"{seconds:.2f}", f"{speed:.0f}",
               f"{needed(run) / GIB:.0f}"]  # fmt: skip
        lines.append("| " + " | ".join(map(str, row)) + " |")
    lines += ["", *(f"{place}. {reasons(plan, best[0][1])}" for place, (_, plan) in enumerate(best, 1))]
    return "\n".join([*lines, "", f"{misfits} layouts do not fit in memory. The first: {flags(best[0][1])}"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--model", required=True, help="preset such as qwen2.5-3b, or a Hugging Face folder")
    flag("--seq-length", type=int, required=True, help="tokens")
    flag("--gpus", type=int, required=True)
    flag("--global-batch", type=int, required=True, help="sequences a step")
    flag("--attn-type", default="minfer", choices=ATTN_TYPES)
    flag("--attn-reuse", choices=["nothing", "index", "output"], default="index")
    flag("--columns", type=int, default=1024, help="minfer's columns a head")
    flag("--slash-share", type=float, default=0.025, help="minfer's slashes, as a share of block distances")
    flag("--machine", choices=list(MACHINES), default="h200", help="nodes of 8")
    flag("--gpu-memory", type=float, default=139, help="GiB of a GPU")
    flag("--linear-share", type=float, default=0.55, help="of the nominal rate, that matrix products reach")
    for name in ("tp", "cp", "pp"):
        flag(f"--{name}", type=int, help="fixed; all are tried without it")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    machine, peak = MACHINES[args.machine]
    budget = work.Budget(columns=args.columns, slash_share=args.slash_share)
    fixed = {name: size for name in ("tp", "cp", "pp") if (size := getattr(args, name))}
    try:
        run = Run(model_shape(args.model), args.seq_length, attn_type=args.attn_type, columns=args.columns,
                  attn_reuse=args.attn_reuse, mlp_chunk_size=16384)  # fmt: skip
        plan = Plan(run, args.global_batch, machine, peak * args.linear_share, budget)
        found, misfits = search(layouts(plan, fixed, args.gpus), int(args.gpu_memory * GIB))
    except ValueError as error:
        sys.exit(f"step_time.py: error: {error}")
    if not found:
        sys.exit(
            f"step_time.py: error: no layout of {args.gpus} GPUs fits: {misfits} need more than "
            f"{args.gpu_memory:g} GiB; give more GPUs, or a batch that more of them divide"
        )
    print(f"{args.model}, {args.seq_length} tokens, {args.attn_type}, {args.gpus} GPUs, {machine.name}\n")
    print(report(found[:5], misfits))


if __name__ == "__main__":
    main()
