"""Which files of JSON Lines, Parquet and plain text an input names, and how they are cut into units."""

import glob
import os
from pathlib import Path

from tools.data.files import DataError, naming
from tools.data.text_units import FilesUnit, LinesUnit, RowsUnit

# Bytes of input in a unit: seconds of work, so that a kill costs little and the cores end together.
RANGE = 16 << 20
SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst"),
    "parquet": (".parquet",),
    "text": (".txt", ".md", ".rst"),
}


def make_units(inputs: list[str], form: str | None, key: str) -> list[LinesUnit | RowsUnit | FilesUnit]:
    """The units of files, folders (searched by suffix) and patterns, in that order; an input is a domain.

    `form` is jsonl, parquet, text, or None for each file's suffix. Raises DataError.
    """
    units = []
    for entry in inputs:
        domain = Path(entry).name.partition(".")[0] if os.path.isfile(entry) else Path(entry).name
        for kind, path in find_files(entry, form):
            with naming("read", path), open(path, "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
            if kind == "jsonl":
                step = size if path.suffix in (".gz", ".zst") else RANGE
                begins = range(0, size, max(step, 1))
                units += [LinesUnit(domain, path, begin, min(begin + step, size), key) for begin in begins]
            elif kind == "parquet":
                units += row_groups(domain, path, key)
            elif isinstance(units[-1] if units else None, FilesUnit) and units[-1].domain == domain \
                    and units[-1].size + size <= RANGE:  # fmt: skip
                units[-1] = FilesUnit(domain, (*units[-1].paths, path), units[-1].size + size)
            else:
                units.append(FilesUnit(domain, (path,), size))
    if not units:
        raise DataError(f"--input {' '.join(inputs)}: the files are empty")
    return units


def find_files(entry: str, form: str | None) -> list[tuple[str, Path]]:
    """The form and path of every file that an input names, in the order of their names. Raises DataError."""
    path = Path(entry)
    if path.is_dir():
        paths = [found for found in sorted(path.rglob("*")) if found.is_file() and form_of(found, form, True)]
    else:
        paths = (
            [path] if path.exists() else [Path(found) for found in sorted(glob.glob(entry, recursive=True))]
        )
    if not paths:
        raise DataError(
            f"--input {entry}: no such file, or no {form or 'jsonl, parquet or text'} files in it"
        )
    return [(form_of(path, form, False), path) for path in paths]


def form_of(path: Path, form: str | None, searching: bool) -> str | None:
    """The form to read a file as; None for another suffix when searching a folder. Raises DataError."""
    known = next((name for name, ends in SUFFIXES.items() if path.name.endswith(ends)), None)
    if searching:
        if form == "text" and known is None:
            return form  # asked for by name: source code and the like, whatever its suffix
        return known if form in (None, known) else None
    if form is None and known is None:
        raise DataError(f"{path}: unknown suffix; say --format jsonl, parquet or text")
    return form or known


def row_groups(domain: str, path: Path, key: str) -> list[RowsUnit]:
    """The units of a Parquet file. Raises DataError when it is damaged or has no text column `key`."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"{path}: Parquet files need the package pyarrow; pip install pyarrow") from None
    try:
        with naming("read", path), ParquetFile(path) as file:
            fields, footer = file.schema_arrow, file.metadata
            types = {field.name: str(field.type) for field in fields}
            if types.get(key) not in ("string", "large_string"):
                columns = ", ".join(f"{name} ({kind})" for name, kind in types.items())
                raise DataError(f"{path}: no column {key!r} of strings, see --text-key; there are: {columns}")
            sizes = [footer.row_group(number).total_byte_size for number in range(footer.num_row_groups)]
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a Parquet file, or a damaged one ({error})") from None
    return [RowsUnit(domain, path, number, size, key) for number, size in enumerate(sizes)]
