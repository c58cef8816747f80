"""LLaVA 1.5, LLaVA-NeXT and LLaVA-OneVision: a CLIP or SigLIP tower over the tiles of an image, and a connector of two
matrices, before a decoder of another family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, ModelNames
from ..fields import ACTIVATIONS, Fields, text_fields
from ..vision_config import SIGLIP_DEFAULTS, TowerNames, VisionConfig, read_tower, vision_fields
from . import llama, mistral, qwen

# Of each family inside: transformers' defaults of a text_config, which files leave out.
_FAMILIES: dict[str, tuple[Callable[[Fields, str], DecoderConfig], dict[str, Any]]] = {
    "llama": (llama.read, llama.DEFAULTS),
    "mistral": (
        mistral.read,
        {
            **llama.DEFAULTS,
            "intermediate_size": 14_336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
        },
    ),
    "qwen2": (
        qwen.read,
        {
            **llama.DEFAULTS,
            "vocab_size": 151_936,
            "intermediate_size": 22_016,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32_768,
        },
    ),
}
_NAMES = TowerNames(final_norm=None, connector=("linear_1", "linear_2"))
_CLIP_NAMES = replace(_NAMES, class_row="embeddings.class_embedding", entry_norms=("", "", "pre_layrnorm"))
_CLIP_DEFAULTS: dict[str, object] = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
# Of a whole vision_config that files leave out.
_WHOLE_CLIP: dict[str, object] = {
    **_CLIP_DEFAULTS,
    "hidden_size": 1_024,
    "intermediate_size": 4_096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_WHOLE_SIGLIP: dict[str, object] = {
    "hidden_size": 1_152,
    "intermediate_size": 4_304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    given = Fields(config.get("text_config") or {}, where="text_config.")
    kind = given.choice("model_type", tuple(_FAMILIES), default="qwen2" if _is_onevision(family) else "llama")
    read_text, defaults = _FAMILIES[kind]
    decoder = read_text(text_fields(config, family, kind, defaults), kind)
    vision = _read_siglip(config) if _is_onevision(family) else _read_clip(config, family)
    default_token = 151_646 if _is_onevision(family) else 32_000
    return replace(
        decoder,
        family=family,
        roots=("model.language_model.", "language_model.model."),
        model_names=ModelNames(adapted_layers="model.language_model.layers"),
        # Files may have it in the text_config.
        tie_word_embeddings=decoder.tie_word_embeddings
        or given.boolean("tie_word_embeddings", default=False),
        vision=replace(
            vision,
            num_layers=_num_layers(config, vision.num_layers, default=-1 if _is_onevision(family) else -2),
            image_token=config.integer(
                "image_token_index", low=0, high=decoder.vocab_size - 1, default=default_token
            ),
            roots=tuple(
                f"{root}vision_tower.{own}" for root in ("model.", "") for own in ("vision_model.", "")
            ),
            connectors=("model.multi_modal_projector.", "multi_modal_projector."),
            marks=() if family == "llava" else ("model.image_newline", "image_newline"),
            connector_width=decoder.hidden_size,
            connector_bias=config.boolean("multimodal_projector_bias", default=True),
            connector_activation=config.choice("projector_hidden_act", ACTIVATIONS, default="gelu"),
        ),
    )


def _is_onevision(family: str) -> bool:
    return family == "llava_onevision"


def _read_siglip(config: Fields) -> VisionConfig:
    """LLaVA-OneVision's tower: its sizes and names."""
    own = vision_fields(config, SIGLIP_DEFAULTS if "vision_config" in config else _WHOLE_SIGLIP)
    own.choice("model_type", ("siglip_vision_model",), default="siglip_vision_model")
    config.choice("vision_feature_select_strategy", ("full",), default="full")
    ratio = config.get("vision_aspect_ratio")
    if ratio is not None and (not isinstance(ratio, str) or not ratio.startswith("anyres_max_")):
        raise config.wrong("vision_aspect_ratio", "but must be anyres_max_ and a number")
    return replace(read_tower(own), names=_NAMES)


def _read_clip(config: Fields, family: str) -> VisionConfig:
    """The others' tower, whose class becomes a token where the strategy is "full": not of a grid of tiles."""
    own = vision_fields(config, _CLIP_DEFAULTS if "vision_config" in config else _WHOLE_CLIP)
    own.choice("model_type", ("clip_vision_model",), default="clip_vision_model")
    strategies = ("default", "full") if family == "llava" else ("default",)
    made = read_tower(own)
    return replace(
        made,
        names=_CLIP_NAMES,
        entry_norm_eps=made.norm_eps,
        gives_class=config.choice("vision_feature_select_strategy", strategies, default="default") == "full",
    )


def _num_layers(config: Fields, num_layers: int, *, default: int) -> int:
    """Layers of the tower before the states that the connector takes, which are those before the final norm."""
    # Number 0 is what the first layer takes, which transformers does not give.
    layer = config.integer("vision_feature_layer", low=-num_layers, high=num_layers, default=default)
    if not layer:
        raise config.wrong("vision_feature_layer", "but must be a layer")
    return layer if layer > 0 else layer + num_layers + 1
