"""One case of ring attention: random tensors, the run on every rank, and the comparison with the oracle."""

import json
from dataclasses import dataclass, field

import torch

from megatron_mtrain import AttentionConfig, make_layout, sparse_ring_attention
from tests.oracle import naive_attention, relative_error

# float32 rounding is 6e-8; sums over a few hundred terms stay below 1e-5. The bound is 1e-4.
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Case:
    """What to run. fields are those of the YAML; num_tokens, batch, heads, groups, head_size are global."""

    attn_type: str
    fields: dict
    num_tokens: int
    batch: int = 1
    heads: int = 4
    groups: int = 2
    head_size: int = 16
    dtype: torch.dtype = torch.float32
    layer: int = 0
    seed: int = 0
    extra: dict = field(default_factory=dict)

    def tensors(self, beside: int):
        """query, key, value, grad_out of ring number `beside`, global: [N, b, heads, d]."""
        generator = torch.Generator().manual_seed(1000 * self.seed + beside)
        shapes = [self.heads, self.groups, self.groups, self.heads]
        drawn = [
            torch.randn(self.num_tokens, self.batch, heads, self.head_size, generator=generator)
            for heads in shapes
        ]
        # Sharper than random: a few keys that everybody looks at, so that the budgets select something.
        drawn[1][:: self.num_tokens // 8] *= 3
        return [tensor.to(self.dtype) for tensor in drawn]

    def __call__(self, rings, rank, beside):
        """Runs on one rank; returns its shards of out, dq, dk, dv and the index's dense mask on the CPU."""
        config = AttentionConfig.from_dict(self.attn_type, self.fields)
        size = 1
        for group in rings:
            size *= group.size()
        layout = make_layout(config.layout, self.num_tokens, size, config.block_size)
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.device_count() >= 8 else "cpu"
        *leaves, grad_out = (layout.shard(t, 0, rank).to(device) for t in self.tensors(beside))
        leaves = [leaf.requires_grad_() for leaf in leaves]
        out, index = sparse_ring_attention(
            *leaves,
            config=config,
            layout=layout,
            rings=rings,
            layer=self.layer,
            return_index=True,
            **self.extra,
        )
        grads = torch.autograd.grad(out, leaves, grad_out)
        return [t.detach().cpu().numpy() for t in (out, *grads, index.dense_mask())]


def check(gang, shape, case: Case, naive_mask, names=("out", "dq", "dk", "dv")) -> None:
    """Asserts that every ring's mask is naive_mask(query, key) and that what `names` lists equals the
    oracle's."""
    config = AttentionConfig.from_dict(case.attn_type, case.fields)
    for beside, ranks in enumerate(gang.run(shape, case)):
        query, key, value, grad_out = case.tensors(beside)
        layout = make_layout(config.layout, case.num_tokens, len(ranks), config.block_size)
        mask = naive_mask(query, key)
        for rank, answer in enumerate(ranks):
            wrong = int((torch.from_numpy(answer[4]) != mask).sum())
            assert wrong == 0, f"ring {beside}, rank {rank}: {wrong} pairs of the mask differ"
        expected = naive_attention(query, key, value, mask, grad_out, case.extra.get("softmax_scale"))
        for number, name in enumerate(names):
            actual = layout.unshard([torch.from_numpy(answer[number]) for answer in ranks], 0)
            error = relative_error(actual, expected[number])
            assert error < TOLERANCE, f"ring {beside}: {name} has relative error {error:.2e}"


def write_pattern(path, layers) -> str:
    """A pattern file with the given entries, layers[layer][head] = [name, vertical, slash, score]; its
    path."""
    path.write_text(json.dumps([{str(h): entry for h, entry in enumerate(layer)} for layer in layers]))
    return str(path)
