"""The MDS reader against the writer beside it: every encoding, every layout, and every kind of damage."""

import json

import numpy
import pytest

from tests.tools.data.conftest import COLUMNS
from tests.tools.data.mds_writer import write_domain
from tools.data.files import DataError
from tools.data.mds import ShardReader, read_index


def prolong_sample(tokens: int, documents: int = 1) -> dict:
    bounds = numpy.linspace(0, tokens, documents + 1).astype(int)
    indices = numpy.stack([bounds[:-1], bounds[1:]], axis=1)
    return {"domain": ".", "indices": indices, "input_ids": numpy.arange(tokens) % 1000, "length": tokens}


def read_all(folder, names=tuple(COLUMNS)) -> list[dict]:
    shards = read_index(folder)
    return [reader.sample(n, names) for s in shards for reader in [ShardReader(s)] for n in range(s.samples)]


@pytest.mark.parametrize("compression", [None, "gz", "zstd:7"])
@pytest.mark.parametrize("procs", [False, True], ids=["flat", "procs"])
def test_samples_come_back_in_order(tmp_path, compression, procs):
    if compression and compression.startswith("zstd"):
        pytest.importorskip("zstandard")
    samples = [prolong_sample(n + 1, n + 1) for n in range(5)]
    options = {"compression": compression, "procs": procs, "hashes": ("sha1", "sha256")}
    write_domain(tmp_path, COLUMNS, [samples[:2], samples[2:]], **options)
    for found, sample in zip(read_all(tmp_path), samples, strict=True):
        assert found["length"] == sample["length"] and found["domain"] == "."
        numpy.testing.assert_array_equal(found["input_ids"], sample["input_ids"])
        numpy.testing.assert_array_equal(found["indices"], sample["indices"])


@pytest.mark.parametrize("tokens", [1, 255, 256, 65535, 65536, 70000])
def test_array_headers_of_every_width(tmp_path, tokens):
    write_domain(tmp_path, COLUMNS, [[prolong_sample(tokens)]])
    (found,) = read_all(tmp_path)
    numpy.testing.assert_array_equal(found["input_ids"], numpy.arange(tokens) % 1000)


def test_array_of_many_documents(tmp_path):
    write_domain(tmp_path, COLUMNS, [[prolong_sample(900, 300)]])
    assert read_all(tmp_path)[0]["indices"].shape == (300, 2)


@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        ("uint64", 1 << 63),
        ("int", -5),
        ("int32", -6),
        ("float32", 0.5),
        ("bytes", b"\x00\xff"),
        ("str", "é\u0301"),
        ("ndarray", numpy.array([[1, 2, 3]], numpy.int64)),
        ("ndarray:float32", numpy.array([0.5, -1], numpy.float32)),
        ("ndarray:uint8:2,3", numpy.arange(6, dtype=numpy.uint8).reshape(2, 3)),
    ],
    ids=str,
)
def test_other_encodings(tmp_path, encoding, value):
    write_domain(tmp_path, {"a": "str", "b": encoding, "c": "str"}, [[{"a": "x", "b": value, "c": "yz"}]])
    (found,) = read_all(tmp_path, ("a", "b", "c"))
    assert (found["a"], found["c"]) == ("x", "yz")
    assert (
        numpy.array_equal(found["b"], value)
        and numpy.asarray(found["b"]).dtype == numpy.asarray(value).dtype
        or (numpy.isscalar(value) and found["b"] == value)
    )


def test_columns_that_are_not_asked_for_need_no_decoder(tmp_path):
    (path,) = write_domain(tmp_path, {"a": "str", "b": "bytes"}, [[{"a": "x", "b": b"y"}]])
    for file in (path, tmp_path / "index.json"):  # same length, so offsets stay right
        file.write_bytes(file.read_bytes().replace(b'"bytes"]', b'"image"]'))
    assert read_all(tmp_path, ("a",)) == [{"a": "x"}]
    with pytest.raises(DataError, match="image"):
        read_all(tmp_path, ("b",))


