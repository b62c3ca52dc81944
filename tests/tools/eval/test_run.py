"""tools/eval/run.py on a converted model: against transformers, and the same on every parallel layout.

The sparse attention is minfer with a pattern that tools/search_pattern.py found for this model; a step of
training with it is taken, too.
"""

import json

import numpy
import pytest
import torch

from tests.tools.checkpoint.ranks import Ranks, convert_in_process, train
from tests.tools.checkpoint.tiny_models import PROMPT, greedy, make_model, save
from tests.tools.eval.jobs import evaluated, scored
from tools.data.indexed import id_type, write_index
from tools.eval.language import TokenLanguage
from tools.eval.tasks import make_samples
from tools.loaded_model import RUN
from tools.search_pattern import parse_arguments, run

NAME, VOCABULARY, BLOCK, LENGTHS = "qwen3 untied gqa4", 257, 32, (128, 256)
TOLERANCE = 1e-4  # asked of float32; the order of sums gives about 1e-6
LAYOUTS = {
    "cp2": "--context-parallel-size 2",
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "dp2": "",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    processes = Ranks(tmp_path_factory.mktemp("ranks"), size=2)
    yield processes
    processes.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(transformers' model, folder with hf, megatron, data.bin, minfer.yaml)."""
    folder = tmp_path_factory.mktemp("model")
    made = make_model(NAME)
    hf = save(made, folder / "hf")
    convert_in_process(["to-megatron", "--hf", str(hf), "--out", str(folder / "megatron")])
    tokens = numpy.random.default_rng(0).integers(0, VOCABULARY, 3 * (LENGTHS[1] + 1))
    dtype, ones = id_type(VOCABULARY), numpy.ones(3, dtype=numpy.int64)
    (folder / "data.bin").write_bytes(tokens.astype(dtype).tobytes())
    write_index(folder / "data.idx", dtype, ones * (LENGTHS[1] + 1), ones)
    words = f"""
        --hf {hf} --data {folder / "data"} --out {folder / "pattern.json"} --recall 0.7 --rows 32 --samples 1
        --seq-length {LENGTHS[1]} --block-size {BLOCK} --sink-tokens 4 --local-window 20
    """.split()
    run(parse_arguments(words))
    (folder / "minfer.yaml").write_text(
        f"pattern_config_name: {folder / 'pattern.json'}\nblock_size: {BLOCK}\n"
        "sink_tokens: 4\nlocal_window: 20\n"
    )
    (folder / "dense.yaml").write_text(f"block_size: {BLOCK}\n")
    return made, folder


def command(folder, out, attn_type: str, *flags: str) -> list[str]:
    words = f"""
        --load {folder / "megatron"} --out {out} --tasks niah,vt,loss --loss-data {folder / "data"}
        --samples 2 --depths 0 1 --loss-bins 4 --batch-size 2
        --attn-type {attn_type} --train-attn-config {folder / attn_type}.yaml
    """.split()
    return [*words, "--lengths", *map(str, LENGTHS), *flags]


@pytest.fixture(scope="module")
def alone(ranks, model, tmp_path_factory):
    """What one rank finds, by attention."""
    _, folder = model
    out = tmp_path_factory.mktemp("alone") / "results.json"
    return {kind: ranks.run(1, evaluated, command(folder, out, kind))[0] for kind in ("dense", "minfer")}


def test_losses_are_those_of_transformers(model, alone):
    made, _ = model
    samples = make_samples(
        "niah", TokenLanguage(VOCABULARY), length=LENGTHS[0], count=2, depths=[0.0, 1.0], seed=0
    )
    for depth in (0.0, 1.0):
        losses = []
        for sample in (sample for sample in samples if sample.depth == depth):
            with torch.no_grad():
                logits = made(sample.tokens[None, :-1]).logits[0, -sample.answer :]
            losses.append(torch.nn.functional.cross_entropy(logits, sample.tokens[-sample.answer :]))
        (cell,) = (
            cell
            for cell in alone["dense"]["results"]
            if (cell["task"], cell["length"], cell["depth"]) == ("niah", LENGTHS[0], depth)
        )
        assert cell["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=TOLERANCE)
        assert cell["density"] == 1
    assert {part["density"] for part in alone["dense"]["loss"]} == {1}
    assert 0 < alone["minfer"]["results"][0]["density"] < 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_finds_the_same(ranks, model, alone, tmp_path, layout):
    """Losses of both attentions, and density to the pair; a pipeline's results come from its last rank."""
    _, folder = model
    for attn_type, expected in alone.items() if layout == "cp2" else [("minfer", alone["minfer"])]:
        out = tmp_path / f"{attn_type}.json"
        answers = ranks.run(2, evaluated, command(folder, out, attn_type, *LAYOUTS[layout].split()))
        (found,) = (answer for answer in answers if answer is not None)
        assert json.loads(out.read_text()) == found
        for part in ("results", "loss"):
            assert len(found[part]) == len(expected[part]) > 0
            for ours, theirs in zip(found[part], expected[part], strict=True):
                assert ours | {"loss": 0} == theirs | {"loss": 0}
                assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)


def test_greedy_tokens_are_right(ranks, model):
    """Every token that transformers chose is the most likely one here, and a changed one is not."""
    made, folder = model
    tokens, logits = greedy(made)
    tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1).repeat(2, 1)
    tokens[1, -1] = (tokens[1, -1] + 1) % VOCABULARY
    flags = f"--load {folder / 'megatron'} --model {folder / 'hf'} --seq-length {tokens.size(1) - 1}".split()
    flags += ["--train-attn-config", str(folder / "dense.yaml"), *LAYOUTS["tp2"].split()]
    *_, scores = ranks.run(2, scored, flags, tokens, VOCABULARY)
    right = scores[1, :, PROMPT - 1 :]
    assert bool(right[0].all()) and bool(right[1, :-1].all()) and right[1, -1] == 0


def test_searched_pattern_trains(ranks, model):
    _, folder = model
    flags = f"""
        --model {folder / "hf"} --load {folder / "megatron"} --save {folder / "step"} --lr 1e-4
        --attn-type minfer --train-attn-config {folder / "minfer.yaml"} --context-parallel-size 2
        --seq-length {LENGTHS[1]}
    """.split()
    ranks.run(2, train, [*RUN, *flags])
    assert (folder / "step" / "latest_checkpointed_iteration.txt").read_text() == "1"


WRONG = {
    "--tasks niah,ruler": "unknown task 'ruler'",
    "--tasks loss": "needs --loss-data",
    "--lengths 200": "sequence length 200 is not a multiple of",
    "--depths 2": "2.0 is not from 0",
    "--samples 0": "--samples 0 must be at least 1",
    "--haystack book.txt": "needs --tokenizer",
    "--load nowhere": "holds no torch_dist checkpoint",
    "--tasks kv --lengths 128": "the task alone needs",
}


def test_refuses(ranks, model, tmp_path):
    """Before a model is made; nothing is written."""
    _, folder = model
    start = f"--load {folder / 'megatron'} --tasks niah --lengths 512 --out {tmp_path / 'found.json'}".split()
    for flags, message in WRONG.items():
        with pytest.raises(RuntimeError, match=message):
            ranks.run(1, evaluated, [*start, *flags.split()])
    assert list(tmp_path.iterdir()) == []
