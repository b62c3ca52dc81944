"""What to attend: AttentionConfig, one nested dataclass per method, read from YAML or a dict.

A configuration is checked in full when it is made: whatever it holds can run.
"""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from .kernels.tiles import BACKENDS
from .pattern import HeadPattern, load_pattern, shipped_patterns
from .ring import COMMUNICATION
from .validation import LARGEST, check_choice, check_int, find_file

IMPLEMENTATIONS = ("zigzag", "stripe", "dr_stripe")
REUSE = ("nothing", "index", "output")
OWN_FIELDS = ("implementation", "block_size", "backend", "reuse", "ring_comm")  # of every method, in YAML
SHIPPED = Path(__file__).parent / "train_attn_configs"


@dataclass(frozen=True)
class DenseConfig:
    """Exact attention; it has no settings of its own."""


@dataclass(frozen=True)
class MinferConfig:
    """Vertical-slash sparse attention: budgets per head and what is always attended.

    pattern_config_name  stem of a shipped pattern file, or a path to a JSON file
    last_q               tokens at the end of the sequence whose attention ranks columns and slashes
    sink_tokens          first tokens of the sequence, always attended
    local_window         distances 0 .. local_window - 1, in tokens, always attended
    """

    pattern_config_name: str
    last_q: int = 64
    sink_tokens: int = 30
    local_window: int = 100

    def __post_init__(self):
        if not isinstance(self.pattern_config_name, str):
            raise ValueError(f"pattern_config_name {self.pattern_config_name!r} is not a name or a path")
        for name, least in (("last_q", 1), ("sink_tokens", 0), ("local_window", 0)):
            check_int(name, getattr(self, name), least)
        load_pattern(self.pattern_config_name)

    @property
    def pattern(self) -> tuple[tuple[HeadPattern, ...], ...]:
        """Budgets by layer and query head of the whole model."""
        return load_pattern(self.pattern_config_name)


@dataclass(frozen=True)
class MobaConfig:
    """Mixture of block attention: every query token chooses whole chunks of earlier keys, and sees its own.

    moba_chunk_size  tokens of a chunk, a multiple of the block size
    moba_topk        chunks that a token attends, its own included
    """

    moba_chunk_size: int
    moba_topk: int

    def __post_init__(self):
        check_int("moba_chunk_size", self.moba_chunk_size, 1)
        check_int("moba_topk", self.moba_topk, 1)


@dataclass(frozen=True)
class XattnConfig:
    """XAttention: blocks chosen by sums along the antidiagonals of the scores.

    granularity  tokens of a block; the YAML's word for block_size
    stride       tokens of a cell: scores are summed over `stride` antidiagonal elements of a stride x stride
                 square
    norm         divides the scores of cells, over sqrt(d) * stride
    threshold    share of a query block's probability that its chosen blocks reach
    keep_sink    always choose the first block (it always is)
    keep_recent  always choose the block before the own one
    chunk_size   most query tokens scored at a time: bounds memory, changes nothing else
    The others are accepted at the one value that they have in published files.
    """

    granularity: int = 128
    stride: int = 16
    norm: float = 1.0
    threshold: float = 0.9
    keep_sink: bool = False
    keep_recent: bool = False
    chunk_size: int = 16384
    softmax: bool = True
    select_mode: str = "inverse"
    use_triton: bool = True
    causal: bool = True
    kdb: int = 1

    def __post_init__(self):
        for name in ("granularity", "stride", "chunk_size"):
            check_int(name, getattr(self, name), 1)
        if self.granularity % self.stride:
            raise ValueError(
                f"stride {self.stride} does not divide granularity {self.granularity}; use a divisor, "
                "such as 16 or 8"
            )
        norm = self.norm
        if isinstance(norm, bool) or not isinstance(norm, int | float) or not 0 < norm <= LARGEST:
            raise ValueError(f"norm {norm!r} must be a number above 0 and at most {LARGEST}")
        threshold = self.threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
            raise ValueError(f"threshold {threshold!r} must be a number from 0 to 1")
        for name in ("keep_sink", "keep_recent"):
            check_choice(name, getattr(self, name), (True, False))
        published = {"softmax": True, "select_mode": "inverse", "use_triton": True, "causal": True, "kdb": 1}
        for name, value in published.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} {getattr(self, name)!r} is not supported; leave it out, or set {value}"
                )


METHODS: dict[str, type] = {
    "dense": DenseConfig,
    "zigzag_ring": DenseConfig,
    "stripe_ring": DenseConfig,
    "minfer": MinferConfig,
    "moba": MobaConfig,
    "xattn": XattnConfig,
}
ATTN_TYPES = tuple(METHODS)
_FIXED_LAYOUT = {"zigzag_ring": "zigzag", "stripe_ring": "stripe"}


