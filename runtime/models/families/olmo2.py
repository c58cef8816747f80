"""OLMo 2: norms behind attention and MLP instead of before, and one norm over all heads of the queries or keys; OLMo 3
with windows in most layers, which the stretching of its rotary embedding leaves as they are."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, LayerRotary, read_common, read_windows
from ..fields import Fields, Norm
from ..rope_config import LOCAL_KIND, RopeConfig

NAMES = LayerNames(
    attention_norm=None,
    attention_output_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_output_norm="post_feedforward_layernorm",
)
_ROPE = partial(RopeConfig.from_fields, default_theta=5e5)


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    is_third = family == "olmo3"
    rope = partial(_ROPE, kind="full_attention") if is_third else RopeConfig.from_fields
    common = read_common(config, family, rope=rope, norm_eps=1e-5)
    attention_bias = config.boolean("attention_bias", default=False)
    olmo = replace(
        common,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        joint_qk_norm=True,
        norm=Norm.RMS_WIDE,
        names=NAMES,
        wide_rotary=True,
    )
    if not is_third:
        return olmo
    windows = read_windows(config, common.num_layers, interval=4)
    positions = common.rope.max_positions
    return replace(
        olmo,
        windows=windows,
        local_rope=_ROPE(config, head_dim=common.head_dim, max_positions=positions, kind=LOCAL_KIND),
        layer_rotary=tuple(LayerRotary.MAIN if window is None else LayerRotary.LOCAL for window in windows),
    )
