"""The demo dataset: always the same, skipped when current, read by Megatron with a trainable end of text."""

import hashlib
import json
import sysconfig
from pathlib import Path

import pytest

from tools.data import make_demo_data
from tools.data.indexed import read_indexed


@pytest.fixture
def demo(run, tmp_path):
    code, message, _ = run(make_demo_data, "--output", tmp_path / "demo", "--tokens", 200_000)
    assert code == 0, message
    return tmp_path / "demo"


def test_documents_are_source_files(demo):
    data = read_indexed(demo)
    assert data.lengths.sum() >= 200_000
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = {hashlib.sha256(path.read_bytes()).digest() for path in make_demo_data.source_files(library)}
    for number in range(len(data.lengths)):
        ids = data.sequence(number)
        assert ids[-1] == 256 and hashlib.sha256(bytes(ids[:-1].astype("uint8"))).digest() in sources


def test_it_is_the_same_again_and_skipped_when_current(run, demo, tmp_path):
    run(make_demo_data, "--output", tmp_path / "again", "--tokens", 200_000)
    for end in (".bin", ".idx", "_tokenizer/tokenizer.json"):
        assert Path(f"{demo}{end}").read_bytes() == Path(f"{tmp_path / 'again'}{end}").read_bytes()
    before = Path(f"{demo}.bin").stat().st_mtime_ns
    run(make_demo_data, "--output", demo, "--tokens", 200_000)
    assert Path(f"{demo}.bin").stat().st_mtime_ns == before
    run(make_demo_data, "--output", demo, "--tokens", 150_000)
    assert json.loads(Path(f"{demo}.json").read_text())["settings"]["tokens"] == 150_000


def test_it_starts_both_ways(command, tmp_path):
    for n, script in enumerate(("tools/data/make_demo_data.py", "tools.data.make_demo_data")):
        done = command(script, "--output", tmp_path / f"d{n}", "--tokens", 1000)
        assert done.returncode == 0 and Path(f"{tmp_path / f'd{n}'}.idx").exists(), done.stderr


def test_too_many_tokens_leave_nothing(run, tmp_path):
    code, message, _ = run(make_demo_data, "--output", tmp_path / "d", "--tokens", 1 << 60)
    assert code == 1 and "ask for" in message and not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore")
def test_megatron_trains_on_it(demo):
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(
        tokenizer_path=f"{demo}_tokenizer", metadata_path={"library": "huggingface"}
    )
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.tokenize("é\n<x>") == [*"é\n<x>".encode()]
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=4096, blend=([str(demo)], None), split="1,0,0",
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, tokenizer=tokenizer,
        create_attention_mask=False, inter_document_masking=True,
    )  # fmt: skip
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [20, 0, 0], lambda: True, config).build()
    ends = 0
    for number in range(20):
        sample = train[number]
        assert (sample["tokens"][1:] == sample["labels"][:-1]).all()
        is_end = sample["labels"] == 256
        assert (sample["loss_mask"][is_end] == 1).all()  # the end of a document is trained
        starts = sample["cu_seqlens"][sample["cu_seqlens"] < 4096][1:].long()
        assert (sample["tokens"][starts - 1] == 256).all()  # documents are Megatron's sequences
        ends += len(starts)
    assert ends > 2
