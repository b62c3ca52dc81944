"""minfer on packed sequences: every document has a probe, columns and slashes of its own.

The last queries of a document probe its keys and select by the same budgets as those of a whole sequence. A
query block follows the slashes of the document of its first row. A document that spans no more blocks than
local_window turns on is attended whole, and has no probe.

The probes of all documents travel together: as many exchanges as for one document, whatever their number. On
a rank a document is a range of whole blocks, maybe none, of which the first and the last may be shared with
its neighbours.

Legend: as in minfer.py; the distances of the documents of a sequence lie one behind another, K in all.
"""

from dataclasses import dataclass

import torch

from ..documents import Documents
from ..kernels.probe_scores import log_mass, probe_scores
from ..kernels.select import select
from ..kernels.tile_lists import TileMask, block_distances, list_by_key, list_by_query, list_columns
from ..kernels.tiles import Tiles
from ..layouts import Layout
from ..ring import all_gather, all_reduce
from .sparse_index import SparseIndex


@dataclass(frozen=True)
class DocumentSlashIndex(SparseIndex):
    """attended(t, u) = u <= t, in one document D, and (slash_on[D, t // G - u // G] or vertical[u]).

    slash_on  bool [b, h, K], the block distances of document D from Places.first on; 0 is always on
    vertical  bool [b, h, N], by global position
    groups    key heads; slots, the most columns that a head can have
    """

    slash_on: torch.Tensor
    vertical: torch.Tensor
    groups: int
    slots: int

    def tiles(self, source: int, *, by_key: bool = False) -> Tiles:
        device, size = self.slash_on.device, self.layout.block_size
        query, key = (self.layout.blocks(rank, device) for rank in (self.rank, source))
        first_block = self.documents.first_block(self.layout, self.rank, device)
        on = self._tile_mask(query, key, first_block, offsets(self.documents, self.layout, self.rank, device))
        count, index = list_by_query(on)
        key_count, key_index = list_by_key(on, self.groups) if by_key else (None, None)
        selected = self.vertical.index_select(-1, self.layout.positions(source, device))
        covered = TileMask(on | (key < first_block[..., None])[:, None], query, key)
        columns = list_columns(selected, covered, size, min(self.slots, self.layout.local_tokens))
        return Tiles(
            count,
            index,
            source == self.rank,
            size,
            columns,
            first_key=self.first_key(source, device),
            key_count=key_count,
            key_index=key_index,
        )

    def statistics(self) -> dict[str, torch.Tensor]:
        return {"columns": self.vertical.sum(-1), "slashes": self.slash_on.sum(-1)}

    def dense_mask(self) -> torch.Tensor:
        device, size = self.vertical.device, self.layout.block_size
        blocks = torch.arange(self.layout.num_blocks, device=device)
        whole = Layout(self.layout.name, self.layout.num_tokens, 1, size)  # one rank has all blocks
        places = self.documents.first_block(whole, 0, device), offsets(self.documents, whole, 0, device)
        tiles = self._tile_mask(blocks, blocks, *places)
        tokens = tiles.repeat_interleave(size, -1).repeat_interleave(size, -2)
        return (tokens | self.vertical[:, :, None]) & self.allowed(device)

    def _tile_mask(self, query, key, first_block, offset) -> torch.Tensor:
        """The tiles of blocks query [m] and key [n] that are on: bool [b, h, m, n]."""
        distance = query[:, None] - key
        inside = (distance >= 0) & (key >= first_block[..., None])
        place = torch.where(inside, offset[..., None] + distance, 0)
        heads = self.slash_on.shape[1]
        on = self.slash_on.gather(-1, place.flatten(1)[:, None].expand(-1, heads, -1))
        return on.unflatten(-1, distance.shape) & inside[:, None]


def offsets(documents: Documents, layout: Layout, rank: int, device) -> torch.Tensor:
    """Where the distances of the document of each block's first row begin among K: int64 [b, m].

    Document number i, which begins in block B, has B + i: two documents share a block at most.
    """

    def make():
        first_rows = layout.blocks(rank, device) * layout.block_size
        return documents.first_block(layout, rank, device) + documents.numbers(first_rows)

    return documents.kept(("offsets", layout, rank, device), make)


@dataclass(frozen=True)
class _Document:
    """One document with a probe, on the host.

    entry        of the batch; first, end: its tokens
    offset       of its distances among K; span, the blocks that it touches
    probe        its rows among the probe rows of its sequence
    blocks       its local blocks: shared ones included
    """

    entry: int
    first: int
    end: int
    offset: int
    span: int
    probe: slice
    blocks: slice


@dataclass(frozen=True)
class Plan:
    """What all layers share: which documents are probed, and by which rows.

    probed      the documents with a probe
    rows, mine  int64 and bool [q, b]: local rows of the probes, and whether this rank has them
    window      bool [b, 1, K]: the block distances that local_window turns on
    """

    probed: tuple[_Document, ...]
    rows: torch.Tensor
    mine: torch.Tensor
    window: torch.Tensor


