"""Whole sequences of a given length, as token ids, out of text files or an indexed dataset."""

from pathlib import Path

import numpy
import torch

from tools.data.indexed import read_indexed
from tools.data.text_tokenizers import load_tokenizer


def from_files(
    files: list[Path], tokenizer: str, *, length: int, count: int, seed: int
) -> list[torch.Tensor]:
    """`count` sequences int64 [length] of text files, each a document. Raises DataError and ValueError."""
    codec = load_tokenizer(tokenizer)
    documents = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {file} as UTF-8 text: {error}; give another file") from None
        documents.append(numpy.append(codec.encode(text), codec.end_of_document))
    lengths = numpy.array([len(document) for document in documents])
    return _cut(numpy.concatenate(documents), lengths, length=length, count=count, seed=seed)


def from_indexed(prefix: Path, *, length: int, count: int, seed: int) -> list[torch.Tensor]:
    """`count` sequences int64 [length] of the dataset `prefix`.bin. Raises DataError and ValueError."""
    data = read_indexed(prefix)
    return _cut(data.ids, data.lengths, length=length, count=count, seed=seed)


def _cut(ids, lengths, *, length: int, count: int, seed: int) -> list[torch.Tensor]:
    """Sequences that begin with a document and stay in it, or run on where too few documents are so long.

    `lengths` are those of the documents, which lie end to end in `ids`.
    """
    starts = numpy.cumsum(lengths) - lengths
    fitting = starts[lengths >= length]
    if len(fitting) < count:
        fitting = starts[starts + length <= len(ids)]
    if len(fitting) < count:  # few documents, but long ones: begin inside them too
        fitting = numpy.arange(0, len(ids) - length + 1, length)
    if len(fitting) < count:
        raise ValueError(
            f"the text has {len(ids)} tokens, which is less than {count} sequences of {length}; give more "
            "text, or ask for fewer or shorter sequences"
        )
    chosen = numpy.sort(numpy.random.default_rng(seed).choice(fitting, count, replace=False))
    return [torch.from_numpy(ids[start : start + length].astype(numpy.int64)) for start in chosen]
