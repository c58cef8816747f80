"""Whisper: an encoder of sound, and a decoder with learned positions whose layers also attend to the encoder's rows."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, LayerRotary, ModelNames, read_common
from ..fields import Fields, Norm
from ..speech_config import NORM_EPS, SpeechConfig
from .gpt2 import unused_rope

_DECODER = {
    "d_model": "hidden_size",
    "decoder_ffn_dim": "intermediate_size",
    "decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
    "max_target_positions": "max_position_embeddings",
}
_NAMES = LayerNames(
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    output="self_attn.out_proj",
    gate_up=("fc1",),
    down="fc2",
)
_MODEL_NAMES = ModelNames(
    positions="embed_positions",
    final_norm="layer_norm",
    head="proj_out",
    adapted_layers="model.decoder.layers",
)


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    speech = SpeechConfig.from_fields(config)
    # Files have fields of these names for the encoder, too.
    of_encoder = dict.fromkeys(("num_key_value_heads", "head_dim", *_DECODER.values()))
    decoder = config.replaced(of_encoder).renamed(_DECODER)
    common = read_common(
        decoder,
        family,
        rope=unused_rope,
        activation_key="activation_function",
        default_activation="gelu",
        norm_eps_key="layer_norm_eps",
        norm_eps=NORM_EPS,
        is_tied=True,
    )
    return replace(
        common,
        speech=speech,
        max_context=speech.num_places + common.max_context,
        num_kv_heads=common.num_heads,
        qkv_bias=True,
        key_bias=False,
        output_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        norm=Norm.LAYER,
        norm_bias=True,
        layer_rotary=(LayerRotary.NONE,) * common.num_layers,
        names=_NAMES,
        model_names=_MODEL_NAMES,
        roots=("decoder.", "model.decoder."),
    )
