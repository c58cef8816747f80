"""GPT-NeoX (Pythia): attention and MLP in parallel, each after a layer norm of its own, and a quarter of each head
turned."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from ..decoder_config import DecoderConfig, LayerNames, ModelNames, has_names_of_llama, read_common
from ..fields import Fields, Norm
from ..rope_config import RopeConfig

_ROPE = partial(RopeConfig.from_fields, may_be_partial=True, default_partial=0.25)
_OLDER = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
_NAMES = LayerNames(
    qkv=("attention.query_key_value",),
    output="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
_MODEL_NAMES = ModelNames(
    embeddings="embed_in",
    final_norm="final_layer_norm",
    head="embed_out",
    adapted_layers="gpt_neox.layers",
)


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    common = read_common(
        config.renamed(_OLDER),
        family,
        rope=_ROPE,
        default_activation="gelu",
        norm_eps_key="layer_norm_eps",
        norm_eps=1e-5,
    )
    attention_bias = config.boolean("attention_bias", default=True)
    neox = replace(
        common,
        num_kv_heads=common.num_heads,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=True,
        gated_mlp=False,
        norm=Norm.LAYER,
        norm_bias=True,
        is_parallel=config.boolean("use_parallel_residual", default=True),
    )
    if has_names_of_llama(config):
        return replace(neox, names=LayerNames(gate_up=("mlp.up_proj",)))
    return replace(
        neox, names=_NAMES, model_names=_MODEL_NAMES, roots=("", "gpt_neox."), interleaved_qkv=True
    )
