"""Tokenizers that turn text into ids and back: special tokens go by id, never by the look of the text.

`load_tokenizer(path)` knows a Hugging Face folder (or its tokenizer.json), a sentencepiece model, and a
tiktoken rank file of Llama-3 or Qwen. Every class has: `vocabulary` (ids in use), `begin_ids` and `end_ids`
(what stands at the ends of documents), `special_ids` (all ids that are not text), `end_of_document` (id to
write after a document), `encode(text) -> int32 array`, `decode(ids) -> text`, where ids hold no special ones,
and `keeps(text, ids)`, which tells whether encoding lost something of a text.
"""

import base64
import json
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy

from tools.data.files import DataError, naming

# Rank files hold no pattern and no special tokens: both come with the family, which the number of ranks
# tells.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FAMILIES = {  # ranks of the real file, pattern, special ids after the ranks: how many, begin, end
    "llama3": (128000, WORDS % "{1,3}", 256, 0, 1),
    "qwen": (151643, WORDS % "", 293, None, 0),
}
# A pre-token of the patterns above never holds a letter or digit followed by a blank, so text can be cut
# there without changing one id. Cuts bound the memory of a long document and the depth of the pattern
# matcher.
SAFE_CUT = re.compile(r"(?<=[^\W_])(?=[ \n\t])")
PIECE, LONGEST_PIECE = 100_000, 400_000  # characters
MARKER = re.compile(r"[<\[].+[>\]]", re.DOTALL)


class RankTokenizer:
    """A tiktoken rank file with the special tokens of its family."""

    def __init__(self, path: Path, family: str | None = None) -> None:
        """Load `path`. Raises DataError when it is not a rank file or belongs to no known family."""
        import tiktoken

        with naming("read", path):
            lines = path.read_bytes().split(b"\n")
        try:
            ranks = {
                base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)
            }
        except ValueError:
            raise DataError(f"{path}: not a tiktoken rank file (a line is not 'base64 rank')") from None
        family = family or next((name for name, known in FAMILIES.items() if known[0] == len(ranks)), None)
        if family is None:
            known = ", ".join(f"{name} ({row[0]})" for name, row in FAMILIES.items())
            raise DataError(
                f"{path}: {len(ranks)} ranks are of no known family: {known}; give llama3:FILE or qwen:FILE"
            )
        _, pattern, specials, begin, end = FAMILIES[family]
        first = max(ranks.values()) + 1
        self.vocabulary = first + specials
        self.special_ids = numpy.arange(first, self.vocabulary)
        self.begin_ids = [] if begin is None else [first + begin]
        self.end_of_document = first + end
        self.end_ids = [self.end_of_document]
        self._codec = tiktoken.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> numpy.ndarray:
        """The ids of `text` as plain text."""
        nothing = frozenset()
        parts = [
            self._codec.encode_to_numpy(piece, allowed_special=nothing, disallowed_special=nothing)
            for piece in cut(text)
        ]
        return numpy.concatenate(parts).astype(numpy.int32) if parts else numpy.empty(0, numpy.int32)

    def decode(self, ids: numpy.ndarray) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self._codec.decode_bytes(ids.tolist()).decode("utf-8", errors="replace")

    def keeps(self, text: str, ids: numpy.ndarray) -> bool:
        """Whether `ids`, which `text` was encoded to, say all of it."""
        return self.decode(ids) == text


def cut(text: str) -> Iterator[str]:
    """Pieces of PIECE to LONGEST_PIECE characters, cut where pre-tokens end when there is such a place."""
    begin = 0
    while begin < len(text):
        found = SAFE_CUT.search(text, begin + PIECE, begin + LONGEST_PIECE)
        end = found.start() if found else begin + LONGEST_PIECE
        yield text[begin:end]
        begin = end


