"""Samples through a model: which answers are right, how likely they are, and the loss by position."""

from collections import defaultdict

import torch
import torch.distributed as dist

from megatron_mtrain import core_attention
from megatron_mtrain.batch import slice_batch
from megatron_mtrain.kernels.pairs import attended_pairs
from tools.eval.scoring import score
from tools.eval.tasks import Sample
from tools.loaded_model import LoadedModel


def score_tokens(loaded: LoadedModel, tokens: torch.Tensor, vocabulary: int) -> torch.Tensor | None:
    """float32 [2, b, N] on the CPU: loss and rightness (0, 1) of each next token of tokens int64 [b, N + 1].

    None on the ranks of pipeline stages other than the last; all ranks of a model call this together.
    """
    batch, num_tokens = tokens.size(0), tokens.size(1) - 1
    whole = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    whole["loss_mask"] = torch.ones(batch, num_tokens)
    whole["position_ids"] = torch.arange(num_tokens).expand(batch, -1)
    context = loaded.groups.cp
    mine = slice_batch(whole, loaded.attention, context.rank(), context.size())

    def call(model):
        how = {"output_processor": score, "output_processor_context": vocabulary}
        return model(mine["tokens"], mine["position_ids"], None, labels=mine["labels"], **how)

    part = loaded.forward(call, batch=batch, num_tokens=num_tokens)
    return None if part is None else loaded.whole(part, 2).cpu()


def score_samples(
    loaded: LoadedModel, samples: list[Sample], vocabulary: int, batch_size: int
) -> list[dict] | None:
    """For each depth of samples of one length: how many answers and answer tokens are right, and their loss.

    The samples are shared out among data-parallel ranks. None on the ranks of other pipeline stages.
    """
    replicas = loaded.groups.dp
    batches = [samples[first : first + batch_size] for first in range(0, len(samples), batch_size)]
    outcomes = []
    for batch in batches[replicas.rank() :: replicas.size()]:
        scores = score_tokens(loaded, torch.stack([sample.tokens for sample in batch]), vocabulary)
        if scores is not None:
            outcomes += [_outcome(*pair) for pair in zip(batch, scores.unbind(1), strict=True)]
    gathered = [None] * replicas.size()
    dist.all_gather_object(gathered, outcomes, group=replicas)
    cells = defaultdict(list)
    for outcome in (outcome for part in gathered for outcome in part):
        cells[outcome.pop("depth")].append(outcome)
    if not cells:
        return None
    return [_mean(depth, cells[depth]) for depth in sorted(cells, key=lambda depth: depth or 0.0)]


def _outcome(sample: Sample, scores: torch.Tensor) -> dict:
    losses, right = scores[:, -sample.answer :]
    return {
        "depth": sample.depth,
        "accuracy": float(right.all()),
        "token_accuracy": float(right.mean()),
        "loss": float(losses.mean()),
    }


def _mean(depth: float | None, outcomes: list[dict]) -> dict:
    means = {name: sum(o[name] for o in outcomes) / len(outcomes) for name in outcomes[0]}
    return {"depth": depth, "samples": len(outcomes), **means}


def loss_by_position(
    loaded: LoadedModel, sequences: list[torch.Tensor], vocabulary: int, bins: int
) -> list[dict] | None:
    """Mean loss in `bins` equal parts of sequences int64 [N + 1]; None on ranks of other pipeline stages."""
    replicas = loaded.groups.dp
    total, count, last = torch.zeros(bins, dtype=torch.float64), 0, False
    for sequence in sequences[replicas.rank() :: replicas.size()]:
        scores = score_tokens(loaded, sequence[None], vocabulary)
        if scores is not None:
            last = True
            total += torch.stack([part.double().mean() for part in scores[0, 0].tensor_split(bins)])
            count += 1
    gathered = [None] * replicas.size()
    dist.all_gather_object(gathered, (total, count, last), group=replicas)
    if not any(last for *_, last in gathered):
        return None
    mean = sum(total for total, *_ in gathered) / sum(count for _, count, _ in gathered)
    num_tokens = len(sequences[0]) - 1
    edges = [len(part) for part in torch.empty(num_tokens).tensor_split(bins)]
    ends = torch.tensor(edges).cumsum(0).tolist()
    return [
        {"first": end - size, "end": end, "loss": loss}
        for size, end, loss in zip(edges, ends, mean.tolist(), strict=True)
    ]


class DensityMeter:
    """Counts what attention layers attend while it is on: `with DensityMeter() as meter: ...`.

    It reads every index, which costs about a layer's time, so it is for one batch of a kind.
    """

    def __enter__(self) -> "DensityMeter":
        self.attended, self.causal = 0.0, 0.0
        self.build_index = core_attention.build_index
        core_attention.build_index = self._counted
        return self

    def __exit__(self, *_error) -> None:
        core_attention.build_index = self.build_index

    def _counted(self, config, query, key, layout, rings, layer, **named):
        index = self.build_index(config, query, key, layout, rings, layer, **named)
        pairs = query.shape[1] * query.shape[2] * layout.num_tokens * (layout.num_tokens + 1) / 2
        sources = range(layout.world_size)
        self.attended += sum(int(attended_pairs(index.tiles(source)).sum()) for source in sources)
        self.causal += pairs / layout.world_size
        return index

    def density(self) -> float:
        """Attended share of the causal pairs, over all ranks, which call this together."""
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        total = torch.tensor([self.attended, self.causal], dtype=torch.float64, device=device)
        dist.all_reduce(total)
        attended, causal = total.tolist()
        return attended / causal
