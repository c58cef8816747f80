"""Llama 4's text model: attention within chunks in layers that turn, and to all tokens in the others, whose queries are
scaled by position; mixtures of experts, whose inputs are weighted, with a shared one. A file's tower is not used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec.structs import replace

from ..decoder_config import (
    DecoderConfig,
    LayerNames,
    LayerRotary,
    QueryScaling,
    read_common,
    windows_by_type,
)
from ..experts_config import Experts, ExpertShares, read_experts
from ..fields import MAX_LAYERS, MAX_WIDTH, Fields, text_fields
from ..rope_config import MAX_POSITIONS, RopeConfig
from .smollm3 import read_turned

# transformers' defaults of keys that files leave out; null stays what it is.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 202_048,
    "hidden_size": 5_120,
    "intermediate_size": 8_192,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "attention_chunk_size": 8_192,
}
_NAMES = LayerNames(
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    router="feed_forward.router",
    expert="feed_forward.experts.{}.",
    shared_expert="feed_forward.shared_expert.",
    stacked_experts="feed_forward.experts.",
)


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    if family == "llama4":
        text = read(text_fields(config, family, "llama4_text"), "llama4_text")
        return replace(text, family=family, roots=("language_model.model.",))
    config = config.filled({key: value for key, value in _DEFAULTS.items() if not config.states(key)})
    common = read_common(config, family, rope=partial(RopeConfig.from_fields, default_theta=5e5))
    num_layers, attention_bias = common.num_layers, config.boolean("attention_bias", default=False)
    if config.get("no_rope_layers") == []:  # of published files
        config = config.replaced({"no_rope_layers": None})
    is_turned = read_turned(config, num_layers)
    chunk = config.optional_integer("attention_chunk_size", low=1, high=MAX_POSITIONS)
    by_place = [chunk if turned else None for turned in is_turned]
    return replace(
        common,
        intermediate_size=config.integer("intermediate_size_mlp", low=1, high=MAX_WIDTH, default=16_384),
        windows=windows_by_type(config, num_layers, chunk, by_place, kind="chunked_attention"),
        chunked_windows=chunk is not None,
        layer_rotary=tuple(LayerRotary.MAIN if turned else LayerRotary.NONE for turned in is_turned),
        interleaved_rotary=True,
        wide_rotary=True,
        late_qk_norm=True,
        unit_qk_norm=config.boolean("use_qk_norm", default=True),
        query_scaling=_query_scaling(config, is_turned),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        names=_NAMES,
        experts=_experts(config, num_layers),
    )


def _query_scaling(config: Fields, is_turned: list[bool]) -> QueryScaling | None:
    """Of layers that do not turn. Older files say a number in place of true."""
    key = "attn_temperature_tuning"
    if config.get(key) in (0, 1, 4) and not isinstance(config.get(key), bool):
        config = config.replaced({key: config.get(key) != 0})
    if not config.boolean(key, default=True) or all(is_turned):
        return None
    return QueryScaling(
        config.integer("floor_scale", low=1, high=MAX_POSITIONS, default=8_192),
        config.number("attn_scale", low=0.0, high=1e3, default=0.1),
        tuple(not turned for turned in is_turned),
    )


def _experts(config: Fields, num_layers: int) -> Experts | None:
    """In the layers of `moe_layers`, or in each `interleave_moe_layer_step`-th."""
    step = config.integer("interleave_moe_layer_step", low=1, high=MAX_LAYERS, default=1)
    stated = config.get("moe_layers")
    if stated is None:
        stated = list(range(step - 1, num_layers, step))
    if not isinstance(stated, list) or any(
        isinstance(one, bool) or not isinstance(one, int) for one in stated
    ):
        raise config.wrong("moe_layers", "but must be a list of layers")
    chosen = set(stated)
    layers = [index in chosen for index in range(num_layers)]
    if not any(layers):
        return None
    mixture = read_experts(
        config, size_key="intermediate_size", layers=layers, sum_to_1=False, rounds_weights=True
    )
    return replace(mixture, shares=ExpertShares.SIGMOID, weighs_inputs=True, shared_size=mixture.size)