class HuggingFaceTokenizer:
    """The tokenizer.json of a Hugging Face folder, with its normalizer: the ids that the model knows."""

    def __init__(self, path: Path) -> None:
        """Load tokenizer.json at `path` and the special tokens named beside it. Raises DataError."""
        from tokenizers import Tokenizer, decoders

        with naming("read", path):
            text = path.read_text(encoding="utf-8")
        try:
            model = json.loads(text)
            for token in model["added_tokens"]:
                # encode_special_tokens below covers special tokens; markers like <tool_call> are plain text
                # too.
                token["special"] = token["special"] or bool(MARKER.fullmatch(token["content"]))
            self._tokenizer = Tokenizer.from_str(json.dumps(model))
        except Exception as error:  # the library raises plain Exception for a file of another form
            raise DataError(f"{path}: not a Hugging Face tokenizer.json ({error})") from None
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._byte_level = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        special = {token["content"]: token["id"] for token in model["added_tokens"] if token["special"]}
        self.special_ids = numpy.array(sorted(special.values()), dtype=numpy.int64)
        self.vocabulary = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        names = _named_tokens(path.parent)
        if names.get("eos_token") is None or self._tokenizer.token_to_id(names["eos_token"]) is None:
            raise DataError(
                f"{path.parent}: names no eos_token; set it in tokenizer_config.json to end documents"
            )
        self.end_of_document = self._tokenizer.token_to_id(names["eos_token"])
        # Chat variants name another eos_token than the one that ended the documents of pre-training.
        ends = {names["eos_token"], "<|end_of_text|>", "<|endoftext|>"}
        self.end_ids = sorted({special[name] for name in ends if name in special} | {self.end_of_document})
        begin = names.get("bos_token")
        self.begin_ids = [special[begin]] if begin in special and special[begin] not in self.end_ids else []
        self.special_ids = numpy.union1d(self.special_ids, [*self.begin_ids, *self.end_ids])

    def encode(self, text: str) -> numpy.ndarray:
        """The ids of `text` as plain text, after the tokenizer's own normalization."""
        return numpy.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=numpy.int32)

    def decode(self, ids: numpy.ndarray) -> str:
        """The text of `ids`, without any clean-up of spaces."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def keeps(self, text: str, ids: numpy.ndarray) -> bool:
        """Whether `ids`, which `text` was encoded to, say all of it."""
        if self._byte_level:  # only normalization can lose anything, and decoding takes as long as encoding
            normalizer = self._tokenizer.normalizer
            if type(normalizer).__name__ == "NFC":  # as in Qwen; normalize_str keeps offsets and is slow
                return unicodedata.is_normalized("NFC", text)
            return normalizer is None or normalizer.normalize_str(text) == text
        return self.decode(ids) == text


def _named_tokens(folder: Path) -> dict[str, str | None]:
    """The bos_token and eos_token that a Hugging Face folder names; {} where no file does."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            config = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        tokens = {key: config.get(key) for key in ("bos_token", "eos_token")}
        if tokens["eos_token"]:
            return {
                key: token["content"] if isinstance(token, dict) else token for key, token in tokens.items()
            }
    return {}


class SentencePieceTokenizer:
    """A sentencepiece model; control pieces such as </s> are never made from text."""

    def __init__(self, path: Path) -> None:
        """Load `path`. Raises DataError when it is not a model or has no end-of-sentence piece."""
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path}: not a sentencepiece model ({str(error).strip()})") from None
        self.vocabulary = self._model.get_piece_size()
        self.end_of_document = self._model.eos_id()
        if self.end_of_document < 0:
            raise DataError(f"{path}: the model has no end-of-sentence piece to end documents with")
        self.end_ids = [self.end_of_document]
        self.begin_ids = [self._model.bos_id()] if self._model.bos_id() >= 0 else []
        control = [piece for piece in range(self.vocabulary) if self._model.is_control(piece)]
        self.special_ids = numpy.array(control, dtype=numpy.int64)

    def encode(self, text: str) -> numpy.ndarray:
        """The ids of `text` as plain text, after the model's own normalization."""
        return numpy.array(self._model.encode(text, out_type=int), dtype=numpy.int32)

    def decode(self, ids: numpy.ndarray) -> str:
        """The text of `ids`; byte pieces that are not UTF-8 become U+FFFD."""
        return self._model.decode(ids.tolist())

    def keeps(self, text: str, ids: numpy.ndarray) -> bool:
        """Whether `ids`, which `text` was encoded to, say all of it."""
        return self.decode(ids) == text


TextTokenizer = RankTokenizer | HuggingFaceTokenizer | SentencePieceTokenizer


def tokenizer_file(name: str) -> Path:
    """The file that `name` (a folder or a file, with or without a `family:` prefix) is loaded from.

    Raises DataError when there is none.
    """
    family, _, rest = name.partition(":")
    path = Path(rest if family in FAMILIES and rest else name)
    if path.is_dir():
        ranks = sorted(path.glob("*.tiktoken"))
        for file in (path / "tokenizer.json", path / "tokenizer.model", *ranks):
            if file.is_file():
                return file
        raise DataError(
            f"tokenizer {path}: the folder has no tokenizer.json, tokenizer.model or .tiktoken file"
        )
    if not path.is_file():
        raise DataError(
            f"tokenizer {name}: no such file or folder; give a Hugging Face folder, a sentencepiece model "
            "or a tiktoken rank file (`hf download NAME --local-dir DIR` fetches a folder)"
        )
    return path


def load_tokenizer(name: str) -> TextTokenizer:
    """The tokenizer at `name`, its kind told by its content. Raises DataError."""
    path = tokenizer_file(name)
    family = name.partition(":")[0]
    with naming("read", path), open(path, "rb") as stream:
        head = stream.read(512)
    try:
        if path.suffix == ".json":
            return HuggingFaceTokenizer(path)
        if family in FAMILIES or re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", head):
            return RankTokenizer(path, family if family in FAMILIES else None)
        if head.startswith(b"\n"):  # a model file is a protocol buffer whose first field is a piece
            return SentencePieceTokenizer(path)
    except ImportError as error:
        raise DataError(
            f"tokenizer {path}: needs the package {error.name}; pip install {error.name}"
        ) from None
    raise DataError(
        f"tokenizer {path}: neither a tokenizer.json, a sentencepiece model nor a tiktoken rank file"
    )
