"""Pattern files: the budget of every head of a model, for minfer."""

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from .validation import check_int, find_file

PATTERNS = Path(__file__).parent / "patterns"


class HeadPattern(NamedTuple):
    """The budget of one head: a share of the probe mass and a cap, for columns and for slashes.

    A fixed budget has share None: then exactly `cap` entries are taken.
    """

    vertical_share: float | None
    vertical_cap: int
    slash_share: float | None
    slash_cap: int


def shipped_patterns() -> list[str]:
    """Names of the pattern files that come with the package."""
    return sorted(path.stem for path in PATTERNS.glob("*.json"))


@lru_cache(maxsize=64)
def load_pattern(name: str) -> tuple[tuple[HeadPattern, ...], ...]:
    """The budgets of a pattern file by layer and query head. Raises ValueError for whatever it cannot
    mean."""
    path = find_file(name, PATTERNS, ".json", "pattern_config_name")
    try:
        layers = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(layers, list) or not layers:
        raise ValueError(f"{path} must hold a list with one object per layer")
    return tuple(_layer_pattern(path, number, layer) for number, layer in enumerate(layers))


def _layer_pattern(path: Path, number: int, layer) -> tuple[HeadPattern, ...]:
    if not isinstance(layer, dict) or sorted(layer) != sorted(str(head) for head in range(len(layer))):
        raise ValueError(f"{path}, layer {number}: expected an object with a key per head, '0', '1', ...")
    return tuple(_head_pattern(f"{path}, layer {number}, head {h}", layer[str(h)]) for h in range(len(layer)))


def _head_pattern(where: str, entry) -> HeadPattern:
    if not isinstance(entry, list) or not 3 <= len(entry) <= 4:
        raise ValueError(f"{where}: expected [name, vertical, slash, score]; got {entry!r}")
    name, vertical, slash = entry[:3]
    if name == "vertical_and_slash":
        for budget in (vertical, slash):
            check_int(f"{where}: fixed budget", budget, 0)
        return HeadPattern(None, vertical, None, slash)
    if name == "flex_vertical_and_slash":
        for budget in (vertical, slash):
            _check_flex(where, budget)
        return HeadPattern(float(vertical[0]), vertical[1], float(slash[0]), slash[1])
    raise ValueError(
        f"{where}: unknown pattern {name!r}; allowed: vertical_and_slash, flex_vertical_and_slash"
    )


def _check_flex(where: str, budget) -> None:
    if not isinstance(budget, list) or len(budget) != 2:
        raise ValueError(f"{where}: a flex budget is [share, cap]; got {budget!r}")
    share, cap = budget
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"{where}: share {share!r} must be a number from 0 to 1")
    check_int(f"{where}: cap", cap, 0)
