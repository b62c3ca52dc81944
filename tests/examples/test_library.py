"""The library examples run, and every number of ranks gives the losses of a single process."""

import re

import pytest

TOLERANCE = 1e-4
FLAGS = """
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1
    --global-batch-size 2 --tokenizer-type NullTokenizer --vocab-size 256 --make-vocab-size-divisible-by 64
    --mock-data --eval-iters 0 --eval-interval 10 --log-interval 1 --num-workers 0 --lr 1e-2 --train-iters 3
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --init-method-std 0.2 --hidden-dropout 0 --attention-dropout 0 --calculate-per-token-loss
    --no-create-attention-mask-in-dataloader --rerun-mode disabled
"""
STOCK = FLAGS.split()
EXACT = ["--spec", "megatron_mtrain.model", "layer_spec"]


def losses(output: str) -> list[float]:
    """Every loss in an output."""
    found = [float(number) for number in re.findall(r"(?:loss:?|: ) ?(\d+\.\d+(?:E[+-]\d+)?)", output)]
    assert len(found) >= 2, output
    return found


def test_hugging_face_with_fsdp(scripts):
    script = "examples.library.hugging_face_fsdp"
    (alone,) = scripts.run(script)
    first, _ = scripts.run(script, ranks=2)
    assert losses(first) == pytest.approx(losses(alone), rel=TOLERANCE)


def test_hugging_face_attention_is_exact_with_dense(scripts):
    """Scale, positions and order of tokens are those of transformers: its own attention gives the same."""
    (own,) = scripts.run("tests.examples.own_attention")
    first, _ = scripts.run("tests.examples.dense_ring", ranks=2)
    assert losses(first) == pytest.approx(losses(own), rel=TOLERANCE)


@pytest.fixture(scope="module")
def initial(scripts, tmp_path_factory):
    """A checkpoint from which all runs start: initialisation depends on the parallel layout."""
    folder = str(tmp_path_factory.mktemp("initial"))
    save = ["--train-iters", "1", "--lr", "0", "--save", folder, "--save-interval", "1"]
    scripts.run("examples.library.stock_megatron", [*STOCK, *EXACT, *save])
    return ["--load", folder, "--finetune", "--no-load-optim", "--no-load-rng"]


@pytest.mark.parametrize("spec", [EXACT, ["--spec", "examples.library.sparse_specs", "moba"]], ids=str)
def test_stock_megatron(scripts, initial, spec):
    flags = [*STOCK, *spec, *initial]
    found = [
        scripts.run("examples.library.stock_megatron", [*flags, "--context-parallel-size", str(ranks)], ranks)
        for ranks in (1, 2)
    ]
    alone, both = (re.findall(r"lm loss: (\S+)", "".join(outputs)) for outputs in found)
    assert len(alone) == 3
    assert [float(x) for x in both] == pytest.approx([float(x) for x in alone], rel=TOLERANCE)


def test_bridge_provider(scripts):
    (alone,) = scripts.run("tests.examples.bridge")
    first, _ = scripts.run("tests.examples.bridge", ranks=2)
    own, exact, sparse = losses(alone)
    assert exact == pytest.approx(own, rel=TOLERANCE)
    assert sparse != pytest.approx(own, rel=TOLERANCE)
    assert losses(first) == pytest.approx([exact, sparse], rel=TOLERANCE)


def test_one_layer(scripts):
    output, _ = scripts.run("examples.one_layer", ranks=2)
    assert float(re.search(r"stripe_ring +2 ranks, distance from exact attention (\S+)", output)[1]) < 1e-5
