"""Samples of the tasks: the answer is in them, where it should be, and the same for the same seed."""

import numpy
import pytest
import torch

from tools.data.make_demo_data import save_tokenizer
from tools.eval.language import ASSIGN, COPY, FACT, WHICH, TextLanguage, TokenLanguage
from tools.eval.recall_data import make_sequences
from tools.eval.tasks import CHAINS, HOPS, KEYS, TASKS, make_samples

VOCABULARY, LENGTH, DEPTHS = 256, 512, [0.0, 0.5, 1.0]


@pytest.fixture(scope="module")
def languages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    folder = str(folder)
    return {"tokens": TokenLanguage(VOCABULARY), "text": TextLanguage(folder), "folder": folder}


def samples_of(language, task: str, length: int = LENGTH, seed: int = 0, count: int = 4):
    return make_samples(task, language, length=length, count=count, depths=DEPTHS, seed=seed)


def answer_of(tokens: list[int]) -> list[int]:
    """What a reader of the made-up language answers to the question that `tokens` end with."""
    facts, sources = {}, {}
    for place, token in enumerate(tokens[:-2]):
        if token == FACT:
            facts.setdefault(tokens[place + 1], tokens[place + 2])
        if token in (ASSIGN, COPY):
            name, source = tokens[place + 1 : place + 3]
            sources[name] = source if token == ASSIGN else sources[source]
    if tokens[-2] == FACT:
        return [facts[tokens[-1]]]
    assert tokens[-2] == WHICH
    return [name for name, value in sources.items() if value == tokens[-1]]


@pytest.mark.parametrize("task", TASKS)
def test_a_reader_finds_the_answer(languages, task):
    for sample in samples_of(languages["tokens"], task):
        tokens = sample.tokens.tolist()
        assert len(tokens) == LENGTH + 1 and max(tokens) < VOCABULARY
        assert answer_of(tokens[: -sample.answer]) == tokens[-sample.answer :]


@pytest.mark.parametrize("language", ["tokens", "text"])
@pytest.mark.parametrize("task", TASKS)
def test_samples_are_functions_of_their_seed(languages, task, language):
    length = 8192  # the tokenizer's tokens are bytes
    first, again, other = (samples_of(languages[language], task, length, seed, count=1) for seed in (0, 0, 1))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a.tokens, b.tokens) for a, b in zip(first, other, strict=True))
    assert len(first) == (len(DEPTHS) if TASKS[task][1] else 1)


def test_fact_lies_at_its_depth(languages):
    for task in ("niah", "niah_multi"):
        for sample in samples_of(languages["tokens"], task):
            tokens = sample.tokens.tolist()
            place = tokens.index(tokens[-2]) - 1  # the mark before the key
            # Other facts take up to three tokens each before it.
            assert abs(place - sample.depth * LENGTH) < 4 * KEYS
            assert tokens.count(FACT) == (2 if task == "niah" else KEYS + 1)


def test_text_says_what_is_asked(languages):
    language = languages["text"]
    for task in TASKS:
        for sample in samples_of(language, task, 8192, count=1):
            text = language.codec.decode(sample.tokens.numpy())
            answer = language.codec.decode(sample.tokens[-sample.answer :].numpy())
            assert text.endswith(answer)
            if task == "vt":
                names = answer.split()
                assert len(names) == HOPS and text.count("VAR") == 2 * HOPS * CHAINS - CHAINS
                assert f"VAR {names[1]} = VAR {names[0]}" in text
            else:
                question = text[: -len(answer)].rpartition("\n")[2]
                assert f"{question}{answer}." in text


def test_haystack_is_the_filler(languages, tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("Call me nobody. ")
    language = TextLanguage(languages["folder"], file)
    (sample, *_) = samples_of(language, "niah", 1024, count=1)
    assert language.codec.decode(sample.tokens.numpy()).count("Call me nobody. ") > 50
    with pytest.raises(ValueError, match="cannot read --haystack"):
        TextLanguage(languages["folder"], tmp_path / "absent.txt")


def test_refuses_what_has_no_room(languages):
    with pytest.raises(ValueError, match="the task alone needs .* tokens more"):
        samples_of(languages["tokens"], "kv", length=128)
    with pytest.raises(ValueError, match="too small for the tasks; it needs 64"):
        TokenLanguage(32)


def test_training_sequences_tell_every_fact_alike():
    """Within a sequence a key has one value, and there are facts to recall, near and far."""
    language = TokenLanguage(VOCABULARY)
    made = make_sequences(language, numpy.random.default_rng(0), LENGTH, 20)
    assert made.shape == (20, LENGTH) and made.min() >= 0 and made.max() < VOCABULARY
    again = 0
    for row in made.tolist():
        facts = {}
        for place in range(LENGTH - 2):
            if row[place] == FACT:
                key, value = row[place + 1 : place + 3]
                again += key in facts
                assert facts.setdefault(key, value) == value
    assert again > 100
