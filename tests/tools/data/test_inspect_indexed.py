"""What the inspector says of a dataset that is known."""

import pytest

from tools.data import inspect_indexed, text_to_indexed
from tools.data.make_demo_data import byte_symbols


@pytest.fixture
def dataset(run, target, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "aaab"}\n{"text": "<|endoftext|>"}\n{"text": "the last document"}\n'
    )
    line = [
        "--output",
        tmp_path / "d",
        "--target-tokenizer",
        target,
        "--pack",
        "--seq-length",
        9,
        "--workers",
        1,
    ]
    assert run(text_to_indexed, *line, "--input", tmp_path / "a.jsonl")[0] == 0
    return tmp_path / "d"


def test_it_says_what_is_there(run, dataset, target, tmp_path):
    plot = tmp_path / "lengths.png"
    pytest.importorskip("matplotlib")
    code, message, said = run(
        inspect_indexed,
        dataset,
        "--tokenizer",
        target,
        "--plot",
        plot,
        "--verify",
        "--top",
        1,
        "--samples",
        6,
    )
    assert code == 0, message
    # With # for the end of document: [aaab#, <|en] [doftext|>] [#, the last] [ document], and # is dropped.
    assert "sequences (documents or pieces), in tokens: 6; min 1, quartiles 4.2 / 6.5 / 8.8, max 9" in said
    assert "samples, in tokens: 4; min 9, quartiles 9 / 9 / 9, max 9" in said
    assert "samples (groups of sequences), in documents: 4; min 1, quartiles 1 / 1.5 / 2, max 2" in said
    assert "sequences with end of document (256) last: 2" in said
    assert "head 'aaab<256>'" in said and "head '<|en'" in said
    assert "tokens: 36 of" in said and f"{ord('t'):>8} {5:>12}" in said
    assert ".bin and .idx are those of" in said
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_without_a_tokenizer_ids_are_shown(run, dataset):
    code, _, said = run(inspect_indexed, dataset, "--samples", 1)
    assert code == 0 and "head 97 97 97 98 256" in said


def test_changed_data_is_told(run, dataset, ranks):
    path = dataset.with_name("d.bin")
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    code, message, _ = run(inspect_indexed, dataset, "--verify")
    assert code == 1 and "d.bin: sha256 is not that of" in message
    code, message, _ = run(inspect_indexed, f"{dataset}x")
    assert code == 1 and "dx.idx" in message


def test_another_tokenizer_is_told(run, dataset, tmp_path):
    from tokenizers import AddedToken, Tokenizer, models

    small = Tokenizer(
        models.BPE(vocab={symbol: n for n, symbol in enumerate(byte_symbols()[:200])}, merges=[])
    )
    small.add_special_tokens([AddedToken("</s>", special=True)])
    small.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    code, message, _ = run(inspect_indexed, dataset, "--tokenizer", tmp_path)
    assert code == 1 and "id 256 is not below the tokenizer's 201" in message
