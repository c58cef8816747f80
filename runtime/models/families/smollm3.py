"""SmolLM3: Llama in which every fourth layer turns nothing."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerRotary, read_common, windows_by_type
from ..fields import Fields
from ..rope_config import MAX_POSITIONS, RopeConfig

_DEFAULT_INTERVAL = 4
_DEFAULT_THETA = 2e6


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(config, family, rope=_rope, is_tied=True)
    attention_bias = config.boolean("attention_bias", default=False)
    is_turned = read_turned(config, common.num_layers)
    window = config.optional_integer("sliding_window", low=1, high=MAX_POSITIONS)
    if not config.boolean("use_sliding_window", default=False):
        window = None
    by_place = [None if turned else window for turned in is_turned]
    return replace(
        common,
        windows=windows_by_type(config, common.num_layers, window, by_place),
        layer_rotary=tuple(LayerRotary.MAIN if turned else LayerRotary.NONE for turned in is_turned),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", default=False),
    )


def _rope(config: Fields, *, head_dim: int, max_positions: int) -> RopeConfig:
    return RopeConfig.from_fields(
        config, head_dim=head_dim, max_positions=max_positions, default_theta=_DEFAULT_THETA
    )


def read_turned(config: Fields, num_layers: int) -> list[bool]:
    """A flag for each layer, True if it rotates queries and keys: `no_rope_layers` has a 1 for those."""
    stated = config.get("no_rope_layers")
    if stated is None:
        interval = config.integer("no_rope_layer_interval", low=1, high=1 << 16, default=_DEFAULT_INTERVAL)
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if (
        not isinstance(stated, list)
        or len(stated) < num_layers
        or any(isinstance(one, bool) or one not in (0, 1) for one in stated)
    ):
        raise config.wrong("no_rope_layers", f"but must be 0 or 1 for each of {num_layers} layers")
    return [one == 1 for one in stated[:num_layers]]
