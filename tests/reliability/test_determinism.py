"""The same command twice gives the same bits, and so does the index on all ranks that need the same one."""

import torch

from tests.model.conftest import read_weights
from tests.ring.cases import Case

DETERMINISTIC = ["--deterministic-mode"]


def test_two_runs_are_bitwise_equal(site):
    """Losses of all steps and all weights after them, on four ranks (context 2, tensor 2)."""
    folders = [site.folder / f"twice{number}" / "saved" for number in range(2)]
    losses = []
    for number, folder in enumerate(folders):
        flags = ["--save", str(folder), *DETERMINISTIC]
        run = site.start(f"twice{number}", flags, layout="cp2tp2", steps=4)
        assert not any(run.wait()), run.log()[-3000:]
        losses.append(run.losses())
    assert losses[0] == losses[1] and len(losses[0]) == 4
    first, second = map(read_weights, folders)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


class Twice(Case):
    """The same tensors in every ring: rings side by side then stand for replicas."""

    def tensors(self, beside):
        return super().tensors(0)


def test_index_and_gradients_are_equal_on_all_replicas(gang):
    """Bit for bit, whatever else the machine does: every rank's mask, and out and gradients of the replicas.

    Tensor-parallel ranks hold other heads, so each has an index of its own; within one context-parallel group
    the whole mask has to be the same.
    """
    methods = {
        "moba": {"moba_chunk_size": 32, "moba_topk": 3, "block_size": 16},
        "xattn": {"granularity": 16, "stride": 4, "threshold": 0.7},
        "minfer": {"pattern_config_name": "Qwen2.5_0.5B_flex_0.90", "block_size": 16, "last_q": 16},
    }
    for attn_type, fields in methods.items():
        rings = gang.run([4], Twice(attn_type, fields, 256))
        masks = [rank[4] for ring in rings for rank in ring]
        assert all((mask == masks[0]).all() for mask in masks)
        for rank, other in zip(*rings, strict=True):
            assert all((a == b).all() for a, b in zip(rank, other, strict=True))
