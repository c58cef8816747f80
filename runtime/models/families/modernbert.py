"""ModernBERT: rotary positions, norms before attention and MLP, a gated MLP, and windows in two of three layers."""

from __future__ import annotations

from ..encoder_config import EncoderConfig, EncoderNames
from ..fields import ACTIVATIONS, Fields, shape_of
from ..rope_config import MAX_POSITIONS

_NAMES = EncoderNames(
    roots=("", "model."),
    words="embeddings.tok_embeddings",
    norm="embeddings.norm",
    layer="layers.{}.",
    qkv=("attn.Wqkv",),
    output="attn.Wo",
    attention_norm="attn_norm",
    up=("mlp.Wi",),
    down="mlp.Wo",
    mlp_norm="mlp_norm",
    final_norm="final_norm",
    dense="head.dense",
    head_norm="head.norm",
    scores="classifier",
)
_KINDS = ("full_attention", "sliding_attention")
_THETAS = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}  # where the file leaves them out
_THETA_KEYS = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}


def read(config: Fields, family: str) -> EncoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    shape = shape_of(config)
    attention_bias = config.boolean("attention_bias", default=False)
    rope_theta = _theta(config, "full_attention")
    return EncoderConfig(
        family=family,
        names=_NAMES,
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_layers=shape["num_layers"],
        num_heads=shape["num_heads"],
        activation=config.choice("hidden_activation", ACTIVATIONS, default="gelu"),
        norm_eps=config.number("norm_eps", low=0.0, high=1.0, default=1e-5),
        max_tokens=config.integer("max_position_embeddings", low=1, high=MAX_POSITIONS, default=8_192),
        is_gated=True,
        has_pre_norm=True,
        has_norm_bias=config.boolean("norm_bias", default=False),
        has_qkv_bias=attention_bias,
        has_output_bias=attention_bias,
        has_mlp_bias=config.boolean("mlp_bias", default=False),
        windows=_windows(config, shape["num_layers"]),
        rope_theta=rope_theta,
        local_rope_theta=_local_theta(config, rope_theta),
        head_activation=config.choice("classifier_activation", ACTIVATIONS, default="gelu"),
        has_head_bias=config.boolean("classifier_bias", default=False),
        has_head_norm=True,
        pooling=config.choice("classifier_pooling", ("cls", "mean"), default="cls"),
    )


def _windows(config: Fields, num_layers: int) -> tuple[int | None, ...]:
    """`local_attention` counts the tokens of both sides."""
    side = config.integer("local_attention", low=2, high=MAX_POSITIONS, default=128) // 2
    kinds = config.texts("layer_types")
    if kinds is None:
        interval = config.integer("global_attn_every_n_layers", low=1, high=1 << 16, default=3)
        return tuple(side if index % interval else None for index in range(num_layers))
    if len(kinds) < num_layers or not set(kinds) <= set(_KINDS):
        raise config.wrong(
            "layer_types", f"but must say {' or '.join(_KINDS)} for each of {num_layers} layers"
        )
    return tuple(side if kind == "sliding_attention" else None for kind in kinds[:num_layers])


def _theta(config: Fields, kind: str) -> float:
    """Of `rope_parameters`, or of the key that files had before."""
    default = config.number(_THETA_KEYS[kind], low=2.0, high=1e12, default=_THETAS[kind])
    for key in ("rope_scaling", "rope_parameters"):
        rope = Fields(config.get(key) or {}, where=f"{key}.")
        if key == "rope_parameters" and kind in rope:
            rope = Fields(rope.get(kind), where=f"{key}.{kind}.")
        rope.choice("rope_type", ("default",), default="default")
        rope.choice("type", ("default",), default="default")
        default = rope.number("rope_theta", low=2.0, high=1e12, default=default)
    return default


def _local_theta(config: Fields, rope_theta: float) -> float:
    """That of all layers, where the file says null."""
    key = _THETA_KEYS["sliding_attention"]
    is_shared = config.states(key) and key not in config and "rope_parameters" not in config
    return rope_theta if is_shared else _theta(config, "sliding_attention")
