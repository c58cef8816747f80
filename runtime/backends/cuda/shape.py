"""The dimensions of a decoder that select its kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...dtypes import DType
from ...models.spec import DecoderSpec
from .variants import Shape

if TYPE_CHECKING:
    import torch

    from ...models.decoder_config import DecoderConfig
    from ..torch.decoder import TorchExecutor

_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def short_name(dtype: torch.dtype) -> str:
    """Triton's name of the dtype, or torch's name if no kernel supports it."""
    name = str(dtype).removeprefix("torch.")
    return _NAMES.get(name, name)


def shape_of(executor: TorchExecutor, block_size: int) -> Shape:
    # That all norms are stored alike is checked elsewhere.
    norm = executor.norm.weight
    return _shape(executor.spec, short_name(executor.dtype), short_name(norm.dtype), block_size)


def shape_of_config(config: DecoderConfig, block_size: int) -> tuple[Shape, ...]:
    """The shapes of a model known only by its config: in the config's dtype, with norms in that and
    in fp32.
    """
    dtype = DType.of_label(config.dtype or "bfloat16")
    spec, name = DecoderSpec.of(config, dtype), _NAMES.get(dtype.label, "bf16")
    return tuple(_shape(spec, name, norm, block_size) for norm in dict.fromkeys((name, "fp32")))


def _shape(spec: DecoderSpec, dtype: str, norm_dtype: str, block_size: int) -> Shape:
    return Shape(
        dtype=dtype,
        norm_dtype=norm_dtype,
        hidden_size=spec.hidden_size,
        attended_size=spec.num_heads * spec.head_dim,
        inner_size=spec.intermediate_size,
        head_dim=spec.head_dim,
        rotary_dim=spec.rotary.dim,
        group=spec.num_heads // spec.num_kv_heads,
        has_head_norms=spec.head_norms,
        activation=spec.activation.value,
        block_size=block_size,
    )