def make_plan(documents: Documents, layout: Layout, rank: int, method, device) -> Plan:
    """The plan of the documents for this rank."""
    size = layout.block_size
    blocks = layout.blocks(rank)
    window = 1 + max(0, -(-(method.local_window - 1) // size))  # block distances 0 .. window - 1 are on
    probed, positions = [], []
    for entry, starts in enumerate(documents.starts):
        places: list[int] = []
        for number, (first, end) in enumerate(zip(starts, [*starts[1:], documents.num_tokens], strict=True)):
            span = (end - 1) // size - first // size + 1
            if span <= window:
                continue
            rows = min(method.last_q, end - first)
            low, high = torch.searchsorted(
                blocks, torch.tensor([first // size, (end - 1) // size + 1])
            ).tolist()
            probe = slice(len(places), len(places) + rows)
            places += range(end - rows, end)
            offset = first // size + number
            probed.append(_Document(entry, first, end, offset, span, probe, slice(low, high)))
        positions.append(places)
    most = max(map(len, positions))
    padded = [[*places, *[-1] * (most - len(places))] for places in positions]
    wanted = torch.tensor(padded, dtype=torch.int64)
    local = layout.positions(rank)
    rows = torch.searchsorted(local, wanted).clamp(max=len(local) - 1)
    mine = local[rows] == wanted
    return Plan(
        tuple(probed),
        *(_moved(tensor.T, device) for tensor in (rows, mine)),
        _moved(_window(documents, layout, window), device),
    )


def build_by_document(  # noqa: PLR0913 - what build has
    method, budgets, query, key, layout, rings, *, rank: int, scale: float, documents: Documents
) -> DocumentSlashIndex:
    """The index of a batch of packed sequences; `budgets` are those of the layer."""
    device, size = query.device, layout.block_size
    name = ("plan", layout, rank, method, device)
    plan = documents.kept(name, lambda: make_plan(documents, layout, rank, method, device))
    b, heads = query.shape[1:3]
    on = plan.window.expand(-1, heads, -1).clone()
    columns = torch.zeros(b, heads, layout.num_tokens, dtype=torch.bool, device=device)
    slots = [0] * b
    if plan.probed:
        scores = _profiles(plan, query, key, layout, rings, rank=rank, scale=scale)
    for document in plan.probed:
        entry, first, end = document.entry, document.first, document.end
        rows = scores[:, entry, :, first:end].flatten(0, 1).contiguous()
        column, distance = select(rows, *budgets.rows(1)).view(2, heads, -1).unbind(0)
        column[:, : method.sink_tokens] = True
        columns[entry, :, first:end] = column
        padded = torch.nn.functional.pad(distance, (0, document.span * size - distance.shape[-1]))
        on[entry, :, document.offset : document.offset + document.span] |= block_distances(padded, size)
        slots[entry] += min(budgets.most_columns + method.sink_tokens, end - first)
    return DocumentSlashIndex(
        layout, rank, on, columns, key.shape[2], min(max(slots), layout.num_tokens), documents=documents
    )


def _profiles(plan: Plan, query, key, layout: Layout, rings, *, rank: int, scale: float) -> torch.Tensor:
    """Mean probability of every column and every distance in its document, counted from the document's first
    token: [2, b, h, N].
    """
    size, (s, b, heads, _) = layout.block_size, query.shape
    starts = layout.blocks(rank, query.device) * size
    entries = torch.arange(b, device=query.device)
    probe = torch.where(plan.mine[..., None, None], query[plan.rows, entries], 0)
    probe = all_reduce(probe, rings)  # exactly: all other terms are zero
    here = [document for document in plan.probed if document.blocks.stop > document.blocks.start]

    def parts(document):
        entry, blocks = slice(document.entry, document.entry + 1), document.blocks
        tokens = slice(blocks.start * size, blocks.stop * size)
        rows = probe[document.probe, entry].contiguous()
        first = document.end - len(rows)
        return tokens, (rows, key[tokens, entry].contiguous(), starts[blocks], first)

    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    mass = torch.full((b, heads, len(probe)), -torch.inf, dtype=wide, device=query.device)
    for document in here:
        _, known = parts(document)
        mass[document.entry, :, document.probe] = log_mass(*known, scale, size, document.first)[0]
    lse = torch.logsumexp(all_gather(mass, rings), 0)
    vertical = torch.zeros(b, heads, s, dtype=wide, device=query.device)
    slash = torch.zeros(b, heads, layout.num_tokens, dtype=wide, device=query.device)
    settings = {"scale": scale, "block_size": size}
    for document in here:
        entry, first, end = document.entry, document.first, document.end
        tokens, known = parts(document)
        rows = lse[entry : entry + 1, :, document.probe]
        column, distance = probe_scores(*known, rows, **settings, num_tokens=end - first, begin=first)
        vertical[entry, :, tokens] += column[0]  # a block shared with a neighbour has both their columns
        slash[entry, :, first:end] = distance[0]
    vertical = layout.unshard(list(all_gather(vertical, rings)), -1)
    return torch.stack([vertical, all_reduce(slash, rings)])


def _window(documents: Documents, layout: Layout, window: int) -> torch.Tensor:
    """The first `window` distances of every document: bool [b, 1, K]."""
    count = layout.num_blocks + max(len(row) for row in documents.starts)
    on = torch.zeros(len(documents.starts), 1, count, dtype=torch.bool)
    for entry, starts in enumerate(documents.starts):
        for number, first in enumerate(starts):
            offset = first // layout.block_size + number
            on[entry, :, offset : offset + window] = True
    return on


def _moved(tensor: torch.Tensor, device) -> torch.Tensor:
    """A copy on the device that nobody waits for."""
    tensor = tensor.contiguous()
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
