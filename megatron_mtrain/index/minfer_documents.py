"""minfer on packed sequences: every document has a probe, columns and slashes of its own.

The last queries of a document probe its keys and select by the same budgets as those of a whole sequence. A
query block follows the slashes of the document of its first row. A document that spans no more blocks than
local_window turns on is attended whole, and has no probe.

Documents of about the same length are probed together, as a batch, and all of them share the exchanges: the
work on the host does not grow with their number. On a rank a document is a range of whole blocks, maybe none,
of which the first and the last may be shared with its neighbours.

Legend: as in minfer.py; n documents of a group, L their padded length, T their padded number of local blocks;
the block distances of the documents of a sequence lie one behind another, K in all.
"""

from dataclasses import dataclass, replace

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

    slash_on  bool [b, h, K], the block distances of document D from `offsets` on; 0 is always on
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
class Group:
    """Documents that are probed together; int64 tensors but for the numbers.

    rows       probe rows of each document; length, the padded length L, whole blocks
    entry      [n, 1], the batch entry of each
    first      [n], its first token; last, its first probe row
    places     [n, L], the tokens of each, N past its end
    distances  [n, L / G + 1], where its block distances lie among K, K past its last
    blocks     [n, T], its local blocks, and starts [n, T], where they begin: past every token for padding
    local      [n, T * G], the local places of its tokens in those blocks, s for what is not of it
    """

    rows: int
    length: int
    entry: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    places: torch.Tensor
    distances: torch.Tensor
    blocks: torch.Tensor
    starts: torch.Tensor
    local: torch.Tensor


@dataclass(frozen=True)
class Plan:
    """What all layers share.

    groups         the documents that have a probe
    lengths        their lengths, by batch entry
    row, entry     int64 [q], the local row and the batch entry of every probe row, group by group and
                   document by document; mine, bool [q], whether this rank has it
    window         bool [b, 1, K]: the block distances that local_window turns on
    """

    groups: tuple[Group, ...]
    lengths: tuple[tuple[int, ...], ...]
    row: torch.Tensor
    entry: torch.Tensor
    mine: torch.Tensor
    window: torch.Tensor


