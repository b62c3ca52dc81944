"""Gather a run's pictures, arguments and headline numbers in one HTML file that needs no network.

    python -m tools.plot.report runs/minfer --out report.html
    python -m tools.plot.report runs/minfer --compare runs/dense --checkpoint runs/trained
        --data-path data/mine --bench tools/bench/results/2026-12-01-layer.csv --out report.html

The run is the folder that --tensorboard-dir named, or one above it. A picture that it has no data for is left
out, and the report says why. Masks and recall over all queries need --checkpoint and --data-path: the model
then runs on the CPU.
"""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools.data.files import write_atomic
from tools.plot import heads, layers, loss, mask, ring_measured, ring_timeline, speed, throughput
from tools.plot.figures import NoData, check_out, png, run
from tools.plot.model_heads import Head, check_model, examine, tokens_of
from tools.plot.page import Page, Picture
from tools.plot.runs import Run, names_of, read_run

# The arguments that tell a run from others; the rest is folded away.
TELLING = (
    *("model", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("attn_type", "train_attn_config", "attn_implementation", "attn_kernels", "attn_reuse", "ring_comm"),
    *("seq_length", "global_batch_size", "micro_batch_size", "train_iters", "lr", "min_lr", "weight_decay"),
    *("world_size", "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size"),
    *("data_parallel_size", "hierarchical_context_parallel_sizes", "recompute_granularity", "bf16"),
    *("transformer_impl", "rope_scaling", "load", "save", "data_path", "seed"),
)
# tag -> (name, format) of the mean of its last half
MEANS = {
    "step/tokens_per_second": ("Tokens a second", "{:,.0f}"),
    "step/mfu": ("Model FLOPs utilisation", "{:.1%}"),
    "step/peak_memory_gib": ("Peak memory of a GPU", "{:.1f} GiB"),
    "attention/density/mean": ("Density, mean over layers", "{:.1%}"),
    "attention/recall/mean": ("Recall, mean over layers", "{:.1%}"),
    "attention/index_ms/mean": ("Index, a layer", "{:.2f} ms"),
    "ring/worker_imbalance": ("Worker imbalance", "{:.2f}"),
    "ring/step_imbalance": ("Step imbalance", "{:.2f}"),
}
MASKED_HEADS = 4
MASKED_TOKENS = 4096


@dataclass(frozen=True)
class Section:
    """A picture that the report has if its data is there: draw() gives the figure or raises NoData."""

    anchor: str
    title: str
    words: str
    draw: Callable


def sections(args: Namespace, one: Run) -> list[Section]:
    """All pictures of a report, in order."""
    runs = [args.run, *args.compare]
    return [
        Section(
            "loss", "Loss",
            "Training loss, raw and smoothed; dots are validation losses.",
            lambda: loss.draw(runs, unit=args.by),
        ),
        Section(
            "speed", "Speed, memory and balance",
            "Every logged step. Imbalance is the work of the busiest context-parallel rank over the mean: 1 "
            "is even.",
            lambda: speed.draw(runs),
        ),
        *(
            Section(name, f"{name.capitalize()} by layer", words, lambda name=name: layers.draw(one, [name]))
            for name, words in LAYERS.items()
        ),
        Section(
            "heads", "Every head",
            "The last logged step: how much of the last queries' probability every head keeps, and what "
            "share of the causal pairs it attends for that.",
            lambda: heads.figure(heads.of_run(one)),
        ),
        Section(
            "masks", "What is attended",
            "Queries downwards, keys to the right, attended pairs dark; of the first, a middle and the last "
            "layer.",
            lambda: _masks(args),
        ),
        Section(
            "heads-on-text", "Every head on a text",
            "Recall over all queries of the text, and density.",
            lambda: _heads_on_text(args),
        ),
        Section(
            "ring-measured", "The ring, measured",
            "What a step of the ring took, and how long its keys were waited for.",
            lambda: ring_measured.figure(ring_measured.measured(one)),
        ),
        Section(
            "ring-modelled", "The ring, modelled",
            "Who computes and who waits in one layer, by a model of the links between H200s; minfer with as "
            "many columns and slashes as the run logged last. Not measured.",
            lambda: ring_timeline.draw(ring_timeline.of_run(one)),
        ),
        Section(
            "throughput", "Throughput by length",
            "From the benchmark files that were given.",
            lambda: _throughput(args.bench),
        ),
    ]  # fmt: skip


LAYERS = {
    "density": "Attended share of the causal pairs, mean over heads.",
    "recall": "Share of the last queries' probability that falls on attended pairs, mean over heads.",
    "columns": "Keys that all later queries attend, mean over heads.",
    "slashes": "Block diagonals that are attended, mean over heads.",
}


def shown(num_layers: int, num_heads: int) -> set[tuple[int, int]]:
    """The (layer, head) whose masks a report shows: four heads, evenly spread, of three layers."""
    some = {0, num_layers // 2, num_layers - 1}
    step = max(1, num_heads // MASKED_HEADS)
    return {(layer, head) for layer in some for head in range(0, num_heads, step)[:MASKED_HEADS]}


@cache
def _examined(checkpoint: Path, data_path: Path, tokens: int) -> tuple[list[Head], str]:
    """The heads of the checkpoint on the first tokens, and a title; once for both pictures."""
    ids = tokens_of(data_path, tokens)
    found, attention = examine(checkpoint, ids, keep=shown)
    return found, mask.title_of(attention, checkpoint, ids)


def _on_text(args: Namespace) -> tuple[list[Head], str]:
    if args.checkpoint is None:
        raise NoData("no model was given to run on a text; give --checkpoint and --data-path")
    return _examined(args.checkpoint, args.data_path, args.seq_length)


def _masks(args: Namespace):
    found, title = _on_text(args)
    return mask.figure([head for head in found if head.mask is not None], title)


def _heads_on_text(args: Namespace):
    return heads.figure(heads.of_heads(*_on_text(args)))


def _throughput(files: list[Path]):
    if not files:
        raise NoData("no benchmark file was given; give --bench and files of tools/bench")
    return throughput.figure(throughput.read(files))


def headline(runs: list[Run]) -> list[tuple[str, ...]]:
    """What the runs came to: rows of a name and a value for each; "" where a run does not know it."""
    columns = [_numbers(one) for one in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, *(column.get(name, "") for column in columns)) for name in names]


def _numbers(one: Run) -> dict[str, str]:
    """Means are over the last half of the logged steps."""
    found = {
        "Attention": one.argument("attn_type"),
        "Sequence length": _tokens(one.argument("seq_length", int)),
    }
    if one.has(loss.LOSS):
        curve = loss.curve(one, "")
        found |= {"Steps": f"{curve.x[-1]:,}", "Loss at the end": f"{curve.last:.4f} nats a token"}
        with suppress(NoData):
            found["Tokens trained on"] = _tokens(int(loss.curve(one, "", unit="tokens").x[-1]))
    for tag, (name, form) in MEANS.items():
        if one.has(tag):
            found[name] = form.format(one.series(tag).last_mean())
    return {name: value for name, value in found.items() if value}


def _tokens(count: int | None) -> str | None:
    return None if count is None else f"{count:,} tokens"


def page(args: Namespace) -> Page:
    """The report that the command line asks for. Raises ValueError for a folder or file that is not there."""
    folders = [args.run, *args.compare]
    runs, names = [read_run(folder) for folder in folders], names_of(folders)
    one = runs[0]
    _check_files(args)
    pictures, left_out = [], []
    for section in sections(args, one):
        try:
            picture = png(section.draw())
        except NoData as reason:
            left_out.append((section.title, f"{reason}."))
        else:
            pictures.append(Picture(section.anchor, section.title, section.words, picture))
    telling = [(key, one.arguments[key]) for key in TELLING if one.arguments.get(key, "None") != "None"]
    others = [pair for pair in one.arguments.items() if pair not in telling]
    words = f"TensorBoard events in {one.folder}, of {one.written:%Y-%m-%d %H:%M}."
    return Page(f"Run {names[0]}", words, names, headline(runs), pictures, left_out, telling, others)


def _check_files(args: Namespace) -> None:
    """Raises ValueError for files and folders that are wrong, before anything is drawn."""
    if args.bench:
        throughput.read(args.bench)
    if (args.checkpoint is None) != (args.data_path is None):
        raise ValueError("--checkpoint and --data-path belong together; give both or neither")
    if args.checkpoint is not None:
        check_model(args.checkpoint)
        tokens_of(args.data_path, args.seq_length)


def parser() -> ArgumentParser:
    """The command line."""
    made = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    flag = made.add_argument
    flag("run", type=Path, help="folder with the TensorBoard events of a run")
    flag("--out", type=Path, required=True, help="HTML file to write")
    flag("--compare", type=Path, nargs="+", default=[], metavar="RUN", help="runs to draw beside it")
    flag("--by", choices=loss.UNITS, default="steps", help="what the x axis of losses counts")
    flag("--bench", type=Path, nargs="+", default=[], metavar="FILE", help="JSON or CSV of tools/bench")
    flag("--checkpoint", type=Path, help="Megatron checkpoint or Hugging Face folder, for masks")
    flag("--data-path", type=Path, metavar="PREFIX", help="indexed dataset that the checkpoint reads")
    flag("--seq-length", type=int, default=MASKED_TOKENS, help="tokens that the checkpoint reads")
    return made


def main() -> None:
    args = parser().parse_args()

    def work():
        check_out(args.out, ".html")
        write_atomic(args.out, page(args).html().encode())

    run(work)


if __name__ == "__main__":
    main()
