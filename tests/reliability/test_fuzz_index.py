"""Indices and attention on drawn settings, against the naive masks and naive float64 attention.

float64 throughout: a budget then ends at the same entry here and in the oracle, whatever the order of sums.
"""

import json
import math
from functools import partial

import torch
from hypothesis import strategies as st

from megatron_mtrain import AttentionConfig, make_layout, sparse_ring_attention
from tests.oracle import dense_mask, minfer_mask, moba_mask, naive_attention, relative_error, xattn_mask
from tests.reliability.draws import SEEDS, fuzz
from tests.ring.cases import Case

IMPLEMENTATIONS = st.sampled_from(["zigzag", "stripe", "dr_stripe"])
SHAPE = {
    "implementation": IMPLEMENTATIONS,
    "pairs": st.integers(1, 3),
    "size": st.sampled_from([4, 8]),
    "groups": st.integers(1, 2),
    "group": st.integers(1, 2),
    "cuts": st.lists(st.integers(1, 47), max_size=6),  # where documents begin, besides 0
    "seed": SEEDS,
}
BUDGETS = st.lists(
    st.one_of(
        st.tuples(st.none(), st.integers(0, 50), st.none(), st.integers(0, 50)),
        st.tuples(st.floats(0, 1), st.integers(0, 50), st.floats(0, 1), st.integers(0, 50)),
    ),
    min_size=4,
    max_size=4,
)


def attend_and_compare(attn_type, fields, naive_mask, shape):
    """One call on a single rank: its mask is the naive one, out and all gradients are those of the mask."""
    tokens, heads = shape["pairs"] * 2 * shape["size"], shape["groups"] * shape["group"]
    case = Case(
        attn_type, fields, max(tokens, 8), 1, heads, shape["groups"], 4, torch.float64, seed=shape["seed"]
    )
    query, key, value, grad_out = case.tensors(0)
    config = AttentionConfig.from_dict(attn_type, fields)
    layout = make_layout(config.layout, case.num_tokens, 1, config.block_size)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    documents = [borders(shape["cuts"], case.num_tokens)]
    out, index = sparse_ring_attention(
        *leaves, config=config, layout=layout, rings=[], documents=documents, return_index=True
    )
    mask = naive_mask(query.detach(), key.detach(), documents=documents)
    assert torch.equal(index.dense_mask(), mask)
    grads = torch.autograd.grad(out, leaves, grad_out)
    expected = naive_attention(query, key, value, mask, grad_out)
    # A row of one key has gradient 0, where only an absolute error has a meaning.
    for actual, wanted in zip((out, *grads), expected, strict=True):
        assert relative_error(actual, wanted) < 1e-12 or (actual - wanted).abs().max() < 1e-14


def borders(cuts, num_tokens) -> list[int]:
    """The borders of documents that begin at the cuts."""
    return [0, *sorted({cut for cut in cuts if cut < num_tokens}), num_tokens]


def write_budgets(folder, budgets) -> str:
    """A pattern file of one layer, named by what it holds: the loader reads a name once."""
    head = {
        str(h): ["vertical_and_slash", v, s, 1]
        if share is None
        else ["flex_vertical_and_slash", [share, v], [slash_share, s], 1]
        for h, (share, v, slash_share, s) in enumerate(budgets)
    }
    path = folder / f"{abs(hash(json.dumps(head)))}.json"
    path.write_text(json.dumps([head]))
    return str(path)


def test_minfer(tmp_path):
    def check(budgets, last_q, sink_tokens, local_window, **shape):
        probe = {"last_q": last_q, "sink_tokens": sink_tokens, "local_window": local_window}
        fields = {
            "pattern_config_name": write_budgets(tmp_path, budgets),
            "implementation": shape["implementation"],
            "block_size": shape["size"],
            **probe,
        }
        attend_and_compare(
            "minfer",
            fields,
            partial(minfer_mask, budgets=budgets, block_size=shape["size"], **probe),
            shape,
        )

    few = st.integers(0, 20)
    probe = {"last_q": st.integers(1, 60), "sink_tokens": few, "local_window": few}
    fuzz(500, check, budgets=BUDGETS, **probe, **SHAPE)


