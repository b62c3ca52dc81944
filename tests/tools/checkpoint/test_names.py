"""The table of names: its own inverse, and what Megatron itself writes and reads."""

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_mtrain.presets import NAMES, model_shape
from tests.tools.checkpoint.ranks import train
from tools.checkpoint.names import LAYERS, QKV_WEIGHT, Row, extra_states, table
from tools.loaded_model import RUN


def test_query_key_and_value_are_dealt_by_key_head():
    """The drawing in names.py: 4 query heads and 2 key heads, of one row each."""
    row = Row(f"{LAYERS}qkv", tuple(QKV_WEIGHT.split()), ((4, 1), (2, 1), (2, 1)), groups=2)
    query, key, value = (torch.tensor(rows)[:, None] for rows in ([0, 1, 2, 3], [10, 11], [20, 21]))
    joined = row.join([query, key, value])
    assert joined.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert [part.flatten().tolist() for part in row.split(joined)] == [[0, 1, 2, 3], [10, 11], [20, 21]]


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3-0.6b"])
def test_split_undoes_join(name):
    for row in table(model_shape(name))[1:]:
        parts = [torch.rand(size) for size in row.shapes]
        joined = row.join(parts)
        assert joined.shape == row.shape
        assert all(torch.equal(*pair) for pair in zip(row.split(joined), parts, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_names_are_unique(name):
    rows = table(model_shape(name))
    hf = [name for row in rows for name in row.hf]
    assert len(set(hf)) == len(hf)
    assert len({row.megatron for row in rows}) == len(rows)


def test_local_layers_have_transformer_engine_keys():
    """Transformer Engine keeps two norms in the linear layers after them; Megatron renames those of local
    layers."""
    renamed = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.sharded_state_dict_keys_map
    norms = {f"{LAYERS}{prefix}weight" for prefix in renamed.values()}
    keys = {row.megatron for row in table(model_shape("qwen2.5-0.5b"))}
    assert norms == {key for key in keys if "layer_norm_" in key}


@pytest.mark.parametrize("name", ["qwen2 untied gqa1", "qwen3 untied gqa4"])
def test_megatron_writes_these_keys(ranks, converted, tmp_path, name):
    hf, *_ = converted(name)
    files = ["--model", str(hf), "--save", str(tmp_path / "made"), "--seq-length", "256"]
    ranks.run(1, train, [*RUN[: RUN.index("--exit-on-missing-checkpoint")], *files])
    entries = FileSystemReader(tmp_path / "made" / "iter_0000001").read_metadata().state_dict_metadata
    model = {key: entry for key, entry in entries.items() if not key.startswith("optimizer")}
    shape = model_shape(str(hf))
    tensors = {key for key, entry in model.items() if isinstance(entry, TensorStorageMetadata)}
    assert tensors == {row.megatron for row in table(shape)}
    states = {key for key in model if "_extra_state" in key}
    assert states <= {f"{key}/shard_{i}_{count}" for key, i, count in extra_states(shape)}
