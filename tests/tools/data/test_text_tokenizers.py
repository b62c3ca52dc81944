"""Every kind of tokenizer: text comes back, what looks special stays text, wrong files are told."""

import json

import numpy
import pytest

from tests.tools.data.conftest import HARD_TEXT, LLAMA3, QWEN, needs_ranks
from tools.data import text_tokenizers
from tools.data.files import DataError
from tools.data.make_demo_data import byte_symbols
from tools.data.text_tokenizers import load_tokenizer


@pytest.fixture(scope="session")
def pieces(tmp_path_factory) -> str:
    """A sentencepiece model with byte fallback and no normalization."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text").write_text("\n".join(HARD_TEXT * 5))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "m"), vocab_size=500, byte_fallback=True,
       
        normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=0.98,
        hard_vocab_limit=False, minloglevel=2, model_type="bpe",
    )  # fmt: skip
    return str(folder / "m.model")


@pytest.fixture(params=["ranks", "folder", "pieces", "llama3", "qwen"])
def tokenizer(request, ranks, target):
    if request.param in ("llama3", "qwen"):
        path = {"llama3": LLAMA3, "qwen": QWEN}[request.param]
        if path is None:
            pytest.skip("needs the packages llama-models and dashscope")
        return load_tokenizer(str(path))
    if request.param == "pieces":
        return load_tokenizer(request.getfixturevalue("pieces"))
    return load_tokenizer({"ranks": ranks, "folder": target}[request.param])


@pytest.mark.parametrize("text", HARD_TEXT, ids=range(len(HARD_TEXT)))
def test_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == numpy.int32 and not numpy.isin(ids, tokenizer.special_ids).any()
    assert tokenizer.decode(ids) == text and tokenizer.keeps(text, ids)


def test_special_ids(tokenizer):
    special = [*tokenizer.begin_ids, *tokenizer.end_ids, tokenizer.end_of_document]
    assert numpy.isin(special, tokenizer.special_ids).all() and max(special) < tokenizer.vocabulary
    assert tokenizer.end_of_document in tokenizer.end_ids
    assert len(tokenizer.encode("")) == 0


@needs_ranks
def test_real_rank_files_have_the_known_ids():
    llama, qwen = load_tokenizer(str(LLAMA3)), load_tokenizer(str(QWEN))
    assert (llama.begin_ids, llama.end_ids, llama.vocabulary) == ([128000], [128001], 128256)
    assert (qwen.begin_ids, qwen.end_of_document, qwen.vocabulary) == ([], 151643, 151936)
    assert qwen.encode("Hello world 123").tolist() == [9707, 1879, 220, 16, 17, 18]
    assert llama.encode("Hello world 123").tolist() == [9906, 1917, 220, 4513]


@needs_ranks
@pytest.mark.parametrize("path", [LLAMA3, QWEN], ids=["llama3", "qwen"])
def test_cuts_change_no_id(path, monkeypatch):
    tokenizer = load_tokenizer(str(path))
    text = "".join(HARD_TEXT) * 40
    whole = tokenizer.encode(text)
    for size in (1, 7, 300):
        monkeypatch.setattr(text_tokenizers, "PIECE", size)
        assert len(list(text_tokenizers.cut(text))) > len(text) / (size + 400)
        numpy.testing.assert_array_equal(tokenizer.encode(text), whole)


def test_a_cut_is_forced_where_no_word_ends(ranks, monkeypatch):
    monkeypatch.setattr(text_tokenizers, "PIECE", 10)
    monkeypatch.setattr(text_tokenizers, "LONGEST_PIECE", 40)
    for text in (" " * 1000, "x" * 1000, "=\n" * 500):
        assert max(map(len, text_tokenizers.cut(text))) <= 51 and "".join(text_tokenizers.cut(text)) == text
        assert load_tokenizer(ranks).decode(load_tokenizer(ranks).encode(text)) == text


def test_a_cut_inside_a_character_becomes_replacement_characters(ranks):
    tokenizer = load_tokenizer(ranks)
    ids = tokenizer.encode("a中b")
    assert tokenizer.decode(ids[:3]) == b"a\xe4\xb8".decode(errors="replace") == "a\ufffd"


def hugging_face(folder, added: list[dict], config: dict) -> str:
    """A byte-level tokenizer.json with added tokens, whose ids follow the 256 bytes, and its config."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    model = Tokenizer(models.BPE(vocab={symbol: n for n, symbol in enumerate(byte_symbols())}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder, model.normalizer = decoders.ByteLevel(), normalizers.NFC()
    for token in added:
        model.add_tokens([AddedToken(token["content"], special=token["special"], normalized=False)])
    folder.mkdir(exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_added_tokens_are_text_in_text(tmp_path):
    added = [{"content": "<|endoftext|>", "special": True}, {"content": "<tool_call>", "special": False},
             {"content": "    ", "special": False}]  # fmt: skip
    tokenizer = load_tokenizer(
        hugging_face(tmp_path / "t", added, {"eos_token": {"content": "<|endoftext|>"}})
    )
    assert len(tokenizer.encode("<|endoftext|><tool_call>")) == len("<|endoftext|><tool_call>")
    assert tokenizer.encode("    x").tolist() == [258, ord("x")]  # blanks are an ordinary token, not a marker
    assert tokenizer.special_ids.tolist() == [256, 257] and tokenizer.end_of_document == 256
    assert tokenizer.encode("e\u0301").tolist() == list("é".encode())  # the target's own normalization holds
    assert not tokenizer.keeps("e\u0301", tokenizer.encode("e\u0301")) and tokenizer.keeps(
        "é", tokenizer.encode("é")
    )


def test_a_chat_variant_still_knows_the_end_of_pre_training_documents(tmp_path):
    added = [
        {"content": token, "special": True}
        for token in ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
    ]
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    tokenizer = load_tokenizer(hugging_face(tmp_path / "t", added, config))
    assert (tokenizer.begin_ids, tokenizer.end_ids, tokenizer.end_of_document) == ([256], [257, 258], 258)


def test_our_ids_are_those_of_transformers(target):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(target)
    ours = load_tokenizer(target)
    for text in HARD_TEXT:
        if "<|endoftext|>" not in text:
            assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.end_of_document == theirs.eos_token_id


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none", None, "no such file or folder"),
        ("empty", b"", "neither"),
        ("text.model", b"just some text\n", "neither"),
        ("tokenizer.json", b"{}", "not a Hugging Face"),
        ("pieces.model", b"\n\x0egarbage", "not a sentencepiece model"),
        ("few.tiktoken", b"YQ== 0\nYg== 1\n", "2 ranks are of no known family"),
        ("broken.tiktoken", b"YQ== 0\nYg==\n", "not a tiktoken rank file"),
    ],
)
def test_unknown_tokenizers_are_told(tmp_path, name, content, reason):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=reason) as error:
        load_tokenizer(str(path))
    assert str(path) in str(error.value)


def test_folders_without_what_is_needed(tmp_path):
    with pytest.raises(DataError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))
    folder = hugging_face(tmp_path / "t", [{"content": "<s>", "special": True}], {})
    with pytest.raises(DataError, match="names no eos_token"):
        load_tokenizer(folder)
