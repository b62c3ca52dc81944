"""The results of an evaluation as JSON, Markdown and pictures."""

import json
from collections import defaultdict
from pathlib import Path

from tools.data.files import write_atomic


def write(found: dict, out: Path) -> None:
    """Writes `out` (.json), and beside it .md and a picture (.TASK.png) of every task with depths."""
    write_atomic(out.with_suffix(".md"), markdown(found).encode())
    for task, cells in _by_task(found["results"]).items():
        if any(cell["depth"] is not None for cell in cells):
            heat_map(task, cells, found["attn_type"], out.with_suffix(f".{task}.png"))
    write_atomic(out, (json.dumps(found, indent=1) + "\n").encode())


def markdown(found: dict) -> str:
    """The tables: answers by task and length, by depth where there are depths, and loss by position."""
    lines = [f"# Evaluation with {found['attn_type']}, iteration {found['iteration']}", ""]
    lines += [f"    {found['command']}", ""]
    if found["results"]:
        lines += ["Shares of samples whose answer tokens are all the most likely ones, of answer tokens that "
                  "are, and the loss of answer tokens in nats.", "",
                  "| task | length | density | samples | right | right tokens | loss |",
                  "|---" * 7 + "|"]  # fmt: skip
        lines += [_row(task, cells) for (task, _), cells in _by_task_and_length(found["results"]).items()]
    for task, cells in _by_task(found["results"]).items():
        if any(cell["depth"] is not None for cell in cells):
            lines += ["", f"## {task}: right answers by depth", "", *_grid(cells)]
    if found["loss"]:
        lines += ["", "## Loss by position", "", "| length | tokens | loss |", "|---|---|---|"]
        lines += [
            f"| {part['length']} | {part['first']} .. {part['end'] - 1} | {part['loss']:.4f} |"
            for part in found["loss"]
        ]
    return "\n".join(lines) + "\n"


def mean(cells: list[dict], name: str) -> float:
    """The mean of a number over samples of several cells."""
    return sum(cell[name] * cell["samples"] for cell in cells) / sum(cell["samples"] for cell in cells)


def _row(task: str, cells: list[dict]) -> str:
    right, tokens, loss = (mean(cells, name) for name in ("accuracy", "token_accuracy", "loss"))
    samples = sum(cell["samples"] for cell in cells)
    return (
        f"| {task} | {cells[0]['length']} | {cells[0]['density']:.1%} | {samples} | {right:.1%} | "
        f"{tokens:.1%} | {loss:.4f} |"
    )


def _grid(cells: list[dict]) -> list[str]:
    lengths, depths, values = _axes(cells)
    lines = [
        f"| depth | {' | '.join(f'{length} tokens' for length in lengths)} |",
        "|---" * (len(lengths) + 1) + "|",
    ]
    for depth, row in zip(depths, values, strict=True):
        lines.append(f"| {depth:.0%} | {' | '.join(f'{value:.1%}' for value in row)} |")
    return lines


def _axes(cells: list[dict]) -> tuple[list[int], list[float], list[list[float]]]:
    """Lengths, depths, and right answers by depth and length."""
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    right = {(cell["depth"], cell["length"]): cell["accuracy"] for cell in cells}
    return lengths, depths, [[right[depth, length] for length in lengths] for depth in depths]


def _by_task(results: list[dict]) -> dict[str, list[dict]]:
    found = defaultdict(list)
    for cell in results:
        found[cell["task"]].append(cell)
    return found


def _by_task_and_length(results: list[dict]) -> dict[tuple[str, int], list[dict]]:
    found = defaultdict(list)
    for cell in results:
        found[cell["task"], cell["length"]].append(cell)
    return found


def heat_map(task: str, cells: list[dict], attention: str, path: Path) -> None:
    """Draws right answers by depth (down) and length (across)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths, depths, values = _axes(cells)
    size = (2.2 + 0.9 * len(lengths), 1.6 + 0.5 * len(depths))
    figure, axis = pyplot.subplots(figsize=size, layout="constrained")
    image = axis.imshow(values, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=30)
    axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axis.set(xlabel="length (tokens)", ylabel="depth of the fact", title=f"{task}, {attention}")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            axis.text(column, row, f"{value:.0%}", ha="center", va="center", fontsize=8)
    figure.colorbar(image, label="right answers")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
