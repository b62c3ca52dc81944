"""The sizes of a Qwen2, Qwen2.5 or dense Qwen3 model, as Hugging Face's config.json and as Megatron's
arguments.

`from_hf` and `to_hf` read and write config.json; `from_arguments` and `to_arguments` do the same with
Megatron's argparse destinations. Everything that both sides know passes through here, in either direction.
"""

from argparse import Namespace
from dataclasses import dataclass

from . import yarn as yarn_settings
from .yarn import Yarn

SUPPORTED = "Qwen2, Qwen2.5 and dense Qwen3 (model_type qwen2 or qwen3) can be used"


@dataclass(frozen=True)
class QwenShape:
    """What determines the weights of a Qwen model, and their rotary positions."""

    family: str  # qwen2: bias on q, k, v; qwen3: norm of q and k, no bias
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    vocab_size: int
    tied: bool
    norm_eps: float = 1e-6
    rope_theta: int = 1_000_000
    init_std: float = 0.02
    max_positions: int = 32768
    yarn: Yarn | None = None

    def __post_init__(self):
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"{self.num_heads} attention heads are not a multiple of {self.num_groups} key heads"
            )

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have a bias."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether q and k are normalised per head."""
        return self.family == "qwen3"


def from_hf(config: dict, source: str) -> QwenShape:
    """The shape that a config.json describes, read by transformers' own configuration classes.

    `source` names the file in errors. Raises ValueError for another architecture, and for an option without a
    counterpart in Megatron.
    """
    from transformers import Qwen2Config, Qwen3Config  # seconds to import, and most runs do not need it

    classes = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}
    family = config.get("model_type")
    if family not in classes:
        raise ValueError(f"{source}: model_type {family!r} is another architecture; {SUPPORTED}")
    yarn = yarn_settings.from_hf(config, source)
    known = classes[family].from_dict(dict(config))
    sliding = "sliding_attention" in known.layer_types
    _require(source, "hidden_act", known.hidden_act, "silu")
    _require(source, "use_sliding_window", sliding, False)
    _require(source, "attention_bias", family == "qwen3" and known.attention_bias, False)
    theta = known.rope_parameters["rope_theta"]
    if theta != int(theta):
        raise ValueError(f"{source}: rope_theta {theta} is not a whole number, as --rotary-base has to be")
    return QwenShape(
        family=family,
        num_layers=known.num_hidden_layers,
        hidden_size=known.hidden_size,
        ffn_hidden_size=known.intermediate_size,
        num_heads=known.num_attention_heads,
        num_groups=known.num_key_value_heads,
        head_dim=getattr(known, "head_dim", None) or known.hidden_size // known.num_attention_heads,
        vocab_size=known.vocab_size,
        tied=known.tie_word_embeddings,
        norm_eps=known.rms_norm_eps,
        rope_theta=int(theta),
        init_std=known.initializer_range,
        max_positions=known.max_position_embeddings,
        yarn=yarn,
    )


def _require(source: str, name: str, value, allowed) -> None:
    if value != allowed:
        raise ValueError(
            f"{source}: {name} {value} has no counterpart in Megatron's Qwen; it has to be {allowed}"
        )


def to_hf(shape: QwenShape, base: dict | None = None) -> dict:
    """A config.json of this shape. With `base`, the config.json of the original model, only the longest
    position and rotary fields that differ change: spelled as transformers 4 does, which version 5 and others
    read too."""
    if base is None:
        config = _plain_hf(shape)
    else:
        config, known = dict(base), from_hf(base, "config.json")
        longest = max(known.max_positions, shape.max_positions)
        if longest > known.max_positions:
            config["max_position_embeddings"] = longest
        if (known.yarn, known.rope_theta) == (shape.yarn, shape.rope_theta):
            return config
        config.pop("rope_parameters", None)
    config["rope_theta"] = float(shape.rope_theta)
    config["rope_scaling"] = yarn_settings.to_hf(shape.yarn) if shape.yarn else None
    return config


def _plain_hf(shape: QwenShape) -> dict:
    config = {
        "architectures": [f"{shape.family.capitalize()}ForCausalLM"],
        "model_type": shape.family,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_groups,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": shape.norm_eps,
        "initializer_range": shape.init_std,
        "max_position_embeddings": shape.max_positions,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
    }
    return config | ({"attention_bias": False} if shape.qk_norm else {})


def to_arguments(shape: QwenShape) -> dict:
    """Megatron's arguments by argparse destination."""
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_heads,
        "group_query_attention": True,
        "num_query_groups": shape.num_groups,
        "kv_channels": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "untie_embeddings_and_output_weights": not shape.tied,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "swiglu": True,
        "add_bias_linear": False,
        "rotary_base": shape.rope_theta,
        "init_method_std": shape.init_std,
        "position_embedding_type": "rope",
        **(yarn_settings.to_arguments(shape.yarn) if shape.yarn else {}),
    }


def from_arguments(args: Namespace, source: str) -> QwenShape:
    """The shape of a model that was built from Megatron arguments, as a checkpoint keeps them.

    Raises ValueError when Hugging Face's Qwen has no such model.
    """
    rules = {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False}
    rules["add_qkv_bias"] = not args.qk_layernorm
    for name, needed in rules.items():
        if getattr(args, name) != needed:
            raise ValueError(
                f"{source}: {name} is {getattr(args, name)} where qk_layernorm is {args.qk_layernorm}; a "
                f"Qwen model has {needed}. {SUPPORTED}"
            )
    kind = args.position_embedding_type
    if kind not in ("rope", "yarn"):
        raise ValueError(
            f"{source}: positions of type {kind} are no Qwen model's; only rope and yarn can be used"
        )
    yarn = yarn_settings.from_arguments(args)
    return QwenShape(
        family="qwen3" if args.qk_layernorm else "qwen2",
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_heads=args.num_attention_heads,
        num_groups=args.num_query_groups or args.num_attention_heads,
        head_dim=args.kv_channels,
        vocab_size=args.vocab_size or args.padded_vocab_size,
        tied=not args.untie_embeddings_and_output_weights,
        norm_eps=args.layernorm_epsilon,
        rope_theta=int(args.rotary_base),
        init_std=args.init_method_std,
        max_positions=max(args.max_position_embeddings, yarn.reach if yarn else 0),
        yarn=yarn,
    )
