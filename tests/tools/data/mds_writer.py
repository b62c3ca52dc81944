"""A small MDS writer: what the tests need to make shards of every kind, sound or broken."""

import gzip
import hashlib
import json
import struct
from pathlib import Path

import numpy

FIXED = {"int": 8, "uint64": 8, "int32": 4, "float32": 4, "uint8": 1}


def array_bytes(value: numpy.ndarray) -> bytes:
    """An array as MDS stores it when its shape is free: header of the smallest width, dimensions, values."""
    width = next(w for w in range(4) if max(value.shape) < 1 << (8 << w))
    dimensions = numpy.array(value.shape, f"<u{1 << width}")
    return bytes([value.ndim << 2 | width]) + dimensions.tobytes() + value.tobytes()


def column_bytes(encoding: str, value: object) -> bytes:
    kind, _, detail = encoding.partition(":")
    if kind == "str":
        return value.encode()
    if kind == "bytes":
        return value
    if kind != "ndarray":
        return numpy.array(value, {"int": "int64"}.get(kind, kind)).tobytes()
    name, _, shape = detail.partition(":")
    if shape:
        return value.astype(name).tobytes()
    if name:
        return array_bytes(value.astype(name))
    codes = {"uint8": 8, "uint32": 32, "int64": 65, "float32": 34}
    return bytes([codes[value.dtype.name]]) + array_bytes(value)


def fixed_size(encoding: str) -> int | None:
    kind, _, detail = encoding.partition(":")
    name, _, shape = detail.partition(":")
    if kind == "ndarray" and shape:
        return int(numpy.prod([int(n) for n in shape.split(",")])) * numpy.dtype(name).itemsize
    return FIXED.get(kind)


def shard_bytes(columns: dict[str, str], samples: list[dict]) -> bytes:
    """A raw shard of `samples`, whose `columns` ({name: encoding}) are stored sorted by name."""
    names = sorted(columns)
    sizes = [fixed_size(columns[name]) for name in names]
    header = {
        "column_names": names,
        "column_encodings": [columns[name] for name in names],
        "column_sizes": sizes,
    }
    config = json.dumps({**header, "compression": None, "hashes": [], "size_limit": 1 << 26}).encode()
    rows = []
    for sample in samples:
        values = [column_bytes(columns[name], sample[name]) for name in names]
        free = [len(value) for value, size in zip(values, sizes, strict=True) if size is None]
        rows.append(struct.pack(f"<{len(free)}I", *free) + b"".join(values))
    start = 4 * (len(rows) + 2) + len(config)
    offsets = numpy.cumsum([start, *map(len, rows)]).astype("<u4")
    return struct.pack("<I", len(rows)) + offsets.tobytes() + config + b"".join(rows)


def pack(data: bytes, compression: str | None) -> bytes:
    if compression == "gz":
        return gzip.compress(data)
    import zstandard

    return zstandard.ZstdCompressor(level=int(compression.partition(":")[2])).compress(data)


def write_domain(
    folder: Path,
    columns: dict[str, str],
    shards: list[list[dict]],
    *,
    compression: str | None = None,
    hashes: tuple[str, ...] = (),
    procs: bool = False,
) -> list[Path]:
    """Write the shards of a domain and its index.json, in procNN-NN/ folders if `procs`; return the files."""
    entries, files = [], []
    for number, samples in enumerate(shards):
        raw = shard_bytes(columns, samples)
        base = f"proc{number}-{len(shards)}/shard.00000.mds" if procs else f"shard.{number:05d}.mds"
        end = f".{compression.partition(':')[0]}" if compression else ""
        stored = pack(raw, compression) if compression else raw
        path = folder / (base + end)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stored)
        files.append(path)

        def described(name: str, data: bytes) -> dict:
            digests = {algorithm: hashlib.new(algorithm, data).hexdigest() for algorithm in hashes}
            return {"basename": name, "bytes": len(data), "hashes": digests}

        names = sorted(columns)
        entries.append(
            {
                "column_names": names,
                "column_encodings": [columns[name] for name in names],
                "column_sizes": [fixed_size(columns[name]) for name in names],
                "compression": compression,
                "format": "mds",
                "hashes": list(hashes),
                "raw_data": described(base, raw),
                "zip_data": described(base + end, stored) if compression else None,
                "samples": len(samples),
                "size_limit": 1 << 26,
                "version": 2,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return files