@dataclass(frozen=True)
class AttentionConfig:
    """One attention method on one layout.

    attn_type       one of ATTN_TYPES
    implementation  zigzag, stripe or dr_stripe (stripe layout on a two-level ring)
    block_size      tokens of a block: the unit of the layout and of the sparse index
    backend         kernels that run it: auto, or a name that must be able to run
    reuse           what a recomputed forward takes over from the first one: nothing, index, or output (index,
                    out and lse: no second ring pass, at two tensors a layer)
    ring_comm       how shards travel: ring (hop by hop) or allgather (all at once: short rings on fast links)
    head_offset     first query head of this rank in the whole model (tensor parallelism)
    method          the method's own settings
    """

    attn_type: str
    implementation: str = "stripe"
    block_size: int = 128
    backend: str = "auto"
    reuse: str = "index"
    ring_comm: str = "ring"
    head_offset: int = 0
    method: Any = field(default_factory=DenseConfig)

    def __post_init__(self):
        check_choice("attn_type", self.attn_type, ATTN_TYPES)
        check_choice("implementation", self.implementation, IMPLEMENTATIONS)
        check_choice("backend", self.backend, BACKENDS)
        check_choice("reuse", self.reuse, REUSE)
        check_choice("ring_comm", self.ring_comm, COMMUNICATION)
        check_int("block_size", self.block_size, 1)
        check_int("head_offset", self.head_offset, 0)
        needed = _FIXED_LAYOUT.get(self.attn_type, self.implementation)
        if self.implementation != needed:
            raise ValueError(
                f"implementation {self.implementation!r} does not fit attn_type {self.attn_type!r}, which is "
                f"{needed} by definition; leave it out, or use attn_type dense"
            )
        if not isinstance(self.method, METHODS[self.attn_type]):
            raise ValueError(
                f"attn_type {self.attn_type!r} needs {METHODS[self.attn_type].__name__}; got {self.method!r}"
            )
        if self.attn_type == "moba" and self.method.moba_chunk_size % self.block_size:
            raise ValueError(
                f"moba_chunk_size {self.method.moba_chunk_size} is not a multiple of block_size "
                f"{self.block_size}; use one, or a smaller block_size"
            )
        if self.attn_type == "xattn" and self.method.granularity != self.block_size:
            raise ValueError(
                f"granularity {self.method.granularity} and block_size {self.block_size} differ; they are "
                "one thing for xattn: give granularity alone"
            )

    @property
    def layout(self) -> str:
        """Name of the layout, for make_layout."""
        return "zigzag" if self.implementation == "zigzag" else "stripe"

    @property
    def two_level(self) -> bool:
        """Whether the ring is a ring of rings (inner: ranks of one node, outer: across nodes)."""
        return self.implementation == "dr_stripe"

    @classmethod
    def from_dict(cls, attn_type: str, fields: dict[str, Any] | None = None) -> "AttentionConfig":
        """The configuration with the given YAML fields. Raises ValueError for unknown fields or values."""
        check_choice("attn_type", attn_type, ATTN_TYPES)
        given = dict(fields or {})
        own = {name: given.pop(name) for name in OWN_FIELDS if name in given}
        own.setdefault("implementation", _FIXED_LAYOUT.get(attn_type, "stripe"))
        if attn_type == "xattn":
            own.setdefault("block_size", given.get("granularity", XattnConfig.granularity))
            given.setdefault("granularity", own["block_size"])
        return cls(attn_type=attn_type, method=_method(attn_type, given), **own)

    @classmethod
    def from_yaml(cls, attn_type: str, path_or_name: str | Path | None = None) -> "AttentionConfig":
        """The configuration in a YAML file: a path, the name of a shipped file, or None for the defaults."""
        if path_or_name is None:
            return cls.from_dict(attn_type)
        path = find_file(path_or_name, SHIPPED, ".yaml", "train-attn-config")
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # a ValueError: 2026-13-40
            raise ValueError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from None
        if content is None:
            content = {}
        if not isinstance(content, dict):
            raise ValueError(f"{path} must hold `name: value` lines; it holds a {type(content).__name__}")
        try:
            return cls.from_dict(attn_type, content)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_yaml(self) -> str:
        """The YAML text that from_yaml reads back to this configuration (head_offset, a rank's own, is left
        out)."""
        own = {name: getattr(self, name) for name in OWN_FIELDS}
        own |= {item.name: getattr(self.method, item.name) for item in fields(self.method)}
        return yaml.safe_dump(own, sort_keys=False)

    def with_heads(self, head_offset: int) -> "AttentionConfig":
        """The same configuration for the query heads from `head_offset` on."""
        return replace(self, head_offset=head_offset)

    def check_model(self, *, num_layers: int, num_heads: int) -> None:
        """Raises ValueError when the pattern file has no budget for one of the model's layers or query
        heads."""
        if self.attn_type != "minfer":
            return
        name, pattern = self.method.pattern_config_name, self.method.pattern
        if len(pattern) < num_layers:
            raise ValueError(
                f"pattern {name} has {len(pattern)} layers; the model has {num_layers}. {_WAY_OUT}"
            )
        heads = min(len(layer) for layer in pattern)
        if heads < num_heads:
            raise ValueError(
                f"pattern {name} has {heads} heads a layer; the model has {num_heads}. {_WAY_OUT}"
            )


_WAY_OUT = "Give the pattern file of this model as pattern_config_name"


def _method(attn_type: str, given: dict[str, Any]):
    kind = METHODS[attn_type]
    allowed = [item.name for item in fields(kind)]
    unknown = [name for name in given if name not in allowed]
    if unknown:
        everything = [*OWN_FIELDS, *allowed]
        raise ValueError(
            f"unknown field {unknown[0]!r} for attn_type {attn_type}; allowed: {', '.join(everything)}"
        )
    if attn_type == "moba":
        missing = [name for name in allowed if name not in given]
        if missing:
            raise ValueError(
                f"attn_type moba needs {missing[0]}, for example moba_chunk_size: 4096, moba_topk: 12"
            )
    if attn_type == "minfer" and "pattern_config_name" not in given:
        raise ValueError(
            "attn_type minfer needs pattern_config_name, the name of a pattern file: "
            f"{', '.join(shipped_patterns())}"
        )
    return kind(**given)
