"""The two settings of the recall experiment: model, data, steps, and what each method may attend."""

import json
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Setup:
    """A model, its training, and the settings of the sparse methods, all in tokens where not said.

    Budgets are small, so that a method has to choose. A slash costs up to two block distances, of which a
    sequence has length / block.
    """

    name: str
    length: int
    layers: int
    hidden: int
    heads: int
    groups: int
    vocabulary: int
    batch: int
    micro_batch: int
    steps: int
    warmup: int
    lr: float
    save_interval: int
    samples: int  # of an evaluation, at each depth
    block: int
    minfer: tuple[float, int, int]  # share of the probe's mass, most columns, most slashes
    local_window: int
    moba: tuple[int, int]  # tokens of a chunk, chunks
    xattn: tuple[int, float]  # stride, threshold

    def with_steps(self, steps: int | None) -> "Setup":
        """The same with another number of steps, if one is given."""
        return self if steps is None else replace(self, steps=steps)

    @property
    def model_flags(self) -> str:
        """Flags of pretrain_qwen.py."""
        return (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --ffn-hidden-size {3 * self.hidden} "
            f"--num-attention-heads {self.heads} --num-query-groups {self.groups} --rotary-base 10000 "
            f"--tokenizer-type NullTokenizer --vocab-size {self.vocabulary} --make-vocab-size-divisible-by 64"
        )

    def write_method(self, folder: Path, method: str) -> None:
        """Writes METHOD.yaml, and minfer's pattern, into `folder`."""
        lines = [f"block_size: {self.block}"]
        if method == "minfer":
            share, columns, slashes = self.minfer
            entry = ["flex_vertical_and_slash", [share, columns], [share, slashes], 1.0]
            pattern = folder / "pattern.json"
            pattern.write_text(json.dumps([{str(head): entry for head in range(self.heads)}] * self.layers))
            lines += [f"pattern_config_name: {pattern}", f"local_window: {self.local_window}"]
        elif method == "moba":
            lines += [f"moba_chunk_size: {self.moba[0]}", f"moba_topk: {self.moba[1]}"]
        elif method == "xattn":
            lines += [f"granularity: {self.block}", f"stride: {self.xattn[0]}", f"threshold: {self.xattn[1]}"]
        (folder / f"{method}.yaml").write_text("\n".join(lines) + "\n")

    def method_flags(self, folder: Path, method: str) -> list[str]:
        """Flags of pretrain_qwen.py for a method."""
        return ["--attn-type", method, "--train-attn-config", str(folder / f"{method}.yaml")]


# Enough to run every part on a CPU, not to learn recall.
SMALL = Setup(
    name="small", length=512, layers=2, hidden=64, heads=4, groups=2, vocabulary=128, batch=8,
    micro_batch=8, steps=200, warmup=10, lr=2e-3, save_interval=100, samples=8, block=32,
    minfer=(0.9, 64, 3), local_window=32, moba=(64, 3), xattn=(8, 0.9),
)  # fmt: skip
FULL = Setup(
    name="full", length=8192, layers=6, hidden=512, heads=8, groups=4, vocabulary=2048, batch=8,
    micro_batch=8, steps=1000, warmup=50, lr=1e-3, save_interval=250, samples=40, block=128,
    minfer=(0.95, 1024, 10), local_window=128, moba=(512, 4), xattn=(16, 0.9),
)  # fmt: skip
