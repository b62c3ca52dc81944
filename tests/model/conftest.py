"""One small model, its data, its initial checkpoint, and the runs that the model tests compare."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.model.trainers import Trainers

LAYERS, HEADS, VOCABULARY, TOKENS, BLOCK = 4, 4, 256, 1024, 64
# Wide initial weights make attention peaked, and budgets end where scores fall steeply: then the selected
# columns and slashes are the same for every order in which float32 sums are taken.
MODEL = f"""
    --num-layers {LAYERS} --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads {HEADS}
    --num-query-groups 2 --seq-length {TOKENS} --global-batch-size 2 --init-method-std 0.2 --tokenizer-type
    NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 64 --eval-iters 0 --log-interval 1
    --num-workers 0 --lr-decay-style constant --weight-decay 0 --distributed-timeout-minutes 2 --split 100,0,0
""".split()
FRESH = ["--finetune", "--no-load-optim", "--no-load-rng"]
# Far above the weights, so that the weights after the step are the gradient, but for what float32 rounds
# away.
RATE = 1e4

SETTINGS = {
    "moba": f"moba_chunk_size: 192\nmoba_topk: 3\nblock_size: {BLOCK}\n",
    "xattn": f"granularity: {BLOCK}\nstride: 8\nthreshold: 0.2\n",
}

# name: (processes, flags)
LAYOUTS = {
    "cp1": (1, ""),
    "cp2": (2, "--context-parallel-size 2"),
    "cp2tp2": (4, "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    "cp2pp2": (4, "--context-parallel-size 2 --pipeline-model-parallel-size 2"),
    "cp4": (4, "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2"),
    "cp2dp2": (4, "--context-parallel-size 2"),
}


class Runs:
    """Training runs by layout and attention, each done once."""

    def __init__(self, folder: Path, trainers: Trainers):
        self.folder, self.trainers, self.done = folder, trainers, {}
        self.data = [
            "--data-path",
            str(write_data(folder / "text")),
            "--data-cache-path",
            str(folder / "cache"),
        ]
        self.sparse = {"minfer": write_minfer(folder)}
        for method, settings in SETTINGS.items():
            self.sparse[method] = folder / f"{method}.yaml"
            self.sparse[method].write_text(settings)
        self.initial = str(folder / "initial")
        self.train("cp1", "stripe_ring", ["--lr", "0", "--train-iters", "1", "--save", self.initial])

    def attention(self, layout: str, name: str) -> list[str]:
        """The attention flags; `cp4` runs on two levels."""
        two_level = ["--attn-implementation", "dr_stripe"] if layout == "cp4" else []
        if name in self.sparse:
            return ["--attn-type", name, "--train-attn-config", str(self.sparse[name]), *two_level]
        settings = ["--train-attn-config", str(write_dense(self.folder))]
        # stripe_ring is flat by definition; dense on two levels is the same attention.
        return ["--attn-type", "dense" if two_level else "stripe_ring", *settings, *two_level]

    def train(self, layout: str, attention: str, flags: list[str], change: str | None = None) -> None:
        """One run of pretrain_qwen.py."""
        ranks, parallel = LAYOUTS[layout]
        chosen = self.attention(layout, attention)
        self.trainers.run(ranks, [*MODEL, *self.data, *parallel.split(), *chosen, *flags], change)

    def losses(
        self, layout: str, attention: str, flags=(), change: str | None = None, steps: int = 3
    ) -> list[float]:
        """The loss of each of the first `steps` steps from the initial checkpoint, as TensorBoard shows
        them."""
        key = ("losses", layout, attention, tuple(flags), change)
        if key not in self.done:
            logs = self.folder / f"logs{len(self.done)}"
            start = ["--load", self.initial, *FRESH] if "--load" not in flags else []
            self.train(
                layout,
                attention,
                ["--lr", "1e-2", "--train-iters", str(steps), "--tensorboard-dir", str(logs), *start, *flags],
                change,
            )
            self.done[key] = read_losses(logs)
        return self.done[key]

    def gradients(
        self, layout: str, attention: str, change: str | None = None, flags=()
    ) -> dict[str, torch.Tensor]:
        """The gradient of every parameter in the first step, whole tensors by checkpoint name."""
        key = ("gradients", layout, attention, change, tuple(flags))
        if key not in self.done:
            saved = self.folder / f"step{len(self.done)}"
            step = (
                f"--optimizer sgd --sgd-momentum 0 --clip-grad 0 --lr {RATE} --min-lr {RATE} --train-iters 1"
            )
            keep = ["--save", str(saved), "--no-save-optim", "--no-save-rng"]
            start = ["--load", self.initial, *FRESH]
            self.train(layout, attention, [*step.split(), *keep, *start, *flags], change)
            before, after = (read_weights(Path(folder)) for folder in (self.initial, saved))
            self.done[key] = {name: (before[name] - after[name]) / RATE for name in before}
        return self.done[key]


def write_data(prefix: Path) -> Path:
    """An indexed dataset of documents that repeat themselves, so that some keys matter much more than
    others."""
    random = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for _ in range(40):
        phrase = random.integers(0, VOCABULARY - 1, 97)
        builder.add_document(torch.from_numpy(np.resize(phrase, 600)), [600])
    builder.finalize(f"{prefix}.idx")
    return prefix


def write_minfer(folder: Path) -> Path:
    """A minfer configuration with fixed and flex heads, other budgets in every layer and head."""
    fixed = [["vertical_and_slash", 4 + layer, 3 + layer, 1.0] for layer in range(LAYERS)]
    flex = [["flex_vertical_and_slash", [0.3, 8 + layer], [0.3, 6 + layer], 1.0] for layer in range(LAYERS)]
    pattern = [
        {str(head): (fixed if (layer + head) % 2 else flex)[(layer + head) % LAYERS] for head in range(HEADS)}
        for layer in range(LAYERS)
    ]
    (folder / "pattern.json").write_text(json.dumps(pattern))
    config = folder / "minfer.yaml"
    config.write_text(
        f"pattern_config_name: {folder / 'pattern.json'}\nimplementation: stripe\nblock_size: {BLOCK}\n"
        "last_q: 32\nsink_tokens: 8\nlocal_window: 40\n"
    )
    return config


def write_dense(folder: Path) -> Path:
    """Settings of exact attention with the tests' block size."""
    config = folder / "dense.yaml"
    config.write_text(f"block_size: {BLOCK}\n")
    return config


def read_losses(logs: Path) -> dict[int, float]:
    """Loss by iteration from TensorBoard files."""
    return read_events(logs)[0]["lm loss"]


def read_events(logs: Path) -> tuple[dict[str, dict[int, float]], dict[str, torch.Tensor]]:
    """Scalars by tag and iteration, and the last of every tensor by tag, from TensorBoard files."""
    events = EventAccumulator(str(logs))
    events.Reload()
    tags = events.Tags()
    scalars = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags["scalars"]}
    numbers = [tag for tag in tags["tensors"] if not tag.endswith("/text_summary")]
    tensors = {tag: torch.from_numpy(make_ndarray(events.Tensors(tag)[-1].tensor_proto)) for tag in numbers}
    return scalars, tensors


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Whole float64 tensors of the newest checkpoint in `folder`, whatever ranks wrote them."""
    iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
    reader = checkpoint.FileSystemReader(folder / f"iter_{iteration:07d}")
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith("optimizer")
    }
    checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}


@pytest.fixture(scope="session")
def trainers(tmp_path_factory):
    processes = Trainers(tmp_path_factory.mktemp("trainers"))
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def runs(tmp_path_factory, trainers):
    return Runs(tmp_path_factory.mktemp("runs"), trainers)
