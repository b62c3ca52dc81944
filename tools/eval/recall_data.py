"""Training sequences of the recall experiment: text-like filler with facts in it, and facts again.

A sequence has keys of its own, each with one value. It runs on with filler until, now and then, a fact comes
(TokenLanguage.fact): mark, a key, its value. The first time the value cannot be known; every other time it
can be read off an earlier place, however far away. That is the form in which the tasks ask.
"""

from pathlib import Path

import numpy

from tools.data.indexed import id_type, write_index
from tools.eval.language import FACT, TokenLanguage

RATE = 0.2  # facts that begin at a token of filler: about a fact every seven tokens
AT_ONCE = 1024  # sequences made together; the loop is over positions


def write_sequences(prefix: Path, language: TokenLanguage, *, length: int, count: int, seed: int) -> None:
    """Writes PREFIX.bin and .idx of `count` documents of exactly `length` tokens."""
    dtype = id_type(language.vocabulary)
    with open(f"{prefix}.bin", "wb") as stream:
        for first in range(0, count, AT_ONCE):
            random = numpy.random.default_rng([seed, first])
            made = make_sequences(language, random, length, min(AT_ONCE, count - first))
            stream.write(made.astype(dtype).tobytes())
    ones = numpy.ones(count, dtype=numpy.int64)
    write_index(Path(f"{prefix}.idx"), dtype, ones * length, ones)


def make_sequences(language: TokenLanguage, random, length: int, count: int) -> numpy.ndarray:
    """int64 [count, length]."""
    words = language.words
    keys = random.permuted(numpy.tile(numpy.arange(words), (count, 1)), axis=1)
    values = random.integers(0, words, (count, words))
    # Few keys come back soon, many only far away: every distance is trained.
    active = numpy.exp(random.uniform(numpy.log(4), numpy.log(words), count)).astype(int)
    tokens = numpy.empty((count, length), dtype=numpy.int64)
    tokens[:, 0] = language.begin[0]
    last = language.any_filler(random, count)
    stage = numpy.zeros(count, dtype=int)  # 0: filler, 1: a key comes, 2: its value comes
    chosen = numpy.zeros(count, dtype=int)
    rows = numpy.arange(count)
    for position in range(1, length):
        begins = (stage == 0) & (random.random(count) < RATE)
        filler = language.next_filler(random, last)
        drawn = keys[rows, (random.random(count) * active).astype(int)]
        chosen = numpy.where(stage == 1, drawn, chosen)
        tokens[:, position] = numpy.select(
            [begins, stage == 1, stage == 2],
            [FACT, language.first_key + chosen, language.first_value + values[rows, chosen]],
            filler,
        )
        last = numpy.where((stage == 0) & ~begins, filler, last)
        stage = numpy.where(begins, 1, numpy.where(stage == 1, 2, 0))
    return tokens
