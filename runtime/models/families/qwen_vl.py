"""Qwen2.5-VL, Qwen3-VL and Qwen3.5: a tower that takes images of any size before a Qwen2, Qwen3, Qwen3 MoE or Qwen3.5
decoder, whose queries and keys turn by positions of three axes. The layer for multi-token prediction is not used.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

from msgspec.structs import replace

from ...errors import ModelError
from ..decoder_config import DecoderConfig, LayerNames
from ..fields import Fields, text_fields
from ..rope_config import RopeConfig
from ..vision_config import VisionConfig
from . import qwen, qwen3_5

# transformers' defaults of text_configs, which files leave out.
_QWEN2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 152_064,
    "hidden_size": 8_192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
}
_QWEN3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4_096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 128_000,
}
_QWEN3_MOE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2_048,
    "intermediate_size": 5_632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 128_000,
    "moe_intermediate_size": 1_408,
    "num_experts_per_tok": 4,
}
_SECTIONS = {  # others: (11, 11, 10)
    "qwen2_5_vl": (16, 24, 24),
    "qwen3_vl": (24, 20, 20),
    "qwen3_vl_moe": (24, 20, 20),
}
_ROPE = partial(RopeConfig.from_fields, spellings={"mrope": "default"})


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    if family == "qwen2_5_vl":
        text = text_fields(config, family, "qwen2_5_vl_text", _QWEN2_DEFAULTS, may_be_flat=True)
        decoder = qwen.read(text, "qwen2", rope=partial(_ROPE, default_theta=1e6))
        read_vision = VisionConfig.of_qwen2_5_vl
    elif family == "qwen3_vl":
        text = text_fields(config, family, "qwen3_vl_text", _QWEN3_DEFAULTS)
        decoder = qwen.read(text, "qwen3", rope=partial(_ROPE, default_theta=5e5))
        read_vision = VisionConfig.of_qwen3_vl
    elif family == "qwen3_vl_moe":
        text = text_fields(config, family, "qwen3_vl_moe_text", _QWEN3_MOE_DEFAULTS)
        decoder = _qwen3_mixture(text)
        read_vision = VisionConfig.of_qwen3_vl
    else:
        text = text_fields(config, family, f"{family}_text")
        decoder = qwen3_5.read(text, f"{family}_text")
        read_vision = VisionConfig.of_qwen3_5
    given = Fields(config.get("text_config") or {}, where="text_config.")
    vision = read_vision(config, decoder.vocab_size, decoder.hidden_size)
    if len(vision.deep_layers) > decoder.num_layers:
        raise text.wrong("num_hidden_layers", f"but must be at least {len(vision.deep_layers)} for DeepStack")
    return replace(
        decoder,
        family=family,
        roots=("model.language_model.", "model."),
        # Older files have it in the text_config.
        tie_word_embeddings=decoder.tie_word_embeddings
        or given.boolean("tie_word_embeddings", default=False),
        rotary_axes=_axes(text, family, decoder.rope.rotary_dim // 2),
        vision=vision,
    )


def _qwen3_mixture(text: Fields) -> DecoderConfig:
    """Weights of experts sum to 1, whatever `norm_topk_prob` says, and all of a layer's may be in one tensor."""
    decoder = qwen.read(text, "qwen3_moe", rope=partial(_ROPE, default_theta=5e5))
    assert decoder.experts is not None
    return replace(
        decoder,
        names=LayerNames(stacked_experts="mlp.experts."),
        experts=replace(decoder.experts, sum_to_1=True),
    )


def _axes(text: Fields, family: str, num: int) -> tuple[int, ...]:
    """The axis of each of a head's `num` frequencies: runs of them in turn, or one by one, the rest by time."""
    key = "rope_parameters" if "rope_parameters" in text else "rope_scaling"
    rope = Fields(text.get(key) or {}, where=f"{key}.")
    sections = rope.get("mrope_section")
    if sections is None:
        sections = _SECTIONS.get(family, (11, 11, 10))
        if sum(sections) != num:
            raise ModelError(
                f"config.json has no {key}.mrope_section, and {list(sections)}, which {family} has without it, "
                f"are not the {num} frequencies of a head",
                hint="Give how many frequencies follow time, height and width.",
            )
    if not isinstance(sections, list | tuple) or any(type(each) is not int or each < 0 for each in sections):
        raise rope.wrong("mrope_section", "but must be a list of whole numbers")
    if sum(sections) != num:
        raise rope.wrong("mrope_section", f"but the {num} frequencies of a head must be in one section each")
    if family == "qwen2_5_vl":
        return tuple(chain.from_iterable([index % 3] * size for index, size in enumerate(sections)))
    if len(sections) == 3:
        axes = tuple(place % 3 if place < 3 * sections[place % 3] else 0 for place in range(num))
        if [axes.count(axis) for axis in range(3)] == list(sections):
            return axes
    raise rope.wrong("mrope_section", f"but three sections must alternate within {num} frequencies")
