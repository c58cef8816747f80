"""MPNet: positions from a table, and a bias of attention scores by the distance of two tokens."""

from __future__ import annotations

from msgspec.structs import replace

from ..encoder_config import EncoderConfig, EncoderNames, PositionBias, offset_positions, read_common
from ..fields import Fields

_NAMES = EncoderNames(
    roots=("", "mpnet."),
    relative="encoder.relative_attention_bias",
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    output="attention.attn.o",
    attention_norm="attention.LayerNorm",
)
_NUM_BUCKETS, _MAX_DISTANCE = 32, 128  # transformers computes with these whatever a file says
_FIRST_POSITION = 2  # likewise; the padding token has id 1


def read(config: Fields, family: str) -> EncoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    config.integer(
        "relative_attention_num_buckets", low=_NUM_BUCKETS, high=_NUM_BUCKETS, default=_NUM_BUCKETS
    )
    common = read_common(config, family, _NAMES)
    return replace(
        offset_positions(common, _FIRST_POSITION), position_bias=PositionBias(_NUM_BUCKETS, _MAX_DISTANCE)
    )
