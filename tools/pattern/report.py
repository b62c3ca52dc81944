"""The report of a pattern search: what every head got, as Markdown and as a dict for JSON."""

from typing import NamedTuple

WORST = 10


class Head(NamedTuple):
    """What a head got, and what that keeps: means over the samples, but for the worst sample."""

    layer: int
    head: int
    vertical: int | list
    slash: int | list
    recall: float
    worst_sample: float
    pairs: float  # attended (query, key) pairs of a sequence
    density: float  # of the causal pairs


def summary(heads: list[Head], target: float) -> dict:
    """Recall and density of the whole model, of every layer, and the heads themselves."""
    layers = [
        [head for head in heads if head.layer == layer] for layer in range(1 + max(h.layer for h in heads))
    ]
    return {
        "recall_asked": target,
        **_means(heads),
        "pairs": sum(head.pairs for head in heads),
        "heads_below": sum(head.recall < target for head in heads),
        "layers": [{"layer": number, **_means(of_layer)} for number, of_layer in enumerate(layers)],
        "heads": [head._asdict() for head in heads],
    }


def _means(heads: list[Head]) -> dict:
    return {
        "recall": sum(head.recall for head in heads) / len(heads),
        "recall_least": min(head.recall for head in heads),
        "density": sum(head.density for head in heads) / len(heads),
        "pairs_a_head": sum(head.pairs for head in heads) / len(heads),
    }


def markdown(found: dict, title: str, command: str) -> str:
    """The report as text."""
    heads = [Head(**head) for head in found["heads"]]
    below = found["heads_below"]
    lines = [f"# Pattern of {title}", "", f"    {command}", ""]
    lines += [
        f"{len(heads)} heads keep {found['recall']:.2%} of the attention on average, the least "
        f"{found['recall_least']:.2%}, at {found['density']:.2%} of the causal pairs. "
        + (f"{below} stay below the {found['recall_asked']:.2%} asked for: the grid has no budget for them."
           if below else f"All reach the {found['recall_asked']:.2%} asked for."),
        "",
        "Recall is the share of the exact softmax of sampled query rows that the pattern attends.",
    ]  # fmt: skip
    lines += ["", "## Layers", "", "| layer | recall | least recall of a head | density | pairs a head |"]
    lines += ["|---|---|---|---|---|"]
    for row in found["layers"]:
        lines.append(
            f"| {row['layer']} | {row['recall']:.4f} | {row['recall_least']:.4f} | {row['density']:.2%} | "
            f"{row['pairs_a_head']:,.0f} |"
        )
    hardest = sorted(heads, key=lambda head: (-head.density, head.layer, head.head))[:WORST]
    weakest = sorted(heads, key=lambda head: (head.recall, head.layer, head.head))[:WORST]
    for name, chosen in (("Weakest heads", weakest), ("Costliest heads", hardest), ("All heads", heads)):
        lines += ["", f"## {name}", "", *_table(chosen)]
    return "\n".join(lines) + "\n"


def _table(heads: list[Head]) -> list[str]:
    lines = [
        "| layer | head | vertical | slash | recall | worst sample | density | pairs |",
        "|---" * 8 + "|",
    ]
    return lines + [
        f"| {head.layer} | {head.head} | {head.vertical} | {head.slash} | {head.recall:.4f} | "
        f"{head.worst_sample:.4f} | {head.density:.2%} | {head.pairs:,.0f} |"
        for head in heads
    ]
