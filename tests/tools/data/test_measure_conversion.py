"""The measurement runs and names everything that it compares."""

import pytest

from tools.data import measure_conversion


def test_it_measures(run, target, ranks, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n' * 20_000)
    line = [
        "--input",
        tmp_path / "a.jsonl",
        "--reference",
        target,
        "--target-tokenizer",
        ranks,
        "--rounds",
        1,
    ]
    code, message, said = run(measure_conversion, *line)
    assert code == 0, message
    rows = said.splitlines()
    names = [f"transformers, {target}", f"converter, {target}", f"converter, {ranks}"]
    assert [row.rpartition("  ")[2] for row in rows] == names
    assert all(float(row.split()[0]) > 0 for row in rows)
