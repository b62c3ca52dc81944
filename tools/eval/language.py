"""The languages that the tasks are written in: text of a tokenizer, or tokens of a made-up vocabulary.

Both have the same methods, and a task knows no more than these. All lists are of token ids; `random` is
numpy's generator.

    begin                    what a sequence starts with
    filler(random, count)    `count` tokens that say nothing
    keys, values, names(random, count)   different ones, to use below
    fact(key, value)         says that the value of the key is ...
    question(key)            the beginning of that fact, after which `answer(value)` completes it
    assign(name, value)      says that the variable has the value; `copy(name, other)` that of another one
    which(value)             asks for all variables with the value; `list(names)` answers it
"""

import functools
from pathlib import Path

import numpy

from tools.data.text_tokenizers import load_tokenizer

END, FACT, ASSIGN, COPY, WHICH = range(5)  # the marks of the made-up vocabulary
MARKS = 8
LEAST = 64  # vocabulary
SUCCESSORS = 4  # tokens that mostly follow a filler token


class TokenLanguage:
    """A vocabulary of marks, keys, values and filler; words are single tokens.

    Of the ids after the marks a quarter are keys (and names), a quarter values, the rest filler. Filler is
    text-like: a Markov chain in which every token has a few likely successors, the same for a vocabulary size
    whatever the seed, so that a model can learn it.
    """

    def __init__(self, vocabulary: int):
        if vocabulary < LEAST:
            raise ValueError(f"a vocabulary of {vocabulary} is too small for the tasks; it needs {LEAST}")
        self.vocabulary = vocabulary
        quarter = (vocabulary - MARKS) // 4
        self.first_key, self.first_value = MARKS, MARKS + quarter
        self.first_filler, self.words = MARKS + 2 * quarter, quarter
        self.begin = [END]
        fillers = vocabulary - self.first_filler
        random = numpy.random.default_rng(vocabulary)
        self.successors = self.first_filler + random.integers(0, fillers, (fillers, SUCCESSORS))

    def next_filler(self, random, last: numpy.ndarray) -> numpy.ndarray:
        """The filler tokens after the filler tokens `last`, of any shape; one in ten is any."""
        which, leaps, anywhere = self._draws(random, last.shape)
        return numpy.where(leaps, anywhere, self.successors[last - self.first_filler, which])

    def _draws(self, random, shape) -> tuple[numpy.ndarray, ...]:
        """Which successor comes, whether any token comes instead, and which."""
        # The k-th successor is half as likely as the one before it.
        which = numpy.minimum(random.geometric(0.5, shape), SUCCESSORS) - 1
        return which, random.random(shape) < 0.1, self.any_filler(random, shape)

    def any_filler(self, random, shape) -> numpy.ndarray:
        """Filler tokens without regard to what stands before them."""
        return random.integers(self.first_filler, self.vocabulary, shape)

    def filler(self, random, count: int) -> list[int]:
        successors, tokens = self.successors.tolist(), []
        draws = (drawn.tolist() for drawn in self._draws(random, count))
        for which, leaps, anywhere in zip(*draws, strict=True):
            follows = tokens and not leaps
            tokens.append(successors[tokens[-1] - self.first_filler][which] if follows else anywhere)
        return tokens

    def keys(self, random, count: int) -> list[int]:
        return self._different(random, self.first_key, count)

    def values(self, random, count: int) -> list[int]:
        return self._different(random, self.first_value, count)

    names = keys

    def _different(self, random, first: int, count: int) -> list[int]:
        if count > self.words:
            raise ValueError(f"a vocabulary of {self.vocabulary} has {self.words} words, {count} are needed")
        return (first + random.permutation(self.words)[:count]).tolist()

    def fact(self, key: int, value: int) -> list[int]:
        return [FACT, key, value]

    def question(self, key: int) -> list[int]:
        return [FACT, key]

    def answer(self, value: int) -> list[int]:
        return [value]

    def assign(self, name: int, value: int) -> list[int]:
        return [ASSIGN, name, value]

    def copy(self, name: int, other: int) -> list[int]:
        return [COPY, name, other]

    def which(self, value: int) -> list[int]:
        return [WHICH, value]

    def list(self, names: list[int]) -> list[int]:
        return names


