"""What a sampled layer tells, on rings, against the mask of the same index and the softmax over all keys."""

import math
from dataclasses import dataclass

import pytest
import torch

from megatron_mtrain import AttentionConfig, make_layout
from megatron_mtrain.attention import Setting, ring_forward
from megatron_mtrain.clock import now
from megatron_mtrain.documents import Documents
from megatron_mtrain.index import build_index
from megatron_mtrain.passes import Passes
from megatron_mtrain.ring import communicate
from megatron_mtrain.samples import BY_HEAD, PROBES, sample
from tests.ring.cases import Case, write_pattern
from tests.ring.test_ring import FIELDS, FIXED, PROBE

TOKENS, HEADS, GROUPS, BATCH, BLOCK = 256, 4, 2, 2, 16
SCALE = 16**-0.5


@dataclass(frozen=True)
class Sampled:
    """A job of the gang: the sample of one rank and the whole mask."""

    case: Case
    documents: tuple | None = None

    def __call__(self, rings, rank, beside):
        config = AttentionConfig.from_dict(self.case.attn_type, self.case.fields)
        size = math.prod(group.size() for group in rings)
        layout = make_layout(config.layout, TOKENS, size, config.block_size)
        query, key, value, _ = (layout.shard(tensor, 0, rank) for tensor in self.case.tensors(beside))
        rings = communicate(rings, config.ring_comm)
        documents = self.documents and Documents(TOKENS, self.documents)
        index = build_index(config, query, key, layout, rings, 0, documents=documents)
        _, lse = ring_forward(query, key, value, index, Setting(rings, SCALE, "auto", Passes(0)))
        found = sample(index, (now(), now()), query, key, lse, rings=rings, scale=SCALE)
        mask = index.complete(rings).dense_mask()
        return found.by_head.numpy(), found.work.numpy(), mask.numpy()


def recall(query, key, mask, documents) -> torch.Tensor:
    """The share of the last rows' probability on attended pairs, by head: by definition, in float64."""
    found = []
    for entry, starts in enumerate(documents or ((0,),) * BATCH):
        begin = starts[-1]
        rows = slice(max(begin, TOKENS - PROBES), TOKENS)
        q, k = query[rows, entry], key[begin:, entry].repeat_interleave(HEADS // GROUPS, 1)
        scores = torch.einsum("thd,uhd->htu", q.double(), k.double()) * SCALE
        later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[rows, begin:]
        probability = torch.softmax(scores.masked_fill(later, -math.inf), -1)
        found.append((probability * mask[entry, :, rows, begin:]).sum(-1).mean(-1))
    return torch.stack(found).mean(0)


def visited(rank: int, shape) -> list[int]:
    """The ranks whose shards a rank sees, in order: a whole inner round at every outer hop."""
    inner, outer = (*shape, 1)[:2]
    me, node = rank % inner, rank // inner
    return [
        (node - far) % outer * inner + (me - near) % inner for far in range(outer) for near in range(inner)
    ]


@pytest.mark.parametrize(
    ("shape", "implementation", "comm", "documents"),
    [
        ([1], "stripe", "ring", None),
        ([4], "zigzag", "ring", None),
        ([4], "stripe", "allgather", None),
        ([2, 2], "dr_stripe", "ring", None),
        ([4], "stripe", "ring", ((0, 100, 230), (0, 40))),
    ],
    ids=["one", "zigzag", "gathered", "two-level", "documents"],
)
@pytest.mark.parametrize("kind", ["dense", "minfer", "moba", "xattn"])
def test_sample_is_what_the_mask_says(gang, tmp_path, kind, shape, implementation, comm, documents):
    fields = {**FIELDS[kind], "implementation": implementation, "ring_comm": comm}
    if kind == "minfer":
        fields["pattern_config_name"] = write_pattern(tmp_path / "pattern.json", [[FIXED] * HEADS])
    case = Case(kind, fields, TOKENS, BATCH, HEADS, GROUPS)
    for beside, ranks in enumerate(gang.run(shape, Sampled(case, documents))):
        query, key, *_ = case.tensors(beside)
        mask = torch.from_numpy(ranks[0][2])
        layout = make_layout(implementation.removeprefix("dr_"), TOKENS, len(ranks), BLOCK)
        for rank, (_, work, _) in enumerate(ranks):
            rows = mask[:, :, layout.positions(rank)]
            steps = [int(rows[..., layout.positions(source)].sum()) for source in visited(rank, shape)]
            assert work.tolist() == steps
        found = torch.from_numpy(sum(by_head for by_head, *_ in ranks))
        values = dict(zip(BY_HEAD, found, strict=True))
        whole = TOKENS * (TOKENS + 1) / 2
        torch.testing.assert_close(values["density"], mask.sum((0, 2, 3)).double() / whole / BATCH)
        if kind == "dense":
            assert values["recall"].isnan().all()
        else:
            torch.testing.assert_close(
                values["recall"], recall(query, key, mask, documents), rtol=1e-5, atol=1e-6
            )
        for name in ("columns", "slashes"):
            assert values[name].isfinite().all() == (kind == "minfer")
        if kind == "minfer" and documents is None:
            check_counts(mask, values)


def check_counts(mask, values) -> None:
    """The last row sees whole blocks at the distances of slashes; what else it sees are columns."""
    blocks = mask[:, :, -1].unflatten(-1, (-1, BLOCK))
    whole = blocks.all(-1)
    assert torch.equal(values["slashes"], whole.sum(-1).double().mean(0))
    outside = (blocks & ~whole[..., None]).sum((-1, -2)).double().mean(0)
    assert (values["columns"] >= outside).all() and (values["columns"] <= 20 + PROBE["sink_tokens"]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "minfer", "moba", "xattn"])
def test_a_sample_never_waits_for_the_gpu(tmp_path, kind):
    fields = dict(FIELDS[kind])
    if kind == "minfer":
        fields["pattern_config_name"] = write_pattern(tmp_path / "pattern.json", [[FIXED] * HEADS])
    config = AttentionConfig.from_dict(kind, fields)
    layout = make_layout(config.layout, TOKENS, 1, config.block_size)
    tensors = Case(kind, fields, TOKENS, BATCH, HEADS, GROUPS, head_size=32).tensors(0)[:3]
    query, key, value = (tensor.to("cuda", torch.bfloat16) for tensor in tensors)
    index = build_index(config, query, key, layout, [], 0)
    _, lse = ring_forward(query, key, value, index, Setting([], SCALE, "auto", Passes(0)))
    taken = [index, (now(), now()), query, key, lse]
    first = sample(*taken, rings=[], scale=SCALE)  # compiles kernels and copies what layers share
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = sample(*taken, rings=[], scale=SCALE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(again.by_head, first.by_head, equal_nan=True)
