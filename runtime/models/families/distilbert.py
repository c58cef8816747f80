"""DistilBERT: BERT without token types, with names of its own."""

from __future__ import annotations

from ..encoder_config import EncoderConfig, EncoderNames
from ..fields import ACTIVATIONS, MAX_HEADS, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, Fields
from ..rope_config import MAX_POSITIONS

_NAMES = EncoderNames(
    roots=("", "distilbert."),
    layer="transformer.layer.{}.",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up=("ffn.lin1",),
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
    dense="pre_classifier",
    scores="classifier",
)


def read(config: Fields, family: str) -> EncoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    max_positions = config.integer("max_position_embeddings", low=1, high=MAX_POSITIONS, default=512)
    return EncoderConfig(
        family=family,
        names=_NAMES,
        vocab_size=config.integer("vocab_size", low=1, high=MAX_VOCABULARY),
        hidden_size=config.integer("dim", low=1, high=MAX_WIDTH),
        intermediate_size=config.integer("hidden_dim", low=1, high=MAX_WIDTH),
        num_layers=config.integer("n_layers", low=1, high=MAX_LAYERS),
        num_heads=config.integer("n_heads", low=1, high=MAX_HEADS),
        activation=config.choice("activation", ACTIVATIONS, default="gelu"),
        norm_eps=1e-12,  # no key says another
        max_tokens=max_positions,
        max_positions=max_positions,
        head_activation="relu",
        pooling="cls",
    )
