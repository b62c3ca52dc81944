"""Which tiles are attended: the method table, the only place where a method name is looked up."""

from ..ring import world
from . import dense, minfer, moba, xattn
from .sparse_index import SparseIndex

BUILDERS = {
    "dense": dense.build,
    "zigzag_ring": dense.build,
    "stripe_ring": dense.build,
    "minfer": minfer.build,
    "moba": moba.build,
    "xattn": xattn.build,
}

__all__ = ["SparseIndex", "build_index"]


def build_index(
    config, query, key, layout, rings, layer: int, *, softmax_scale: float | None = None, documents=None
) -> SparseIndex:
    """What the local queries attend, decided by the method of `config`.

    query [s, b, h, d] and key [s, b, g, d] are this rank's shards in layout order, `rings` the process
    groups, inner to outer (all of their ranks call this together), layer the zero-based layer of the whole
    model. `documents` are the Documents of the batch, None where every sequence is one. The index is a
    function of the values of query and key over all ranks and of the documents, carries no gradient, and is
    built without a wait for the device.
    """
    if documents is not None and not documents.several:
        documents = None  # what is faster without
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    rank, _ = world(rings)
    build = BUILDERS[config.attn_type]
    settings = {"rank": rank, "layer": layer, "scale": scale, "documents": documents}
    return build(config, query.detach(), key.detach(), layout, rings, **settings)
