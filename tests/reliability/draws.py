"""Property tests with a promise about their number: `fuzz` runs a check on drawn values and counts them.

The draws are the same in every run, so a failure in CI is a failure at home.
"""

import random
from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**31 - 1)


def fuzz(number: int, check: Callable, **drawn) -> None:
    """Calls check(**values) on `number` draws of the strategies `drawn`; fewer draws are a failure too."""
    count = 0

    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(**drawn)
    def run(**values):
        nonlocal count
        count += 1
        check(**values)

    run()
    assert count >= number, f"drew {count} cases instead of {number}"


def damage(data: bytes, seed: int) -> bytes:
    """`data` after one to four random edits: bytes changed, cut out, repeated or put in, or the end cut."""
    rng, data = random.Random(seed), bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((1, 1, 2, 4, 8, 64)))
        kind = rng.randrange(6)
        if kind == 0:
            data[start:end] = rng.randbytes(end - start)
        elif kind == 1:
            data[start:end] = b""
        elif kind == 2:
            data[start:start] = data[start:end]
        elif kind == 3:
            data[start:end] = bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF))]) * (end - start)
        elif kind == 4:
            data[start:start] = rng.choice((b"\x00", b"-", b"9" * 30, b"[" * 20, b"1e999", b"NaN", b"\xff"))
        else:
            data = data[:start]
    return bytes(data)
