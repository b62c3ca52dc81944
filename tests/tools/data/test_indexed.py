"""The indexed dataset format: Megatron reads what we write, and packing is what a plain loop does."""

import numpy
import pytest

from tools.data.files import DataError
from tools.data.indexed import id_type, pack, read_indexed, write_index


def write(prefix, sequences: list[list[int]], groups: list[int], dtype: str) -> None:
    ids = numpy.array(sum(sequences, []), dtype)
    ids.tofile(f"{prefix}.bin")
    lengths = numpy.array([len(sequence) for sequence in sequences])
    write_index(prefix.with_name(f"{prefix.name}.idx"), numpy.dtype(dtype), lengths, numpy.array(groups))


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_megatron_reads_it(tmp_path, dtype):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    sequences = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 65000]]
    write(tmp_path / "d", sequences, [3, 1], dtype)
    theirs, ours = IndexedDataset(str(tmp_path / "d")), read_indexed(tmp_path / "d")
    assert (
        [theirs[n].tolist() for n in range(4)] == sequences == [ours.sequence(n).tolist() for n in range(4)]
    )
    assert theirs.document_indices.tolist() == [0, 3, 4] and ours.group_ends.tolist() == [3, 4]
    assert theirs[0].dtype == dtype


def test_our_index_is_byte_for_byte_megatrons(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=numpy.int32)
    builder.add_document(numpy.arange(5), [2, 3])
    builder.add_document(numpy.arange(4), [4])
    builder.finalize(str(tmp_path / "m.idx"))
    write(tmp_path / "d", [[0, 1], [2, 3, 4], [0, 1, 2, 3]], [2, 1], "int32")
    for end in ("bin", "idx"):
        assert (tmp_path / f"d.{end}").read_bytes() == (tmp_path / f"m.{end}").read_bytes()


@pytest.mark.parametrize("vocabulary", [257, 65499, 65500, 151936])
def test_id_type_is_megatrons(vocabulary):
    from megatron.core.datasets.indexed_dataset import DType

    assert id_type(vocabulary) == DType.optimal_dtype(vocabulary)


def pack_by_hand(lengths: list[int], size: int) -> tuple[list[int], list[int], int]:
    pieces, groups, room = [], [], 0
    for length in lengths:
        while length:
            if room == 0:
                groups.append(0)
                room = size
            piece = min(length, room)
            pieces.append(piece)
            groups[-1] += 1
            room, length = room - piece, length - piece
    if room:
        left = sum(pieces[len(pieces) - groups[-1] :])
        return pieces[: len(pieces) - groups[-1]], groups[:-1], left
    return pieces, groups, 0


@pytest.mark.parametrize("seed", range(8))
def test_pack_is_what_a_loop_does(seed):
    rng = numpy.random.default_rng(seed)
    lengths = rng.integers(1, 40, rng.integers(1, 30))
    for size in (1, 5, 16, 1000):
        pieces, groups, left = pack(lengths, size)
        assert (pieces.tolist(), groups.tolist(), left) == pack_by_hand(lengths.tolist(), size)
        if len(groups):
            assert (numpy.add.reduceat(pieces, numpy.cumsum(groups) - groups) == size).all()


def test_damaged_datasets_are_told(tmp_path):
    write(tmp_path / "d", [[1, 2, 3], [4]], [1, 1], "int32")
    index, ids = (tmp_path / "d.idx").read_bytes(), (tmp_path / "d.bin").read_bytes()
    for path, data, reason in (
        ("d.idx", index[:-1], "not a Megatron index"),
        ("d.idx", b"X" + index[1:], "not a Megatron index"),
        ("d.idx", b"", "not a Megatron index"),
        ("d.bin", ids[:-4], "12 bytes, its index needs 16"),
    ):
        (tmp_path / "d.idx").write_bytes(index)
        (tmp_path / "d.bin").write_bytes(ids)
        (tmp_path / path).write_bytes(data)
        with pytest.raises(DataError, match=reason) as error:
            read_indexed(tmp_path / "d")
        assert path in str(error.value)
    with pytest.raises(DataError, match="cannot read"):
        read_indexed(tmp_path / "other")
