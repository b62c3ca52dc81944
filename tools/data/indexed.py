"""Megatron's indexed dataset format, written and read with numpy alone.

PREFIX.bin holds the ids of all sequences end to end; PREFIX.idx their lengths, byte offsets and groups.
Here a *sequence* is a document (or the piece of one that a sample holds). Megatron's GPTDataset shuffles
sequences and restricts attention to them under --dataloader-inter-document-masking. Where samples have an
exact length, a group (a "document" in Megatron's words) is one sample. Written here and not with Megatron's
builder because workers must not import torch, and because the builder keeps a Python object per sequence;
tests read it with Megatron.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy

from tools.data.files import DataError, naming, write_atomic

MAGIC = b"MMIDIDX\x00\x00"
TYPE_CODES = {numpy.dtype("int32"): 4, numpy.dtype("uint16"): 8}


def id_type(vocabulary: int) -> numpy.dtype:
    """The type that Megatron stores the ids of a vocabulary of that many ids in."""
    return numpy.dtype("uint16" if vocabulary < 65500 else "int32")


def write_index(path: Path, dtype: numpy.dtype, lengths: numpy.ndarray, groups: numpy.ndarray) -> None:
    """Write an .idx of sequences of `lengths` tokens; `groups` counts the sequences that belong together.

    Raises DataError when the file cannot be written.
    """
    pointers = numpy.zeros(len(lengths), dtype=numpy.int64)
    numpy.cumsum(lengths[:-1] * dtype.itemsize, out=pointers[1:])
    ends = numpy.concatenate([[0], numpy.cumsum(groups)]).astype(numpy.int64)
    head = MAGIC + struct.pack("<QBQQ", 1, TYPE_CODES[dtype], len(lengths), len(ends))
    write_atomic(path, head + lengths.astype(numpy.int32).tobytes() + pointers.tobytes() + ends.tobytes())


def pack(lengths: numpy.ndarray, seq_length: int) -> tuple[numpy.ndarray, numpy.ndarray, int]:
    """Cut documents laid end to end into samples of exactly `seq_length` tokens.

    Returns the lengths of the pieces in tokens, the number of pieces of each sample, and the number of
    tokens at the end that fill no sample. Example: pack([3, 5, 4], 4) is ([3, 1, 4, 4], [2, 1, 1], 0).
    """
    ends = numpy.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    samples = total // seq_length
    sample_ends = numpy.arange(1, samples + 1, dtype=numpy.int64) * seq_length
    cuts = numpy.union1d(ends[ends <= samples * seq_length], sample_ends)
    groups = numpy.diff(numpy.searchsorted(cuts, sample_ends, side="right"), prepend=0)
    return numpy.diff(cuts, prepend=0), groups, total - samples * seq_length


@dataclass(frozen=True)
class Indexed:
    """An indexed dataset: `ids` is all tokens, sequence i is ids[starts[i]:starts[i] + lengths[i]]."""

    ids: numpy.ndarray
    lengths: numpy.ndarray
    starts: numpy.ndarray
    group_ends: numpy.ndarray

    def sequence(self, number: int) -> numpy.ndarray:
        """The ids of one sequence."""
        return self.ids[self.starts[number] : self.starts[number] + self.lengths[number]]


def read_indexed(prefix: Path) -> Indexed:
    """Map `prefix`.bin and .idx into memory and check that they belong together. Raises DataError."""
    path = Path(f"{prefix}.idx")
    with naming("read", path):
        data = path.read_bytes()
    damaged = DataError(f"{path}: not a Megatron index, or a damaged one; write the dataset again")
    if len(data) < 34 or data[:9] != MAGIC:
        raise damaged
    version, code, sequences, bounds = struct.unpack_from("<QBQQ", data, 9)
    names = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
    if version != 1 or code not in names or len(data) < 34 + 12 * sequences + 8 * bounds:
        raise damaged
    dtype = numpy.dtype(names[code])
    lengths = numpy.frombuffer(data, numpy.int32, sequences, 34).astype(numpy.int64)
    pointers = numpy.frombuffer(data, numpy.int64, sequences, 34 + 4 * sequences)
    marks = numpy.frombuffer(data, numpy.int64, bounds, 34 + 12 * sequences)
    if not _consistent(lengths, pointers, marks):
        raise damaged
    path = Path(f"{prefix}.bin")
    with naming("read", path):
        size = path.stat().st_size
        end = int((pointers + lengths * dtype.itemsize).max()) if sequences else 0
        if end > size or size % dtype.itemsize:
            raise DataError(
                f"{path}: {size} bytes, its index needs {end}; the file is cut or of another dataset"
            )
        ids = numpy.memmap(path, dtype=dtype, mode="r") if size else numpy.empty(0, dtype)
    return Indexed(ids, lengths, pointers // dtype.itemsize, marks[1:])


def _consistent(lengths: numpy.ndarray, pointers: numpy.ndarray, marks: numpy.ndarray) -> bool:
    """Whether nothing is negative, and the groups between `marks` hold all sequences, none is empty."""
    far = 1 << 56  # bytes; sums with it cannot overflow
    inside = (lengths >= 0).all() and (pointers >= 0).all() and (pointers < far).all()
    ends = len(marks) > 0 and marks[0] == 0 and marks[-1] == len(lengths)
    return bool(inside and ends and (numpy.diff(marks) > 0).all())