def test_missing_column_is_left_out(tmp_path):
    columns = {name: encoding for name, encoding in COLUMNS.items() if name != "length"}
    write_domain(tmp_path, columns, [[prolong_sample(4)]])
    assert set(read_all(tmp_path)[0]) == {"domain", "indices", "input_ids"}


def test_an_unpacked_shard_is_read_when_the_packed_one_is_gone(tmp_path):
    (packed,) = write_domain(tmp_path, COLUMNS, [[prolong_sample(9)]], compression="gz")
    packed.with_suffix("").write_bytes(__import__("gzip").decompress(packed.read_bytes()))
    packed.unlink()
    assert read_all(tmp_path)[0]["length"] == 9


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0xFF]) + data[position + 1 :]


DAMAGE = {
    "cut": (lambda data: data[:-1], "size is"),
    "longer": (lambda data: data + b"\0", "size is"),
    "sample count": (lambda data: flip(data, 0), "header"),
    "offset": (lambda data: flip(data, 5), "offsets|header"),
    "last offset": (lambda data: flip(data, 12), "offsets"),
    "json": (lambda data: data.replace(b'{"column', b'["column', 1), "JSON header"),
    "column names": (lambda data: data.replace(b"indices", b"indexes", 1), "columns are not those"),
    "column size": (lambda data: flip(data, data.index(b"\x01\x00\x00\x00", 300)), "."),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_raw_shard_is_told_with_its_name(tmp_path, kind):
    (path,) = write_domain(tmp_path, COLUMNS, [[prolong_sample(40), prolong_sample(50)]])
    change, reason = DAMAGE[kind]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=reason) as error:
        read_all(tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("compression", [None, "gz"], ids=str)
def test_hashes_find_any_flipped_byte(tmp_path, compression):
    (path,) = write_domain(
        tmp_path, COLUMNS, [[prolong_sample(40)]], compression=compression, hashes=("md5",)
    )
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        path.write_bytes(flip(data, position))
        with pytest.raises(DataError, match="md5 is"):
            read_all(tmp_path)


def test_the_hubs_download_record_finds_a_flipped_byte(tmp_path):
    root = tmp_path / "long-context"
    (path,) = write_domain(root / "book", COLUMNS, [[prolong_sample(40)]])
    digest = ShardReader(read_index(root / "book")[0]).sha256
    note = root / ".cache/huggingface/download/book" / f"{path.name}.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{'a' * 40}\n{digest}\n1700000000.0\n")
    read_all(root / "book")
    path.write_bytes(flip(path.read_bytes(), -30 % path.stat().st_size))
    with pytest.raises(DataError, match="the hub's is"):
        read_all(root / "book")


def test_damaged_zstd_shard(tmp_path):
    pytest.importorskip("zstandard")
    (path,) = write_domain(tmp_path, COLUMNS, [[prolong_sample(40)]], compression="zstd:3")
    path.write_bytes(flip(path.read_bytes(), 6))
    with pytest.raises(DataError, match="cannot unpack|size is"):
        read_all(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda index: index.update(version=3), "version 3"),
        (lambda index: index.pop("shards"), "not an MDS index"),
        (lambda index: index["shards"][0].update(format="json"), "format 'json'"),
        (lambda index: index["shards"][0]["raw_data"]["hashes"].update(crc9="0"), "crc9"),
    ],
    ids=["version", "no shards", "format", "hash"],
)
def test_wrong_index(tmp_path, change, reason):
    write_domain(tmp_path, COLUMNS, [[prolong_sample(4)]])
    index = json.loads((tmp_path / "index.json").read_text())
    change(index)
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=reason):
        read_all(tmp_path)


def test_missing_index_and_unreadable_index(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*index\.json"):
        read_index(tmp_path)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(DataError, match="not an MDS index"):
        read_index(tmp_path)
