"""GPT-2: learned positions in place of rotary ones, layer norms, biases, and matrices that are stored inputs first."""

from __future__ import annotations

from msgspec.structs import replace

from ..decoder_config import (
    DecoderConfig,
    LayerNames,
    LayerRotary,
    ModelNames,
    has_names_of_llama,
    read_common,
    refuse_set,
)
from ..fields import MAX_WIDTH, Fields, Norm
from ..rope_config import RopeConfig, RopeType

_OLDER = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
_NAMES = LayerNames(
    attention_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
)
_MODEL_NAMES = ModelNames(
    embeddings="wte", positions="wpe", layers="h", final_norm="ln_f", adapted_layers="transformer.h"
)


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    refuse_set(config, "add_cross_attention", "scale_attn_by_inverse_layer_idx")
    config = config.renamed(_OLDER)
    hidden_size = config.integer("hidden_size", low=1, high=MAX_WIDTH)
    inner_size = config.integer("n_inner", low=1, high=MAX_WIDTH, default=4 * hidden_size)
    common = read_common(
        config.replaced({"intermediate_size": inner_size}),
        family,
        rope=unused_rope,
        activation_key="activation_function",
        default_activation="gelu_new",
        norm_eps_key="layer_norm_epsilon",
        norm_eps=1e-5,
        is_tied=True,
    )
    gpt2 = replace(
        common,
        num_kv_heads=common.num_heads,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        norm=Norm.LAYER,
        norm_bias=True,
        layer_rotary=(LayerRotary.NONE,) * common.num_layers,
        attention_scale=None if config.boolean("scale_attn_weights", default=True) else 1.0,
    )
    if has_names_of_llama(config):
        names, of_model = LayerNames(gate_up=("mlp.up_proj",)), ModelNames(positions="embed_positions")
        return replace(gpt2, names=names, model_names=of_model)
    return replace(
        gpt2, names=_NAMES, model_names=_MODEL_NAMES, roots=("", "transformer."), inputs_first=True
    )


def unused_rope(config: Fields, *, head_dim: int, max_positions: int) -> RopeConfig:
    """That of models whose positions are learned."""
    return RopeConfig(RopeType.DEFAULT, 10_000.0, head_dim // 2 * 2, max_positions, max_positions)
