"""Damaged files: whatever they hold, a reader answers with a value or with one line that names the file."""

import json
import warnings
from pathlib import Path

import numpy
import pytest
import yaml
from hypothesis import strategies as st

from megatron_mtrain import AttentionConfig
from megatron_mtrain.config import METHODS, SHIPPED
from megatron_mtrain.pattern import PATTERNS, load_pattern
from tests.reliability.draws import SEEDS, damage, fuzz
from tests.tools.data.conftest import COLUMNS
from tests.tools.data.mds_writer import write_domain
from tools.data import inspect_indexed
from tools.data.files import DataError
from tools.data.indexed import read_indexed, write_index
from tools.data.mds import ShardReader, read_index

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-3, 3), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=1),
    st.sampled_from(["zigzag", "stripe", "Qwen2.5_3B_flex_0.90", "x" * 300, "\0", "..", 128, 16, 4096]),
)
XATTN = "implementation: stripe\ngranularity: 128\nstride: 16\nnorm: 1\nsoftmax: true\nthreshold: 0.9\n"


@pytest.fixture
def outcome(tmp_path):
    """Calls a reader; its error must be one of `errors`, of one line that has `word` in it."""

    def call(read, errors, word=""):
        try:
            return read()
        except errors as error:
            message = str(error)
            assert message and "\n" not in message and word in message, message
            return None

    return call


def test_yaml_files(tmp_path, outcome):
    """Edited copies of every shipped file and of the published forms."""
    texts = [path.read_bytes() for path in SHIPPED.glob("*.yaml")]
    texts += [XATTN.encode(), b"moba_chunk_size: 4096\nmoba_topk: 12\n"]
    path = tmp_path / "settings.yaml"

    def check(attn_type, which, seed):
        path.write_bytes(damage(texts[which % len(texts)], seed))
        outcome(lambda: AttentionConfig.from_yaml(attn_type, path), ValueError, "")

    fuzz(900, check, attn_type=st.sampled_from(list(METHODS)), which=st.integers(0, 99), seed=SEEDS)


def test_yaml_values(tmp_path, outcome):
    """Any value for any field: what is accepted comes back from its own YAML."""
    names = ["implementation", "block_size", "backend", "reuse", "pattern_config_name", "last_q"]
    names += ["sink_tokens", "moba_chunk_size", "moba_topk", "granularity", "stride", "norm", "threshold"]
    names += ["keep_recent", "chunk_size", "kdb", "select_mode", "nonsense"]
    good = {
        "minfer": {"pattern_config_name": "Qwen2.5_0.5B_flex_0.90"},
        "moba": {"moba_chunk_size": 256, "moba_topk": 2},
        "xattn": {"granularity": 128},
    }
    path = tmp_path / "settings.yaml"

    def check(attn_type, changed):
        path.write_text(yaml.safe_dump(good.get(attn_type, {}) | changed))
        config = outcome(lambda: AttentionConfig.from_yaml(attn_type, path), ValueError, "")
        if config is not None:
            path.write_text(config.to_yaml())
            assert AttentionConfig.from_yaml(attn_type, path) == config

    values = st.dictionaries(st.sampled_from(names), ODD, max_size=2)
    fuzz(900, check, attn_type=st.sampled_from(list(METHODS)), changed=values)


def test_pattern_files(tmp_path, outcome):
    whole = json.loads((PATTERNS / "Qwen2.5_0.5B_flex_0.90.json").read_text())[:2]
    whole[1]["3"] = ["vertical_and_slash", 30, 40, 1.0]
    text = json.dumps(whole).encode()

    def check(seed):
        path = tmp_path / f"{seed}.json"
        path.write_bytes(damage(text, seed))
        pattern = outcome(lambda: load_pattern(str(path)), ValueError, path.name)
        path.unlink()
        heads = [head for layer in pattern or () for head in layer]
        assert all(0 <= head.vertical_cap < 2**31 and 0 <= head.slash_cap < 2**31 for head in heads)

    fuzz(800, check, seed=SEEDS)


