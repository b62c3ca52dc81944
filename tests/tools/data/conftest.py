"""Small tokenizers, ProLong-shaped input made with them; the real sample and rank files if they exist."""

import base64
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from tests.tools.data.mds_writer import write_domain
from tools.data.files import run_tool
from tools.data.make_demo_data import save_tokenizer
from tools.data.text_tokenizers import load_tokenizer

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = Path(__file__).with_name("prolong_sample")
COLUMNS = {"domain": "str", "indices": "ndarray:uint32", "input_ids": "ndarray:uint32", "length": "int"}
HARD_TEXT = [
    "plain words, and a 2,048th line\nwith\ttabs\r\nand CRLF\f",
    "<|endoftext|> <|begin_of_text|><s></s>[PAD] <tool_call> <|im_end|>",
    "e\u0301 \ufb01 \u212b decomposed , spaces before punctuation ! n't",
    "中文字符 Кириллица العربية हिन्दी 👩‍👩‍👧‍👦 ❤️ 𝔘𝔫𝔦 \u00a0\u200b",
    " " * 37 + "indent\n\n\n   \n" + "=" * 80,
    " leading and trailing ",
]


def packaged(package: str, name: str) -> Path | None:
    """A file of an installed package, found without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0]) / name if folders else None
    return path if path and path.is_file() else None


LLAMA3 = packaged("llama_models", "llama3/tokenizer.model")
QWEN = packaged("dashscope", "resources/qwen.tiktoken")
needs_ranks = pytest.mark.skipif(
    not (LLAMA3 and QWEN), reason="needs the packages llama-models and dashscope"
)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory) -> str:
    """A rank file of Llama-3's kind with every byte and some merges: special ids begin at 262."""
    tokens = [bytes([n]) for n in range(256)] + [b" t", b" th", b" the", b"in", b"ing", b"er"]
    path = tmp_path_factory.mktemp("ranks") / "small.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % n for n, t in enumerate(tokens)))
    return f"llama3:{path}"


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> str:
    """A Hugging Face folder: one token a byte, end of document 256."""
    folder = tmp_path_factory.mktemp("target")
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="session")
def prolong(tmp_path_factory, ranks) -> tuple[Path, dict[str, list[list[tuple[str, bool]]]]]:
    """Two domains of 6 and 9 samples, and what they hold: {domain: [[(text, whether it ended)]]}."""
    source, root, rng = load_tokenizer(ranks), tmp_path_factory.mktemp("prolong"), random.Random(3)
    begin, end = source.begin_ids[0], source.end_of_document
    expected = {}
    for name, shards, options in (
        ("book-64", [3, 2, 1], {"procs": True, "hashes": ("sha1",)}),
        ("code-64", [4, 5], {"compression": "gz"}),
    ):
        columns = {key: value for key, value in COLUMNS.items() if name.startswith("book") or key != "length"}
        expected[name], made = [], []
        for size in shards:
            made.append([])
            for _ in range(size):
                documents = [
                    (rng.choice(HARD_TEXT) * rng.randint(1, 3), rng.random() < 0.7)
                    for _ in range(rng.randint(1, 4))
                ]
                parts = [
                    [begin, *source.encode(text), *([end] if ended else [])] for text, ended in documents
                ]
                bounds = numpy.cumsum([0, *map(len, parts)])
                made[-1].append(
                    {
                        "domain": ".",
                        "indices": numpy.stack([bounds[:-1], bounds[1:]], axis=1),
                        "input_ids": numpy.concatenate(parts),
                        "length": int(bounds[-1]),
                    }
                )
                expected[name].append(documents)
        write_domain(root / name, columns, made, **options)
    return root, expected


@pytest.fixture
def run(monkeypatch, capsys):
    """Call a tool's main in this process: run(module, *arguments) gives (exit code, message, output)."""

    def call(module, *arguments) -> tuple[int, str, str]:
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            run_tool(name, module.main)
        except SystemExit as stop:
            message = stop.code if isinstance(stop.code, str) else capsys.readouterr().err.strip()
            return (1 if isinstance(stop.code, str) else stop.code), message, capsys.readouterr().out
        return 0, "", capsys.readouterr().out

    return call


@pytest.fixture
def command():
    """Start a tool as users do: command("tools/data/x.py", ...) gives a CompletedProcess."""

    def call(script: str, *arguments, **options) -> subprocess.CompletedProcess:
        start = ["-m", script] if not script.endswith(".py") else [str(ROOT / script)]
        line = [sys.executable, *start, *map(str, arguments)]
        return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=120, **options)

    return call


def manifest(prefix: Path) -> dict:
    """The manifest beside a dataset."""
    return json.loads(Path(f"{prefix}.json").read_text())
