import json

import pytest

from megatron_mtrain import AttentionConfig
from megatron_mtrain.config import ATTN_TYPES
from megatron_mtrain.pattern import HeadPattern, load_pattern, shipped_patterns


def test_the_published_minfer_file_works_as_it_is(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("pattern_config_name: Qwen2.5_3B_flex_0.90\nimplementation: stripe\n")
    config = AttentionConfig.from_yaml("minfer", str(file))
    assert (config.layout, config.block_size, config.two_level) == ("stripe", 128, False)
    assert (config.method.last_q, config.method.sink_tokens, config.method.local_window) == (64, 30, 100)
    assert config.method.pattern[35][15] == HeadPattern(0.9, 4096, 0.9, 4096)


@pytest.mark.parametrize(
    ("name", "layers", "heads"),
    [("Qwen2.5_0.5B", 24, 14), ("Qwen2.5_1.5B", 28, 12), ("Qwen2.5_3B", 36, 16), ("Qwen2.5_7B", 28, 28)],
)
@pytest.mark.parametrize("share", [0.90, 0.95])
def test_shipped_patterns(name, layers, heads, share):
    pattern = load_pattern(f"{name}_flex_{share:.2f}")
    assert len(pattern) == layers
    assert all(layer == (HeadPattern(share, 4096, share, 4096),) * heads for layer in pattern)


def test_shipped_files_all_load():
    from megatron_mtrain.config import SHIPPED

    names = [path.stem for path in SHIPPED.glob("*.yaml")]
    assert names
    for name in names:
        assert AttentionConfig.from_yaml(name.split("_")[0], name).attn_type == name.split("_")[0]


def test_yaml_round_trip(tmp_path):
    fields = {"pattern_config_name": "Qwen2.5_7B_flex_0.95", "implementation": "dr_stripe", "last_q": 32}
    config = AttentionConfig.from_dict("minfer", fields)
    file = tmp_path / "b.yaml"
    file.write_text(config.to_yaml())
    assert AttentionConfig.from_yaml("minfer", file) == config
    assert config.two_level
    assert config.layout == "stripe"


def test_layouts_of_the_exact_methods():
    assert AttentionConfig.from_dict("zigzag_ring").layout == "zigzag"
    assert AttentionConfig.from_dict("stripe_ring").layout == "stripe"
    assert AttentionConfig.from_dict("dense", {"implementation": "zigzag"}).layout == "zigzag"


MINFER = {"pattern_config_name": "Qwen2.5_3B_flex_0.90"}


@pytest.mark.parametrize(
    ("attn_type", "fields", "message"),
    [
        ("flash", {}, "unknown attn_type 'flash'; choose one of dense, zigzag_ring, stripe_ring, minfer"),
        (
            "minfer",
            {**MINFER, "implementation": "ring"},
            "unknown implementation 'ring'.*zigzag, stripe, dr_stripe",
        ),
        ("minfer", {**MINFER, "lastq": 3}, "unknown field 'lastq' for attn_type minfer; allowed: .*last_q"),
        ("minfer", {}, "needs pattern_config_name.*Qwen2.5_3B_flex_0.90"),
        ("minfer", {"pattern_config_name": "Qwen9"}, "'Qwen9' is neither a file nor a shipped name"),
        ("minfer", {"pattern_config_name": 3}, "pattern_config_name 3"),
        ("minfer", {**MINFER, "last_q": 0}, "last_q 0 must be a whole number of at least 1"),
        ("minfer", {**MINFER, "sink_tokens": -1}, "sink_tokens -1"),
        ("minfer", {**MINFER, "local_window": 1.5}, "local_window 1.5"),
        ("minfer", {**MINFER, "last_q": True}, "last_q True"),
        ("minfer", {**MINFER, "block_size": 0}, "block_size 0"),
        ("minfer", {**MINFER, "block_size": "128"}, "block_size '128'"),
        ("minfer", {**MINFER, "backend": "cuda"}, "unknown backend 'cuda'"),
        ("dense", {"last_q": 1}, "unknown field 'last_q' for attn_type dense"),
        (
            "stripe_ring",
            {"implementation": "zigzag"},
            "does not fit attn_type 'stripe_ring', which is stripe",
        ),
    ],
)
def test_refuses_fields(attn_type, fields, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig.from_dict(attn_type, fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not readable YAML"),
        ("- a\n", "must hold `name: value` lines; it holds a list"),
        ("pattern_config_name: Qwen2.5_3B_flex_0.90\nvertical: 3\n", "bad.yaml: unknown field 'vertical'"),
    ],
)
def test_refuses_yaml(tmp_path, text, message):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        AttentionConfig.from_yaml("minfer", file)


def test_yaml_runs_no_code(tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text("pattern_config_name: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match="not readable YAML"):
        AttentionConfig.from_yaml("minfer", file)


def test_refuses_a_missing_file_and_lists_the_shipped():
    with pytest.raises(ValueError, match="'nowhere/x.yaml' is neither a file nor.*minfer_qwen2.5_3b_0.90"):
        AttentionConfig.from_yaml("minfer", "nowhere/x.yaml")


GOOD = ["flex_vertical_and_slash", [0.9, 8], [0.9, 8], 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "not readable JSON"),
        ("{}", "a list with one object per layer"),
        (json.dumps([]), "a list with one object per layer"),
        (json.dumps([{"1": GOOD}]), "layer 0: expected an object with a key per head"),
        (json.dumps([{"0": GOOD}, {"0": GOOD[:2]}]), r"layer 1, head 0: expected \[name"),
        (
            json.dumps([{"0": ["stream_llm", 1, 2, 1]}]),
            "unknown pattern 'stream_llm'; allowed: vertical_and_slash",
        ),
        (json.dumps([{"0": ["vertical_and_slash", -1, 2, 1]}]), "fixed budget -1"),
        (json.dumps([{"0": ["vertical_and_slash", [0.9, 1], 2, 1]}]), "fixed budget"),
        (json.dumps([{"0": ["flex_vertical_and_slash", [1.2, 8], [0.9, 8], 1]}]), "share 1.2 .*from 0 to 1"),
        (
            json.dumps([{"0": ["flex_vertical_and_slash", 8, [0.9, 8], 1]}]),
            r"a flex budget is \[share, cap\]; got 8",
        ),
        (json.dumps([{"0": ["flex_vertical_and_slash", [0.9, 8.5], [0.9, 8], 1]}]), "cap 8.5"),
    ],
)
def test_refuses_patterns(tmp_path, content, message):
    file = tmp_path / "pattern.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        AttentionConfig.from_dict("minfer", {"pattern_config_name": str(file)})


def test_check_model():
    config = AttentionConfig.from_dict("minfer", MINFER)
    config.check_model(num_layers=36, num_heads=16)
    config.check_model(num_layers=2, num_heads=4)
    with pytest.raises(ValueError, match="36 layers; the model has 37"):
        config.check_model(num_layers=37, num_heads=16)
    with pytest.raises(ValueError, match="16 heads a layer; the model has 28"):
        config.check_model(num_layers=28, num_heads=28)
    AttentionConfig.from_dict("dense").check_model(num_layers=100, num_heads=100)


def test_tables_agree():
    from megatron_mtrain.index import BUILDERS

    assert set(BUILDERS) == set(ATTN_TYPES)
    assert len(shipped_patterns()) >= 8


@pytest.mark.parametrize(
    "fields",
    [
        {"moba_chunk_size": 4096, "moba_topk": 12},
        {"moba_chunk_size": 4096, "moba_topk": 12, "implementation": "dr_stripe"},
    ],
)
def test_the_published_moba_files_work_as_they_are(fields):
    config = AttentionConfig.from_dict("moba", fields)
    assert (config.method.moba_chunk_size, config.method.moba_topk, config.layout) == (4096, 12, "stripe")


def test_the_published_xattn_file_works_as_it_is(tmp_path):
    file = tmp_path / "xattn.yaml"
    file.write_text(
        "implementation: stripe\ngranularity: 128\nstride: 16\nnorm: 1\nsoftmax: true\nthreshold: 0.9\n"
        "chunk_size: 16384\nselect_mode: inverse\nuse_triton: true\ncausal: true\nkdb: 1\nkeep_sink: false\n"
        "keep_recent: false\n"
    )
    config = AttentionConfig.from_yaml("xattn", file)
    assert (config.block_size, config.method.stride, config.method.threshold) == (128, 16, 0.9)


def test_granularity_and_block_size_are_one_thing():
    for fields in ({"granularity": 64}, {"block_size": 64}):
        config = AttentionConfig.from_dict("xattn", fields)
        assert config.block_size == config.method.granularity == 64


@pytest.mark.parametrize(
    ("attn_type", "fields", "message"),
    [
        ("moba", {}, "moba needs moba_chunk_size, for example"),
        ("moba", {"moba_chunk_size": 4096, "moba_topk": 0}, "moba_topk 0"),
        ("moba", {"moba_chunk_size": 100, "moba_topk": 2}, "100 is not a multiple of block_size 128"),
        ("xattn", {"granularity": 64, "block_size": 128}, "granularity 64 and block_size 128 differ"),
        ("xattn", {"stride": 12}, "stride 12 does not divide granularity 128"),
        ("xattn", {"threshold": 1.5}, "threshold 1.5"),
        ("xattn", {"norm": 0}, "norm 0 must be a number above 0"),
        (
            "xattn",
            {"select_mode": "slash"},
            "select_mode 'slash' is not supported; leave it out, or set inverse",
        ),
        ("xattn", {"kdb": 2}, "kdb 2 is not supported"),
        ("xattn", {"keep_recent": "yes"}, "unknown keep_recent 'yes'"),
        ("minfer", {**MINFER, "reuse": "all"}, "unknown reuse 'all'; choose one of nothing, index, output"),
        (
            "minfer",
            {**MINFER, "ring_comm": "tree"},
            "unknown ring_comm .tree.; choose one of ring, allgather",
        ),
    ],
)
def test_refuses_fields_of_other_methods(attn_type, fields, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig.from_dict(attn_type, fields)