WORDS = {
    "place": "garden harbour library market meadow mill museum orchard station tower valley village",
    "thing": "bell boat bridge clock fence gate lamp ladder path roof wall window",
    "state": "bright broken clean closed cold empty narrow new old open quiet wet",
    "adjective": "amber brave calm dusty early faint gentle hollow ivory jolly keen lively misty noble",
    "noun": "anchor badger candle dragon engine falcon glacier hammer island jacket kettle lantern",
}
PLACES, THINGS, STATES, ADJECTIVES, NOUNS = map(str.split, WORDS.values())


class TextLanguage:
    """English sentences in the ids of a tokenizer; `haystack` is a text to take filler from.

    Raises DataError for a tokenizer that cannot be loaded, ValueError for a haystack that cannot be read.
    """

    def __init__(self, tokenizer: str, haystack: Path | None = None):
        self.codec = load_tokenizer(tokenizer)
        self.begin = list(self.codec.begin_ids)
        self.words = len(ADJECTIVES) * len(NOUNS)
        self.encode = functools.lru_cache(maxsize=1 << 14)(self._encode)
        self.haystack = None
        if haystack is not None:
            try:
                text = haystack.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"cannot read --haystack {haystack} as UTF-8 text: {error}") from None
            self.haystack = self.codec.encode(text).tolist()
            if not self.haystack:
                raise ValueError(f"--haystack {haystack} is empty; give a text")

    def _encode(self, text: str) -> list[int]:
        return self.codec.encode(text).tolist()

    def filler(self, random, count: int) -> list[int]:
        if self.haystack is not None:
            start = int(random.integers(0, len(self.haystack)))
            turned = self.haystack[start:] + self.haystack[:start]
            return (turned * (count // len(turned) + 1))[:count]
        tokens: list[int] = []
        while len(tokens) < count:
            place, thing, state = (str(random.choice(words)) for words in (PLACES, THINGS, STATES))
            tokens += self.encode(f" The {thing} near the {place} is {state}.")
        return tokens[:count]

    def keys(self, random, count: int) -> list[str]:
        if count > self.words:
            raise ValueError(f"there are {self.words} keys, {count} are needed; ask for fewer")
        chosen = random.permutation(self.words)[:count]
        return [f"{ADJECTIVES[i // len(NOUNS)]} {NOUNS[i % len(NOUNS)]}" for i in chosen.tolist()]

    def values(self, random, count: int) -> list[str]:
        return [str(number) for number in random.choice(9_000_000, count, replace=False) + 1_000_000]

    def names(self, random, count: int) -> list[str]:
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        numbers = random.choice(26**3, count, replace=False).tolist()
        return ["".join(letters[number // 26**place % 26] for place in (2, 1, 0)) for number in numbers]

    def fact(self, key: str, value: str) -> list[int]:
        return [*self.question(key), *self.answer(value), *self.encode(".\n")]

    def question(self, key: str) -> list[int]:
        return self.encode(f"\nThe magic number of the {key} is")

    def answer(self, value: str) -> list[int]:
        return self.encode(f" {value}")

    def assign(self, name: str, value: str) -> list[int]:
        return self.encode(f"\nVAR {name} = {value}\n")

    def copy(self, name: str, other: str) -> list[int]:
        return self.encode(f"\nVAR {name} = VAR {other}\n")

    def which(self, value: str) -> list[int]:
        return self.encode(f"\nIn the order of the text, the variables with the value {value} are")

    def list(self, names: list[str]) -> list[int]:
        return [token for name in names for token in self.encode(f" {name}")]
