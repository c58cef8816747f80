"""StableLM: Llama with layer norms that have biases, and a quarter of each head turned; StableLM 2 12B, with norms of
heads, is refused."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, read_common, refuse_set
from ..fields import Fields, Norm
from ..rope_config import RopeConfig

_ROPE = partial(RopeConfig.from_fields, may_be_partial=True, default_partial=0.25)
_PARALLEL = LayerNames(mlp_norm=None)


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    refuse_set(config, "qk_layernorm")
    common = read_common(config, family, rope=_ROPE, norm_eps_key="layer_norm_eps", norm_eps=1e-5)
    is_parallel = config.boolean("use_parallel_residual", default=False)
    return replace(
        common,
        qkv_bias=config.boolean("use_qkv_bias", default=False),
        norm=Norm.LAYER,
        norm_bias=True,
        is_parallel=is_parallel,
        names=_PARALLEL if is_parallel else LayerNames(),
    )
