"""JSON Lines, Parquet and plain text: every document once and in order, wherever the input is cut."""

import gzip
import json

import pytest

from tests.tools.data.conftest import HARD_TEXT, manifest
from tests.tools.data.test_prolong_to_indexed import documents, files, untouched
from tools.data import text_files, text_to_indexed


def lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts)).encode()


TEXTS = [text * (n % 3 + 1) for n, text in enumerate(HARD_TEXT * 4)]


def convert(run, target, tmp_path, *inputs, more=()) -> list[tuple[str, bool]]:
    line = [
        "--output",
        tmp_path / "out",
        "--target-tokenizer",
        target,
        "--workers",
        1,
        *more,
        "--input",
        *inputs,
    ]
    code, message, _ = run(text_to_indexed, *line)
    assert code == 0, message
    return documents(tmp_path / "out", target)


@pytest.mark.parametrize("size", [1, 7, 100, 1000, 1 << 24])
@pytest.mark.parametrize("ending", [True, False], ids=["newline at end", "none"])
def test_ranges_of_any_size_give_every_line_once(run, target, tmp_path, monkeypatch, size, ending):
    monkeypatch.setattr(text_files, "RANGE", size)
    texts = TEXTS if size > 10 else TEXTS[:2]
    (tmp_path / "a.jsonl").write_bytes(lines(texts) if ending else lines(texts)[:-1])
    assert convert(run, target, tmp_path, tmp_path / "a.jsonl") == [(text, True) for text in texts]
    assert len(manifest(tmp_path / "out")["sources"]) == 1


@pytest.mark.parametrize("form", ["gz", "zst"])
def test_compressed_lines(run, target, tmp_path, form, monkeypatch):
    monkeypatch.setattr(text_files, "RANGE", 50)
    if form == "zst":
        zstandard = pytest.importorskip("zstandard")
    pack = gzip.compress if form == "gz" else zstandard.ZstdCompressor().compress
    path = tmp_path / f"a.jsonl.{form}"
    path.write_bytes(pack(lines(TEXTS[:9])) + pack(lines(TEXTS[9:])))
    assert convert(run, target, tmp_path, path) == [(text, True) for text in TEXTS]
    (tmp_path / f"b.jsonl.{form}").write_bytes(path.read_bytes()[:-20])
    line = ["--output", tmp_path / "b", "--target-tokenizer", target, "--workers", 1]
    code, message, _ = run(text_to_indexed, *line, "--input", tmp_path / f"b.jsonl.{form}")
    if form == "gz":  # a zstd stream that ends early has no mark of it
        assert code == 1 and f"b.jsonl.{form}" in message


def test_workers_do_not_matter(command, run, target, tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(TEXTS))
    convert(run, target, tmp_path, *sorted(tmp_path.glob("*.jsonl")))
    line = ["--output", tmp_path / "two", "--target-tokenizer", target, "--workers", 2]
    done = command("tools/data/text_to_indexed.py", *line, "--input", *sorted(tmp_path.glob("*.jsonl")))
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "out") == files(tmp_path / "two")
    assert list(manifest(tmp_path / "two")["domains"]) == ["a", "b", "c"]


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_parquet(run, target, tmp_path, rows):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"body": [*TEXTS[:5], None, *TEXTS[5:]], "n": range(len(TEXTS) + 1)})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=rows)
    found = convert(run, target, tmp_path, tmp_path / "a.parquet", more=["--text-key", "body"])
    assert found == [(text, True) for text in TEXTS]
    assert manifest(tmp_path / "out")["domains"]["a"]["empty_documents"] == 1


def test_plain_text_is_a_document_a_file(run, target, tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "RANGE", 300)
    folder = tmp_path / "book"
    (folder / "part").mkdir(parents=True)
    for n, text in enumerate(TEXTS):
        (folder / "part" / f"{n:02d}.txt").write_bytes(text.encode())
    (folder / "picture.png").write_bytes(b"\xff")
    assert convert(run, target, tmp_path, folder) == [(text, True) for text in TEXTS]
    assert list(manifest(tmp_path / "out")["domains"]) == ["book"]


def test_empty_lines_empty_texts_and_lone_surrogates(run, target, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'\n{"text": ""}\n   \n{"text": "x\\ud800y"}\n{"text": "\\ud83d\\ude00"}\n'
    )
    assert convert(run, target, tmp_path, tmp_path / "a.jsonl") == [("x\ufffdy", True), ("\U0001f600", True)]
    counts = manifest(tmp_path / "out")["domains"]["a"]
    assert counts["empty_documents"] == counts["documents_changed_for_lone_surrogates"] == 1


def test_exact_and_pack(run, target, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["x" * 9, "y" * 3, "z" * 12]))
    exact = convert(run, target, tmp_path, tmp_path / "a.jsonl", more=["--exact", "--seq-length", 10])
    assert exact == [("x" * 9, True), ("z" * 10, False)]
    for path in tmp_path.glob("out.*"):
        path.unlink()
    packed = convert(run, target, tmp_path, tmp_path / "a.jsonl", more=["--pack", "--seq-length", 12])
    assert packed == [("x" * 9, True), ("y" * 2, False), ("y", True), ("z" * 10, False)]


@pytest.mark.parametrize(
    ("name", "content", "more", "reason"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', [], "the line at byte 14 is no JSON object"),
        ("a.jsonl", b'{"body": "x"}\n', [], "with a string 'text'; see --text-key"),
        ("a.jsonl", b'{"text": 5}\n', [], "with a string 'text'"),
        ("a.jsonl", b'["text"]\n', [], "with a string 'text'"),
        ("a.jsonl", b"", [], "the files are empty"),
        ("a.txt", b"ab\xffc", [], "not UTF-8 at byte 2"),
        ("a.dat", b"x", [], "unknown suffix; say --format"),
        ("a.parquet", b"PAR1 not really", [], "not a Parquet file"),
        ("a.jsonl", b'{"text": ""}\n', [], "no document has text"),
    ],
    ids=["cut", "key", "type", "list", "empty", "latin", "suffix", "parquet", "no text"],
)
def test_wrong_input_names_the_file(run, target, tmp_path, name, content, more, reason):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    line = ["--output", tmp_path / "out", "--target-tokenizer", target, "--workers", 1, *more]
    code, message, _ = run(text_to_indexed, *line, "--input", tmp_path / name)
    assert code == 1 and reason in message and str(tmp_path) in message and "\n" not in message
    assert untouched(tmp_path / "out")


def test_parquet_without_the_column_lists_the_columns(run, target, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    line = ["--output", tmp_path / "out", "--target-tokenizer", target, "--input", tmp_path / "a.parquet"]
    code, message, _ = run(text_to_indexed, *line)
    assert code == 1 and "there are: body (string), n (int64)" in message


def test_missing_input(run, target, tmp_path):
    line = ["--output", tmp_path / "out", "--target-tokenizer", target, "--input", tmp_path / "*.jsonl"]
    code, message, _ = run(text_to_indexed, *line)
    assert code == 1 and "no such file" in message
