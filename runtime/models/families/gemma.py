"""Gemma 2 and Gemma 3: norms before and after attention and MLP, scaled embeddings, windows in most layers.

Gemma 2 caps scores and logits; Gemma 3 normalises heads, and turns those of layers with a window by a table of their
own; with `use_bidirectional_attention` (EmbeddingGemma) it sees all of a text, and windows are halved, half to each
side. Models that take images have a SigLIP tower, and keep the decoder's fields in a text_config.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import (
    DecoderConfig,
    LayerNames,
    LayerRotary,
    is_pooled,
    read_common,
    read_windows,
)
from ..fields import Fields, Norm, text_fields
from ..rope_config import RopeConfig
from ..vision_config import VisionConfig

NAMES = LayerNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)
# Of the text alone, and next to a tower
_ROOTS = ("model.", "language_model.model.", "model.language_model.")
# transformers' defaults of a text_config, which files leave out.
_DEFAULTS: dict[str, object] = {
    "vocab_size": 262_208,
    "hidden_size": 2_304,
    "intermediate_size": 9_216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
_THETA, _LOCAL_THETA = 1e6, 1e4  # of Gemma 3, where the file leaves them out


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    if family == "gemma3":
        text = text_fields(config, family, "gemma3_text", _DEFAULTS, is_tied=True)
        decoder = replace(read(text, "gemma3_text"), family=family, roots=_ROOTS)
        return replace(decoder, vision=VisionConfig.of_gemma3(config, decoder.vocab_size))
    is_third = family == "gemma3_text"
    is_bidirectional = config.boolean("use_bidirectional_attention", default=False)
    if is_bidirectional and not (is_third and is_pooled({"architectures": config.texts("architectures")})):
        raise config.wrong(
            "use_bidirectional_attention", "which is only supported in embeddings of Gemma3TextModel"
        )
    common = read_common(
        config,
        family,
        rope=main_rope if is_third else RopeConfig.from_fields,
        default_head_dim=256,
        activation_key="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        is_tied=True,
    )
    attention_bias = config.boolean("attention_bias", default=False)
    windows = (
        read_windows(config, common.num_layers, interval=6)
        if is_third
        else read_windows(config, common.num_layers, interval=2, interval_key=None)
    )
    if is_bidirectional:
        windows = tuple(None if window is None else _half(config, window) for window in windows)
    gemma = replace(
        common,
        windows=windows,
        is_bidirectional=is_bidirectional,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        norm=Norm.RMS_PLUS_ONE,
        names=NAMES,
        attention_scale=config.number("query_pre_attn_scalar", low=1e-3, high=1e6, default=256.0) ** -0.5,
        logit_cap=read_cap(config, "final_logit_softcapping", None if is_third else 30.0),
        scales_embeddings=True,
    )
    if not is_third:
        return replace(gemma, score_cap=read_cap(config, "attn_logit_softcapping", 50.0))
    return replace(
        gemma,
        max_context=common.rope.max_positions,  # which is stretched already
        qk_norm=True,
        local_rope=local_rope(config, common),
        layer_rotary=tuple(LayerRotary.MAIN if window is None else LayerRotary.LOCAL for window in windows),
    )


def _half(config: Fields, window: int) -> int:
    """The tokens to each side that a token sees, itself excluded."""
    if window < 2:
        raise config.wrong("sliding_window", "but must be at least 2 for use_bidirectional_attention")
    return window // 2


def read_cap(config: Fields, key: str, default: float | None) -> float | None:
    """None where the file says null."""
    stated = config.optional_number(key, low=1e-3, high=1e6)
    return stated if config.states(key) else default


def main_rope(config: Fields, *, head_dim: int, max_positions: int) -> RopeConfig:
    return RopeConfig.from_fields(
        config, head_dim=head_dim, max_positions=max_positions, default_theta=_THETA, kind="full_attention"
    )


def local_rope(config: Fields, common: DecoderConfig) -> RopeConfig:
    """`rope_parameters.sliding_attention`, or `rope_local_base_freq` alone."""
    return RopeConfig.from_fields(
        config,
        head_dim=common.head_dim,
        max_positions=common.rope.max_positions,
        default_theta=_LOCAL_THETA,
        kind="sliding_attention",
        theta_key="rope_local_base_freq",
    )
