"""Gemma 4's text model: layers with and without windows differ in their heads, the last ones attend to earlier ones'
keys and values, and layers have inputs of their own (Gemma 3n's), or mixtures of experts that join their MLPs.

Norms are by the weight itself; queries, keys and values are normalised, and scores are not scaled. The unified models'
text has neither inputs of layers nor mixtures. Files may have an image tower next to it; a tower for audio is not used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec.structs import replace

from ..decoder_config import (
    DecoderConfig,
    LayerNames,
    LayerRotary,
    LayerShape,
    ModelNames,
    read_common,
    windows_by_type,
)
from ..experts_config import Experts
from ..fields import MAX_EXPERTS, MAX_HEAD_DIM, MAX_VOCABULARY, MAX_WIDTH, Fields, Norm, text_fields
from ..layer_inputs_config import LayerInputs
from ..rope_config import MAX_POSITIONS, RopeConfig
from ..vision_config import VisionConfig

# Of the text alone, and next to towers
_ROOTS = ("model.", "model.language_model.", "language_model.model.")
_NAMES = LayerNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
    router="router.proj",
    expert="experts.{}.",
    shared_expert="mlp.",
    stacked_experts="experts.",
)
# transformers' defaults of keys that files leave out.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2_304,
    "intermediate_size": 9_216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
}
_UNIFIED_DEFAULTS = {"max_position_embeddings": 262_144, "sliding_window": 1_024}
# Keys that the unified models' text does not know.
_WITHOUT = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_SPELLINGS = {"proportional": "proportional"}
_PERIOD = 6  # layers, of which the last has no window


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    if family in ("gemma4", "gemma4_unified"):
        of_text = f"{family}_text"
        text = text_fields(config, family, of_text, is_tied=True)
        names = ModelNames(adapted_layers="model.language_model.layers")
        made = replace(read(text, of_text), family=family, roots=_ROOTS, model_names=names)
        if "vision_config" not in config:
            return made
        is_whole = text.get("use_bidirectional_attention") is not None
        if family == "gemma4":
            return replace(made, vision=VisionConfig.of_gemma4(config, made.vocab_size, is_whole=is_whole))
        window = min(filter(None, made.windows), default=MAX_POSITIONS)
        vision = VisionConfig.of_gemma4_unified(config, made.vocab_size, is_whole=is_whole, window=window)
        return replace(made, vision=vision)
    if family == "gemma4_unified_text":
        config = config.filled(_UNIFIED_DEFAULTS).replaced(_WITHOUT)
    config = config.filled({**_DEFAULTS, "rope_parameters": _ROPE})
    if config.choice("use_bidirectional_attention", ("vision", "all"), default="vision") == "all":
        raise config.wrong("use_bidirectional_attention", "which is not supported")
    common = read_common(
        config,
        family,
        rope=partial(RopeConfig.from_fields, kind="sliding_attention", spellings=_SPELLINGS),
        activation_key="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        is_tied=True,
    )
    attention_bias = config.boolean("attention_bias", default=False)
    windows = _windows(config, common.num_layers)
    shapes = _shapes(config, common, windows)
    of_whole = next(shape for shape, window in zip(shapes, windows, strict=True) if window is None)
    main = RopeConfig.from_fields(
        config,
        head_dim=of_whole.head_dim,
        max_positions=common.rope.max_positions,
        kind="full_attention",
        spellings=_SPELLINGS,
    )
    return replace(
        common,
        windows=windows,
        layer_shapes=shapes,
        max_context=common.rope.max_positions,
        rope=main,
        local_rope=common.rope,
        layer_rotary=tuple(LayerRotary.MAIN if window is None else LayerRotary.LOCAL for window in windows),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        unit_value_norm=True,
        norm=Norm.RMS_WIDE,
        names=_NAMES,
        attention_scale=1.0,
        logit_cap=config.optional_number("final_logit_softcapping", low=1e-3, high=1e6),
        scales_embeddings=True,
        has_layer_scalars=True,
        layer_inputs=_inputs(config, common.vocab_size),
        experts=_experts(config, common),
    )


def _windows(config: Fields, num_layers: int) -> tuple[int | None, ...]:
    """The last layer never has one."""
    window = config.integer("sliding_window", low=1, high=MAX_POSITIONS)
    by_place = [None if (layer + 1) % _PERIOD == 0 else window for layer in range(num_layers)]
    return (*windows_by_type(config, num_layers, window, by_place)[:-1], None)


def _shapes(config: Fields, common: DecoderConfig, windows: tuple[int | None, ...]) -> tuple[LayerShape, ...]:
    """Layers without a window have heads of their own; the last `num_kv_shared_layers` have no keys and values."""
    has_equal = config.boolean("attention_k_eq_v", default=False)
    is_wide = config.boolean("use_double_wide_mlp", default=False)
    head_dim, num_kv_heads = _whole_heads(config, common, windows, has_equal=has_equal)
    found: list[LayerShape] = []
    for layer, keys_of in enumerate(read_sharing(config, windows)):
        is_whole, is_shared = windows[layer] is None, keys_of != layer
        found.append(
            LayerShape(
                num_kv_heads if is_whole else common.num_kv_heads,
                head_dim if is_whole else common.head_dim,
                common.intermediate_size * (2 if is_wide and is_shared else 1),
                keys_of,
                has_equal and is_whole and not is_shared,
            )
        )
    return tuple(found)


def read_sharing(config: Fields, windows: tuple[int | None, ...]) -> list[int]:
    """Of each layer the one whose keys and values it attends to: of the last `num_kv_shared_layers` the last one before
    them that has a window as they have.
    """
    num_shared = config.integer("num_kv_shared_layers", low=0, high=len(windows), default=0)
    sources: dict[bool, int] = {}  # whether it has a window: the last layer that has keys and values
    found: list[int] = []
    for layer, window in enumerate(windows):
        is_whole, is_shared = window is None, layer >= len(windows) - num_shared
        if is_shared and is_whole not in sources:
            kind = "full_attention" if is_whole else "sliding_attention"
            raise config.wrong("num_kv_shared_layers", f"but no layer of {kind} has keys and values then")
        if not is_shared:
            sources[is_whole] = layer
        found.append(sources[is_whole])
    return found


def _whole_heads(
    config: Fields, common: DecoderConfig, windows: tuple[int | None, ...], *, has_equal: bool
) -> tuple[int, int]:
    """The head_dim and the number of key heads of layers without a window: by `per_layer_config`, where transformers
    5 wrote the file, or by keys of their own.
    """
    of_layers, stated = config.get("per_layer_config"), config
    head_dim_key, heads_key = "global_head_dim", "num_global_key_value_heads"
    if of_layers is not None:
        layers = [layer for layer, window in enumerate(windows) if window is None]
        stated = _equal_overrides(config, of_layers, layers)
        head_dim_key, heads_key, has_equal = "head_dim", "num_key_value_heads", True
        default_dim = common.head_dim
    else:
        default_dim = 512
    head_dim = stated.integer(head_dim_key, low=4, high=MAX_HEAD_DIM, default=default_dim)
    if not has_equal:
        return head_dim, common.num_kv_heads
    num = stated.integer(heads_key, low=1, high=common.num_heads, default=common.num_kv_heads)
    if common.num_heads % num:
        raise stated.wrong(heads_key, f"but must divide num_attention_heads, {common.num_heads}")
    return head_dim, num


def _equal_overrides(config: Fields, of_layers: Any, layers: list[int]) -> Fields:
    """The sizes that `per_layer_config` states of these layers: the same of all, and of no others."""
    key = "per_layer_config"
    if not isinstance(of_layers, dict):
        raise config.wrong(key, "but must be an object")
    numbers = sorted(int(each) for each in of_layers if each.isascii() and each.isdecimal() and len(each) < 9)
    first: Any = next(iter(of_layers.values()), {})
    if len(numbers) < len(of_layers) or (of_layers and numbers != layers):
        raise config.wrong(key, "but must say something of all layers without a window, and of no others")
    if any(each != first for each in of_layers.values()):
        raise config.wrong(key, "but must say the same of all layers without a window")
    fields = Fields(first, where=f"{key}.{next(iter(of_layers), '')}.")
    fields.refuse_others(("head_dim", "num_key_value_heads"))
    return fields


def _inputs(config: Fields, vocab_size: int) -> LayerInputs | None:
    size = config.integer("hidden_size_per_layer_input", low=0, high=MAX_WIDTH, default=256)
    if not size:
        return None
    # A smaller table has no rows of the last tokens.
    rows = config.integer("vocab_size_per_layer_input", low=vocab_size, high=MAX_VOCABULARY)
    return LayerInputs(size, rows, config.integer("pad_token_id", low=0, high=vocab_size - 1, default=0))


def _experts(config: Fields, common: DecoderConfig) -> Experts | None:
    """They join the MLPs of all layers."""
    if not config.boolean("enable_moe_block", default=False):
        return None
    num = config.integer("num_experts", low=1, high=MAX_EXPERTS)
    return Experts(
        num,
        config.integer("top_k_experts", low=1, high=num),
        config.integer("moe_intermediate_size", low=1, high=MAX_WIDTH),
        (True,) * common.num_layers,
        sum_to_1=True,
        rounds_weights=False,
        shared_size=common.intermediate_size,
        joins_mlp=True,
    )
