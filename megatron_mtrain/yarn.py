"""YaRN's settings, as Hugging Face's config.json, Megatron's arguments and --rope-scaling spell them.

YaRN (arXiv 2309.00071) stretches the positions of slow rotary dimensions by `factor`, leaves fast ones, and
ramps between them; the ramp is computed from the length before the extension. It also multiplies cos and sin
by an attention factor, 0.1 ln(factor) + 1 unless a model says otherwise."""

import math
from argparse import Namespace
from dataclasses import dataclass


@dataclass(frozen=True)
class Yarn:
    """YaRN from `original` tokens to `factor` times as many."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1 ln(factor) + 1
    whole_bounds: bool = True  # the ramp begins and ends at whole dimensions

    def __post_init__(self):
        if not self.factor > 1:
            raise ValueError(
                f"YaRN factor {self.factor:g} must be above 1: it is new length / original length"
            )
        if self.original < 1:
            raise ValueError(f"YaRN original length {self.original} must be at least 1 token")

    @property
    def reach(self) -> int:
        """Tokens that the extended positions cover."""
        return int(self.original * self.factor)


def parse(text: str, original: int) -> Yarn:
    """YaRN as --rope-scaling gives it, `yarn:FACTOR` or `yarn:FACTOR:ORIGINAL`, with `original` tokens if not
    given. Raises ValueError for anything else."""
    kind, *numbers = text.split(":")
    if kind != "yarn" or len(numbers) not in (1, 2):
        raise ValueError(f"--rope-scaling {text} is unknown; give yarn:FACTOR or yarn:FACTOR:ORIGINAL_TOKENS")
    try:
        factor, length = float(numbers[0]), int(numbers[1]) if len(numbers) == 2 else original
    except ValueError:
        raise ValueError(
            f"--rope-scaling {text}: FACTOR must be a number, ORIGINAL_TOKENS a whole number"
        ) from None
    return Yarn(factor, length)


def from_hf(config: dict, source: str) -> Yarn | None:
    """The YaRN of a config.json, in the spelling of transformers 4 or 5; None for plain rotary positions.

    Raises ValueError, with `source` in it, for any other rope type.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ValueError(f"{source}: rope type {kind!r} cannot be used; only default and yarn can")
    if kind == "default":
        return None
    longest = config.get("max_position_embeddings", 32768)
    original = rope.get("original_max_position_embeddings") or longest
    factor = float(rope.get("factor") or longest / original)
    attention = rope.get("attention_factor")
    if attention is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        attention = _attention_factor(factor, rope["mscale"], rope["mscale_all_dim"])
    return Yarn(
        factor=factor,
        original=int(original),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=attention,
        whole_bounds=rope.get("truncate", True),
    )


def to_hf(yarn: Yarn) -> dict:
    """The `rope_scaling` of a config.json."""
    rope = {"rope_type": "yarn", "factor": yarn.factor, "original_max_position_embeddings": yarn.original}
    rope |= {"beta_fast": yarn.beta_fast, "beta_slow": yarn.beta_slow}
    if yarn.attention_factor is not None:
        rope["attention_factor"] = yarn.attention_factor
    return rope if yarn.whole_bounds else rope | {"truncate": False}


def to_arguments(yarn: Yarn) -> dict:
    """Megatron's arguments by destination; its attention factor is 0.1 mscale ln(factor) + 1 here."""
    mscale = 1.0
    if yarn.attention_factor is not None:
        mscale = (yarn.attention_factor - 1) / (0.1 * math.log(yarn.factor))
    return {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": yarn.factor,
        "yarn_original_max_position_embeddings": yarn.original,
        "yarn_beta_fast": yarn.beta_fast,
        "yarn_beta_slow": yarn.beta_slow,
        "yarn_correction_range_round_to_int": yarn.whole_bounds,
        "mscale": mscale,
        "mscale_all_dim": 0.0,
    }


def from_arguments(args: Namespace) -> Yarn | None:
    """The YaRN of a run's arguments, None when it has none."""
    if args.position_embedding_type != "yarn":
        return None
    factor = float(args.rotary_scaling_factor)
    attention = _attention_factor(factor, args.mscale, args.mscale_all_dim)
    usual = math.isclose(attention, _attention_factor(factor, 1.0, 0.0), rel_tol=1e-12)
    whole = args.yarn_correction_range_round_to_int
    return Yarn(
        factor=factor,
        # Megatron fills in these three where an argument is missing.
        original=args.yarn_original_max_position_embeddings or 4096,
        beta_fast=args.yarn_beta_fast or 32.0,
        beta_slow=args.yarn_beta_slow or 1.0,
        attention_factor=None if usual else attention,
        whole_bounds=True if whole is None else whole,
    )


def _attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)