def test_pattern_entries(tmp_path, outcome):
    def check(entry, seed):
        path = tmp_path / f"{seed}.json"
        path.write_text(json.dumps([{"0": entry}]))
        outcome(lambda: load_pattern(str(path)), ValueError, path.name)
        path.unlink()

    names = st.sampled_from(["vertical_and_slash", "flex_vertical_and_slash", "other", 3, None])
    part = st.one_of(ODD, st.tuples(st.floats(0, 1), st.integers(-2, 2**33)).map(list))
    fuzz(500, check, entry=st.tuples(names, part, part, ODD).map(list), seed=SEEDS)


def mds_domain(folder: Path, compression, hashes) -> list[Path]:
    """A small domain of three samples, as ProLong's."""
    rows = []
    for tokens in (7, 40, 300):
        bounds = numpy.array([[0, 3], [3, tokens]])
        rows.append(
            {"domain": ".", "indices": bounds, "input_ids": numpy.arange(tokens) % 90, "length": tokens}
        )
    return write_domain(folder, COLUMNS, [rows], compression=compression, hashes=hashes)


def read_domain(folder: Path) -> int:
    """Reads all samples; their number."""
    shards = read_index(folder)
    return sum(
        len([reader.sample(n, tuple(COLUMNS)) for n in range(shard.samples)])
        for shard in shards
        for reader in [ShardReader(shard)]
    )


@pytest.mark.parametrize("compression", [None, "gz"])
def test_mds_shards(tmp_path, outcome, compression):
    """Bytes of a shard change, and their size and hash in index.json with them: only the shard can tell."""
    (path,) = mds_domain(tmp_path, compression, ())
    data, index = path.read_bytes(), json.loads((tmp_path / "index.json").read_text())
    entry = index["shards"][0]["zip_data" if compression else "raw_data"]

    def check(seed):
        damaged = damage(data, seed)
        path.write_bytes(damaged)
        entry["bytes"] = len(damaged)
        (tmp_path / "index.json").write_text(json.dumps(index))
        outcome(lambda: read_domain(tmp_path), DataError, path.name)

    fuzz(700, check, seed=SEEDS)


def test_mds_index_files(tmp_path, outcome):
    mds_domain(tmp_path, "gz", ("sha1",))
    path = tmp_path / "index.json"
    data = path.read_bytes()

    def check(seed):
        path.write_bytes(damage(data, seed))
        outcome(lambda: read_domain(tmp_path), DataError, "")

    fuzz(800, check, seed=SEEDS)


def test_mds_index_values(tmp_path, outcome):
    mds_domain(tmp_path, "gz", ("sha1",))
    path = tmp_path / "index.json"
    whole = json.loads(path.read_text())

    def check(name, value):
        index = json.loads(json.dumps(whole))
        entry = index["shards"][0]
        (entry if name in entry else entry["zip_data"] if name in entry["zip_data"] else index)[name] = value
        path.write_text(json.dumps(index))
        outcome(lambda: read_domain(tmp_path), DataError, "")

    names = [*whole, *whole["shards"][0], "basename", "bytes"]
    fuzz(400, check, name=st.sampled_from(names), value=ODD)


def indexed_dataset(folder: Path) -> Path:
    """A dataset of five sequences in three groups."""
    lengths, groups = numpy.array([3, 1, 9, 4, 6]), numpy.array([2, 1, 2])
    write_index(folder / "text.idx", numpy.dtype("int32"), lengths, groups)
    (folder / "text.bin").write_bytes(numpy.arange(23, dtype="int32").tobytes())
    return folder / "text"


@pytest.mark.parametrize("file", ["text.idx", "text.bin"])
def test_indexed_datasets(tmp_path, outcome, monkeypatch, capsys, file):
    """What the reader accepts, inspect_indexed can show."""
    prefix, path = indexed_dataset(tmp_path), tmp_path / file
    data = path.read_bytes()
    monkeypatch.setattr("sys.argv", ["inspect_indexed", str(prefix)])

    def show():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = read_indexed(prefix)
            assert all(len(found.sequence(n)) == length for n, length in enumerate(found.lengths))
            inspect_indexed.main()

    def check(seed):
        path.write_bytes(damage(data, seed))
        outcome(show, DataError)
        capsys.readouterr()

    fuzz(600, check, seed=SEEDS)