def test_moba():
    def check(per_chunk, topk, **shape):
        settings = {"chunk_size": per_chunk * shape["size"], "topk": topk}
        fields = {f"moba_{name}": value for name, value in settings.items()}
        fields |= {"implementation": shape["implementation"], "block_size": shape["size"]}
        attend_and_compare("moba", fields, partial(moba_mask, **settings), shape)

    fuzz(500, check, per_chunk=st.integers(1, 5), topk=st.integers(1, 8), **SHAPE)


def test_xattn():
    def check(parts, threshold, norm, keep_recent, **shape):
        settings = {
            "granularity": shape["size"],
            "stride": shape["size"] // parts,
            "threshold": threshold,
            "norm": norm,
            "keep_recent": keep_recent,
        }
        fields = {**settings, "implementation": shape["implementation"]}
        attend_and_compare("xattn", fields, partial(xattn_mask, **settings), shape)

    parts, norms = st.sampled_from([1, 2, 4]), st.floats(0.1, 10)
    fuzz(500, check, parts=parts, threshold=st.floats(0, 1), norm=norms, keep_recent=st.booleans(), **SHAPE)


def test_dense():
    def check(**shape):
        fields = {"implementation": shape["implementation"], "block_size": shape["size"]}
        attend_and_compare(
            "dense", fields, lambda q, k, documents: dense_mask(*q.shape[1:3], len(q), documents), shape
        )

    fuzz(200, check, **SHAPE)


class Cases(list):
    """Several cases run in one request to the gang."""

    def __call__(self, rings, rank, beside):
        """The answers of `Case`, one by one."""
        return [case(rings, rank, beside) for case in self]


def drawn_cases(folder, number, ranks, seed):
    """`number` random cases for rings of `ranks`, each with its naive mask."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    for at in range(number):
        size, groups = (4, 8)[draw(0, 1)], draw(1, 2)
        tokens, heads = 2 * ranks * size * draw(1, 2), groups * draw(1, 2)
        common = {"implementation": ("zigzag", "stripe", "dr_stripe")[draw(0, 2)], "block_size": size}
        attn_type = ("minfer", "moba", "xattn")[at % 3]
        if attn_type == "minfer":
            budgets = [(draw(0, 100) / 99, draw(0, 40), draw(0, 100) / 99, draw(0, 40)) for _ in range(heads)]
            budgets = [
                tuple(min(part, 1.0) if n % 2 == 0 else part for n, part in enumerate(b)) for b in budgets
            ]
            probe = {"last_q": draw(1, tokens), "sink_tokens": draw(0, 9), "local_window": draw(0, 9)}
            fields = {"pattern_config_name": write_budgets(folder, budgets), **probe}
            naive = partial(minfer_mask, budgets=budgets, block_size=size, **probe)
        elif attn_type == "moba":
            settings = {"chunk_size": size * draw(1, 5), "topk": draw(1, 6)}
            fields = {f"moba_{name}": value for name, value in settings.items()}
            naive = partial(moba_mask, **settings)
        else:
            settings = {"stride": size // 2 ** draw(0, 2), "threshold": draw(0, 99) / 100}
            fields = settings
            naive = partial(xattn_mask, granularity=size, **settings)
        sizes = tokens, 1, heads, groups, 4, torch.float64
        packed = {"documents": [borders([draw(1, tokens) for _ in range(draw(0, 4))], tokens)]}
        case = Case(attn_type, common | fields, *sizes, seed=seed + at, extra=packed)
        yield case, partial(naive, **packed)


def test_rings(gang, tmp_path):
    """Every method on flat and nested rings: masks of all ranks, out, dq, dk and dv."""
    for number, shape in enumerate(([3], [4], [2, 2])):
        ranks = math.prod(shape)
        drawn = list(drawn_cases(tmp_path, 30, ranks, 1000 * number))
        for beside, answers in enumerate(gang.run(shape, Cases(case for case, _ in drawn))):
            for at, (case, naive) in enumerate(drawn):
                query, key, value, grad_out = case.tensors(beside)
                mask = naive(query, key)
                config = AttentionConfig.from_dict(case.attn_type, case.fields)
                layout = make_layout(config.layout, case.num_tokens, ranks, config.block_size)
                expected = naive_attention(query, key, value, mask, grad_out)
                assert all(torch.equal(torch.from_numpy(rank[at][4]), mask) for rank in answers), case
                for part, wanted in enumerate(expected):
                    whole = layout.unshard([torch.from_numpy(rank[at][part]) for rank in answers], 0)
                    assert (whole - wanted).norm() < 1e-11 * max(1, wanted.norm()), case
