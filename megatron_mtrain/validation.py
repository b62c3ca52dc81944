"""Checks of settings, and the files that hold them: every failure is a ValueError with a way out."""

from pathlib import Path

LARGEST = 2**31 - 1  # of whole numbers: indices are int32 on the device


def find_file(name: str | Path, folder: Path, suffix: str, what: str) -> Path:
    """`name` as a path, else as the name of a file in `folder`. ValueError lists the names there are."""
    candidates = [Path(name)]
    if Path(name).name == str(name):
        candidates.append(folder / f"{str(name).removesuffix(suffix)}{suffix}")
    for path in candidates:
        try:
            if path.is_file():
                return path
        except OSError:  # a name too long for a file
            continue
    shipped = sorted(path.stem for path in folder.glob(f"*{suffix}"))
    raise ValueError(
        f"{what} {str(name)!r} is neither a file nor a shipped name; shipped: {', '.join(shipped)}"
    )


def check_int(name: str, value, least: int) -> None:
    """Raises ValueError when the setting `name` is not a whole number from `least` to LARGEST."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} {value!r} must be a whole number of at least {least}")
    if value > LARGEST:
        raise ValueError(f"{name} {value} must be at most {LARGEST}, what an index of 32 bits can count")


def check_choice(name: str, value, allowed: tuple) -> None:
    """Raises ValueError when the setting `name` is none of `allowed`, which it lists."""
    if value not in allowed:
        raise ValueError(f"unknown {name} {value!r}; choose one of {', '.join(map(str, allowed))}")
