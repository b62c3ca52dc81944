"""Runs of a few steps as TensorBoard events, and a check of pictures."""

import io
import warnings

import pytest
import torch
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from tools.plot.figures import png

STEPS = range(10, 101, 10)
ARGUMENTS = {
    "attn_type": "minfer",
    "train_attn_config": "minfer_qwen2.5_3b_0.90",
    "attn_implementation": None,
    "seq_length": 4096,
    "context_parallel_size": 4,
    "tensor_model_parallel_size": 1,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 64,
    "lr": 2e-5,
    "odd": "<script>&",
}


@pytest.fixture
def write_run():
    """write_run(folder, scalars, tensors={}, arguments={}): scalars and tensors by tag and step."""

    def write(folder, scalars, tensors=None, arguments=None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = SummaryWriter(str(folder))
        for name, value in (arguments or {}).items():
            writer.add_text(name, str(value))
        for tag, points in scalars.items():
            for step, value in points.items():
                writer.add_scalar(tag, value, step)
        for tag, points in (tensors or {}).items():
            for step, value in points.items():
                writer.add_tensor(tag, value, step)
        writer.close()
        return folder

    return write


def whole_run() -> tuple[dict, dict]:
    """Scalars and tensors of every tag that the pictures read: 3 layers of 4 heads, a ring of 4."""
    scalars = {"lm loss": {step: 5 - step / 50 for step in STEPS}}
    scalars["lm loss vs samples"] = {2 * step: value for step, value in scalars["lm loss"].items()}
    scalars["lm loss validation"] = {50: 4.2, 100: 3.1}
    scalars["lm loss validation vs samples"] = {100: 4.2, 200: 3.1}
    for layer in range(3):
        for name, base in {
            "density": 0.1,
            "recall": 0.9,
            "columns": 500,
            "slashes": 8,
            "index_ms": 2.0,
        }.items():
            scalars[f"attention/{name}/layer_{layer:02d}"] = dict.fromkeys(STEPS, base * (1 + layer / 50))
            scalars[f"attention/{name}/mean"] = dict.fromkeys(STEPS, base)
    numbers = {"ms": 2000, "tokens_per_second": 4096, "mfu": 0.4, "peak_memory_gib": 71.5}
    scalars |= {f"step/{name}": dict.fromkeys(STEPS, value) for name, value in numbers.items()}
    scalars |= {f"ring/{name}_imbalance": dict.fromkeys(STEPS, 1.25) for name in ("worker", "step")}
    for direction, base in {"forward": 1.0, "backward": 3.0}.items():
        for step in range(4):
            times = {
                "compute_ms": base,
                "wait_ms": base * step / 4,
                "compute_ms_max": 2 * base,
                "wait_ms_max": 9,
            }
            for name, value in times.items():
                scalars[f"ring/{direction}/step_{step:02d}/{name}"] = dict.fromkeys(STEPS, value)
    shares = torch.linspace(0.5, 0.95, 12).view(3, 4)
    tensors = {f"attention/by_head/{name}": {50: shares / 2, 100: shares} for name in ("density", "recall")}
    return scalars, tensors


@pytest.fixture
def full_run(tmp_path, write_run):
    """The folder of a run that has everything."""
    return write_run(tmp_path / "full", *whole_run(), ARGUMENTS)


@pytest.fixture
def is_picture():
    """Asserts that a figure becomes a PNG that can be read, of a size that fits a page."""

    def check(figure):
        image = Image.open(io.BytesIO(png(figure)))
        image.load()
        assert image.format == "PNG"
        assert 300 < image.width <= 2000
        assert image.convert("L").getextrema()[0] < 128  # something is drawn

    return check


@pytest.fixture
def call(monkeypatch):
    """call(module, *flags): its command line; returns the message of a refusal, None for success."""

    def start(module, *flags):
        monkeypatch.setattr("sys.argv", [module.__file__, *map(str, flags)])
        try:
            module.main()
        except SystemExit as end:
            return str(end.code)
        return None

    return start
