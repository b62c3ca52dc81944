"""The report of the recall experiment: every finished method beside the others."""

import json
import platform
from datetime import date
from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tools.eval.report import mean
from tools.eval.setups import Setup

TASKS = ("niah", "niah_multi", "kv")
CURVE = 10  # steps of the loss curve that are shown


def report(folder: Path, setup: Setup, methods: tuple[str, ...], command: str) -> str:
    """Markdown of the methods whose evaluation is in `folder`."""
    found = {method: read(folder / method) for method in methods if (folder / method / "own.json").is_file()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    lines = [f"# Recall of a small model by attention method, {date.today()}", ""]
    lines += [f"{device}, torch {torch.__version__}, Python {platform.python_version()}.", ""]
    lines += [f"    python -m tools.eval.experiment {command}", ""]
    lines += [
        f"{setup.layers} layers, hidden size {setup.hidden}, {setup.heads} heads, {setup.length} tokens, "
        f"{setup.steps} steps of {setup.batch} sequences; one initial checkpoint, one order of data. Columns "
        "niah, niah_multi and kv are right answers with the attention of training (and, after the slash, "
        "with dense attention); loss is that of held-out sequences in nats a token. Density is the share of "
        "causal pairs attended in the evaluation.", "",
        f"| method | density | training loss | held-out loss | {' | '.join(TASKS)} |",
        "|---" * (4 + len(TASKS)) + "|",
    ]  # fmt: skip
    lines += [_row(method, result) for method, result in found.items()]
    if found:
        lines += ["", "## Training loss", "", *_curves(found)]
        lines += ["", "## Held-out loss by position", "", *_positions(found)]
    return "\n".join(lines) + "\n"


def read(folder: Path) -> dict:
    """What a method's folder holds: losses by step, and its evaluations `own` and, where done, `dense`."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    losses = {event.step: event.value for event in events.Scalars("lm loss")}
    names = [name for name in ("own", "dense") if (folder / f"{name}.json").is_file()]
    return {"losses": losses, **{name: json.loads((folder / f"{name}.json").read_text()) for name in names}}


def _row(method: str, result: dict) -> str:
    evaluations = [result[name] for name in ("own", "dense") if name in result]
    cells = [" / ".join(f"{_right(evaluation, task):.1%}" for evaluation in evaluations) for task in TASKS]
    held_out = " / ".join(f"{_held_out(evaluation):.4f}" for evaluation in evaluations)
    last = list(result["losses"].values())[-5:]
    density = mean(result["own"]["results"], "density")
    train = sum(last) / len(last)
    return f"| {method} | {density:.1%} | {train:.4f} | {held_out} | {' | '.join(cells)} |"


def _right(evaluation: dict, task: str) -> float:
    return mean([cell for cell in evaluation["results"] if cell["task"] == task], "accuracy")


def _held_out(evaluation: dict) -> float:
    parts = evaluation["loss"]
    return sum(part["loss"] for part in parts) / len(parts)


def _curves(found: dict) -> list[str]:
    steps = sorted(set.intersection(*(set(result["losses"]) for result in found.values())))
    shown = steps[:: -(-len(steps) // CURVE)] + steps[-1:]
    lines = [f"| step | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for step in dict.fromkeys(shown):
        cells = " | ".join(f"{result['losses'][step]:.4f}" for result in found.values())
        lines.append(f"| {step} | {cells} |")
    return lines


def _positions(found: dict) -> list[str]:
    lines = [f"| tokens | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for parts in zip(*(result["own"]["loss"] for result in found.values()), strict=True):
        cells = " | ".join(f"{part['loss']:.4f}" for part in parts)
        lines.append(f"| {parts[0]['first']} .. {parts[0]['end'] - 1} | {cells} |")
    return lines
