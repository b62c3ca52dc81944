"""Synthetic long-context tasks: sequences that end with an answer which only an earlier part of them tells.

A sample is a sequence of `length` + 1 tokens whose last `answer` tokens are the answer. A model sees the
first `length` of them and is right when every answer token is its most likely next one. Samples are functions
of the task, length, depth, number and seed alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy
import torch

KEYS = 8  # facts of the multi-key needle
HOPS, CHAINS = 3, 2  # of variable tracking: names of a chain, and chains
PAIRS = 64  # most facts of key-value recall


class Sample(NamedTuple):
    """tokens int64 [length + 1], the last `answer` of which are asked for; depth 0 (start) to 1 (end)."""

    tokens: torch.Tensor
    answer: int
    task: str
    depth: float | None


def make_samples(
    task: str, language, *, length: int, count: int, depths: list[float], seed: int
) -> list[Sample]:
    """`count` samples of a task; of one with depths, `count` for each depth.

    Raises ValueError when the length has no room for the task.
    """
    make, deep = TASKS[task]
    samples = []
    for place, depth in enumerate(depths if deep else [None]):
        for number in range(count):
            random = numpy.random.default_rng([seed, list(TASKS).index(task), length, place, number])
            context, question, answer = make(language, random, depth)
            room = length + 1 - len(language.begin) - len(question) - len(answer)
            hay = _haystack(language, random, context, room, what=f"{task} at {length} tokens")
            tokens = torch.tensor([*language.begin, *hay, *question, *answer])
            samples.append(Sample(tokens, len(answer), task, depth))
    return samples


def _niah(language, random, depth: float):
    """One fact in a haystack, at `depth`."""
    (key,), (value,) = language.keys(random, 1), language.values(random, 1)
    return [(depth, language.fact(key, value))], language.question(key), language.answer(value)


def _niah_multi(language, random, depth: float):
    """Several facts of the same form; the one at `depth` is asked for."""
    keys, values = language.keys(random, KEYS), language.values(random, KEYS)
    places = [depth, *random.random(KEYS - 1)]
    facts = [language.fact(*pair) for pair in zip(keys, values, strict=True)]
    return (
        list(zip(places, facts, strict=True)),
        language.question(keys[0]),
        language.answer(values[0]),
    )


def _variables(language, random, depth: None):
    """Chains of variables, each a copy of the one before: all of one chain are asked for, in their order."""
    names, values = language.names(random, HOPS * CHAINS), language.values(random, CHAINS)
    context = []
    for chain, value in enumerate(values):
        own = names[chain * HOPS : (chain + 1) * HOPS]
        steps = [language.assign(own[0], value)]
        steps += [language.copy(name, other) for other, name in zip(own, own[1:], strict=False)]
        context += zip(sorted(random.random(HOPS)), steps, strict=True)
    return context, language.which(values[0]), language.list(names[:HOPS])


def _key_value(language, random, depth: None):
    """Many facts, spread over the sequence; any of them is asked for."""
    count = min(PAIRS, language.words)
    keys, values = language.keys(random, count), language.values(random, count)
    context = [
        (place / count, language.fact(key, value))
        for place, (key, value) in enumerate(zip(keys, values, strict=True))
    ]
    asked = int(random.integers(count))
    return context, language.question(keys[asked]), language.answer(values[asked])


# name: (what makes it, whether it is asked at every depth)
TASKS: dict[str, tuple[Callable, bool]] = {
    "niah": (_niah, True),
    "niah_multi": (_niah_multi, True),
    "vt": (_variables, False),
    "kv": (_key_value, False),
}


def _haystack(language, random, needles: list, room: int, what: str) -> list[int]:
    """`room` tokens: filler, and in it the needles (depth, tokens) in the order of their depth."""
    left = room - sum(len(tokens) for _, tokens in needles)
    if left < 0:
        raise ValueError(f"{what}: the task alone needs {-left} tokens more; give a longer --lengths")
    filler, hay, done = language.filler(random, left), [], 0
    for depth, tokens in sorted(needles, key=lambda needle: needle[0]):
        place = round(depth * left)
        hay += filler[done:place] + tokens
        done = place
    return hay + filler[done:]
