"""Phi-3 and Phi-4: queries, keys and values in one matrix, as gate and up are; longrope; Phi-4-mini turns part of a
head."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, read_common
from ..fields import Fields
from ..rope_config import MAX_POSITIONS, RopeConfig

_NAMES = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
_DEFAULT_ORIGINAL = 4_096  # original_max_position_embeddings


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(config, family, rope=_rope, norm_eps=1e-5)
    window = config.optional_integer("sliding_window", low=1, high=MAX_POSITIONS)
    return replace(common, windows=(window,) * common.num_layers, names=_NAMES)


def _rope(config: Fields, *, head_dim: int, max_positions: int) -> RopeConfig:
    """Early files call longrope "su" or "yarn"."""
    return RopeConfig.from_fields(
        config,
        head_dim=head_dim,
        max_positions=max_positions,
        may_be_partial=True,
        default_original=_DEFAULT_ORIGINAL,
        spellings={"su": "longrope", "yarn": "longrope"},
    )