def make_plan(documents: Documents, layout: Layout, rank: int, method, device) -> Plan:
    """The plan of the documents for this rank, made on the host."""
    size, count = layout.block_size, documents.num_tokens
    window = 1 + max(0, -(-(method.local_window - 1) // size))  # block distances 0 .. window - 1 are on
    most = layout.num_blocks + max(map(len, documents.starts))  # K
    on = torch.zeros(len(documents.starts), 1, most, dtype=torch.bool)
    alike: dict[tuple[int, int], list[list[int]]] = {}
    lengths: list[list[int]] = [[] for _ in documents.starts]
    for entry, starts in enumerate(documents.starts):
        for number, (first, end) in enumerate(zip(starts, [*starts[1:], count], strict=True)):
            span, offset = (end - 1) // size - first // size + 1, first // size + number
            on[entry, :, offset : offset + window] = True  # beyond its span it is on in the next one too
            if span > window:
                lengths[entry].append(end - first)
                padded = size << (-(-(end - first) // size) - 1).bit_length()  # two to a power of blocks
                kind = min(method.last_q, end - first), padded
                alike.setdefault(kind, []).append([entry, first, end, offset, span])
    groups, rows, entries = [], [], []
    for (probes, padded), members in alike.items():
        table = torch.tensor(members)
        groups.append(_group(probes, padded, table, on.shape[-1], layout, rank))
        rows.append((table[:, 2:3] - probes + torch.arange(probes)).flatten())
        entries.append(table[:, 0].repeat_interleave(probes))
    none = torch.zeros(0, dtype=torch.int64)
    wanted, local = torch.cat([none, *rows]), layout.positions(rank)
    row = torch.searchsorted(local, wanted).clamp(max=len(local) - 1)
    tensors = row, torch.cat([none, *entries]), local[row] == wanted, on
    return Plan(
        tuple(_moved(group, device) for group in groups),
        tuple(map(tuple, lengths)),
        *(_to(tensor, device) for tensor in tensors),
    )


def _group(rows: int, length: int, table, unused: int, layout: Layout, rank: int) -> Group:
    """The group of documents [n, (entry, first, end, offset, span)]; `unused` is K."""
    size, tokens, blocks = layout.block_size, layout.num_tokens, layout.blocks(rank)
    entry, first, end, offset, span = table.split(1, 1)
    places = first + torch.arange(length)
    numbers = torch.arange(length // size + 1)
    low = torch.searchsorted(blocks, first // size)
    high = torch.searchsorted(blocks, (end - 1) // size, right=True)
    slots = torch.arange(max(1, int((high - low).max())))
    inside = low + slots < high
    held = torch.where(inside, low + slots, 0)
    starts = torch.where(inside, blocks[held] * size, tokens)
    positions = (starts[..., None] + torch.arange(size)).flatten(1)
    local = (held[..., None] * size + torch.arange(size)).flatten(1)
    return Group(
        rows,
        length,
        entry,
        first[:, 0],
        end[:, 0] - rows,
        torch.where(places < end, places, tokens),
        torch.where(numbers < span, offset + numbers, unused),
        held,
        starts,
        torch.where((positions >= first) & (positions < end), local, layout.local_tokens),
    )


def build_by_document(  # noqa: PLR0913 - what build has
    method, budgets, query, key, layout, rings, *, rank: int, scale: float, documents: Documents
) -> DocumentSlashIndex:
    """The index of a batch of packed sequences; `budgets` are those of the layer."""
    device, (b, heads) = query.device, query.shape[1:3]
    name = ("plan", layout, rank, method, device)
    plan = documents.kept(name, lambda: make_plan(documents, layout, rank, method, device))
    # Heads last, and one more place for what is not of a document: so that groups read and write by place.
    on = torch.nn.functional.pad(plan.window.mT.expand(-1, -1, heads), (0, 0, 0, 1)).contiguous()
    columns = torch.zeros(b, layout.num_tokens + 1, heads, dtype=torch.bool, device=device)
    scores = _profiles(plan, query, key, layout, rings, rank=rank, scale=scale) if plan.groups else None
    for group in plan.groups:
        rows = scores[:, group.entry, group.places].mT.contiguous()
        kept = select(rows.flatten(0, 2), *budgets.rows(len(group.first))).view(rows.shape)
        kept &= (group.places < layout.num_tokens)[:, None]
        column, distance = kept.unbind(0)
        column[..., : method.sink_tokens] = True
        columns[group.entry, group.places] = column.mT
        padded = torch.nn.functional.pad(distance, (0, layout.block_size))
        blocks = block_distances(padded, layout.block_size).mT
        on[group.entry, group.distances] |= blocks
    most = budgets.most_columns + method.sink_tokens
    slots = max(sum(min(most, length) for length in lengths) for lengths in plan.lengths)
    return DocumentSlashIndex(
        layout,
        rank,
        on[:, :-1].mT.contiguous(),
        columns[:, :-1].mT.contiguous(),
        key.shape[2],
        slots,
        documents=documents,
    )


def _profiles(plan: Plan, query, key, layout: Layout, rings, *, rank: int, scale: float) -> torch.Tensor:
    """Mean probability of every column, by place, and of every distance, by place from the first token of its
    document on: [2, b, N + 1, h], 0 at the last place.
    """
    size, (s, b, heads, _) = layout.block_size, query.shape
    probe = torch.where(plan.mine[:, None, None], query[plan.row, plan.entry], 0)
    probe = all_reduce(probe, rings)  # exactly: all other terms are zero
    known = []
    by_block = key.unflatten(0, (-1, size)).transpose(1, 2)
    sizes = [group.rows * len(group.first) for group in plan.groups]
    for group, rows in zip(plan.groups, probe.split(sizes), strict=True):
        keys = by_block[group.blocks.T, group.entry[:, 0]].transpose(1, 2).flatten(0, 1)
        rows = rows.unflatten(0, (-1, group.rows)).transpose(0, 1).contiguous()
        known.append((rows, keys.contiguous(), group.starts, group.last))
    mass = [
        log_mass(*parts, scale, size, group.first).flatten()
        for group, parts in zip(plan.groups, known, strict=True)
    ]
    lse = torch.logsumexp(all_gather(torch.cat(mass), rings), 0)
    vertical, slash = (lse.new_zeros(b, count, heads) for count in (s + 1, layout.num_tokens + 1))
    for group, parts, part in zip(plan.groups, known, lse.split([len(part) for part in mass]), strict=True):
        part = part.view(-1, heads, group.rows)
        settings = {"scale": scale, "block_size": size, "num_tokens": group.length, "begin": group.first}
        column, distance = probe_scores(*parts, part, **settings)
        vertical[group.entry, group.local] = column.mT
        slash[group.entry, group.places] = distance.mT
    vertical = layout.unshard(list(all_gather(vertical[:, :-1], rings)), 1)
    return torch.stack([torch.nn.functional.pad(vertical, (0, 0, 0, 1)), all_reduce(slash, rings)])


def _moved(group: Group, device) -> Group:
    tensors = {
        name: _to(value, device) for name, value in vars(group).items() if isinstance(value, torch.Tensor)
    }
    return replace(group, **tensors)


def _to(tensor: torch.Tensor, device) -> torch.Tensor:
    """A copy on the device that nobody waits for."""
    tensor = tensor.contiguous()
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
