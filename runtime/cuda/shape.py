"""What of a decoder decides about its kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .variants import Shape

if TYPE_CHECKING:
    import torch

    from ..models.config import DecoderConfig
    from ..models.decoder import Decoder

_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def short_name(dtype: torch.dtype) -> str:
    """As Triton calls it; the name itself of what it has no kernels for."""
    name = str(dtype).removeprefix("torch.")
    return _NAMES.get(name, name)


def shape_of(decoder: Decoder, block_size: int) -> Shape:
    layer = decoder.layers[0]
    return _shape(
        decoder.config, short_name(decoder.dtype), short_name(layer.attention_norm.weight.dtype), block_size
    )


def shape_of_config(config: DecoderConfig, block_size: int) -> tuple[Shape, ...]:
    """Of a model that is not there: in the dtype that its config says, with norms in that and in fp32."""
    dtype = _NAMES.get(config.dtype or "bfloat16", "bf16")
    return tuple(_shape(config, dtype, norm, block_size) for norm in dict.fromkeys((dtype, "fp32")))


def _shape(config: DecoderConfig, dtype: str, norm_dtype: str, block_size: int) -> Shape:
    return Shape(
        dtype=dtype,
        norm_dtype=norm_dtype,
        hidden_size=config.hidden_size,
        attended_size=config.num_heads * config.head_dim,
        inner_size=config.intermediate_size,
        head_dim=config.head_dim,
        rotary_dim=config.rope.rotary_dim,
        group=config.num_heads // config.num_kv_heads,
        has_head_norms=config.qk_norm,
        activation=config.activation,
        block_size=block_size,
    )
