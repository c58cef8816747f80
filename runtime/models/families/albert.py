"""ALBERT: embeddings that are projected to the layers' width, and layers that share their weights, in groups."""

from __future__ import annotations

from msgspec.structs import replace

from ..encoder_config import EncoderConfig, EncoderNames, read_common, refuse_unless
from ..fields import ACTIVATIONS, MAX_WIDTH, Fields

_NAMES = EncoderNames(
    roots=("", "albert."),
    projection="encoder.embedding_hidden_mapping_in",
    layer="encoder.albert_layer_groups.{}.albert_layers.0.",
    qkv=("attention.query", "attention.key", "attention.value"),
    output="attention.dense",
    attention_norm="attention.LayerNorm",
    up=("ffn",),
    down="ffn_output",
    mlp_norm="full_layer_layer_norm",
    dense="albert.pooler",
    scores="classifier",
)


def read(config: Fields, family: str) -> EncoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(config, family, _NAMES)
    refuse_unless(config, inner_group_num=1)
    num_groups = config.integer("num_hidden_groups", low=1, high=common.num_layers, default=1)
    return replace(
        common,
        activation=config.choice("hidden_act", ACTIVATIONS, default="gelu_new"),
        type_vocab_size=config.integer("type_vocab_size", low=1, high=1 << 16, default=2),
        embedding_size=config.integer("embedding_size", low=1, high=MAX_WIDTH, default=128),
        num_layer_groups=num_groups,
    )
