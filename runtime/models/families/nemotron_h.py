"""Nemotron-H: each layer is a Mamba-2 layer, attention without positions, an MLP, or a mixture of experts."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from ..decoder_config import (
    DecoderConfig,
    LayerNames,
    LayerRotary,
    ModelNames,
    Sublayers,
    read_common,
    refuse_set,
)
from ..experts_config import Experts, read_sigmoid_experts
from ..fields import MAX_LAYERS, MAX_WIDTH, Fields, Norm
from ..mamba_config import MambaKeys, read_mamba
from ..rope_config import RopeConfig

_NAMES = LayerNames(
    attention_norm="norm",
    mlp_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    output="mixer.o_proj",
    mamba="mixer.",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    router="mixer.gate",
    expert="mixer.experts.{}.",
    expert_gate_up=("up_proj",),
    expert_correction="mixer.gate.e_score_correction_bias",
    shared_expert="mixer.shared_experts.",
)
_MODEL_NAMES = ModelNames(embeddings="embeddings", final_norm="norm_f")
_MAMBA_KEYS = MambaKeys(
    heads="mamba_num_heads",
    groups="n_groups",
    head_dim="mamba_head_dim",
    state="ssm_state_size",
    convolution="conv_kernel",
    bias="use_bias",
    convolution_bias="use_conv_bias",
)
_MAMBA_SIZES = {"n_groups": 8, "mamba_head_dim": 64, "ssm_state_size": 128}  # of files without
_MAMBA, _ATTENTION, _MLP, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_KINDS = {each: each for each in (_MAMBA, _ATTENTION, _MLP, _EXPERTS)}
_KINDS |= {"mamba": _MAMBA, "attention": _ATTENTION}  # older names
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP, "E": _EXPERTS}
# No layer turns; fields of a rotation have no effect.
_ROPE = partial(RopeConfig.from_fields, may_be_partial=True)


def read(config: Fields, family: str) -> DecoderConfig:
    """Raises `ModelError` naming the key that is missing, wrong or not supported."""
    refuse_set(config, "residual_in_fp32", "attention_bias")
    for key in ("sliding_window", "moe_latent_size"):
        if key in config:
            raise config.wrong(key, "which is not supported")
    kinds = _read_kinds(config)
    common = read_common(
        config.replaced({"num_hidden_layers": len(kinds)}),
        family,
        rope=_ROPE,
        default_head_dim=128,
        activation_key="mlp_hidden_act",
        default_activation="relu2",
        norm_eps_key="layer_norm_epsilon",
        norm_eps=1e-5,
    )
    config.choice("mamba_hidden_act", ("silu", "swish"), default="silu")
    mlp_bias = config.boolean("mlp_bias", default=False)
    return replace(
        common,
        names=_NAMES,
        model_names=_MODEL_NAMES,
        roots=("", "model.", "backbone."),
        sublayers=tuple(Sublayers.MLP if kind in (_MLP, _EXPERTS) else Sublayers.MIXER for kind in kinds),
        layer_rotary=(LayerRotary.NONE,) * len(kinds),
        norm=Norm.RMS_WIDE,
        gated_mlp=False,
        mlp_bias=mlp_bias,
        mamba=read_mamba(config.filled(_MAMBA_SIZES), [kind == _MAMBA for kind in kinds], None, _MAMBA_KEYS),
        experts=_experts(config, kinds, has_bias=mlp_bias) if _EXPERTS in kinds else None,
    )


def _read_kinds(config: Fields) -> list[str]:
    """Each layer's kind; some layer attends."""
    key = next(
        (key for key in ("layers_block_type", "layer_types") if key in config), "hybrid_override_pattern"
    )
    names, kinds = (
        (_LETTERS, list(config.text(key))) if "pattern" in key else (_KINDS, config.texts(key) or [])
    )
    if not 0 < len(kinds) <= MAX_LAYERS or not set(kinds) <= set(names):
        known = ", ".join(names)
        raise config.wrong(key, f"but must say one of {known} for each of at most {MAX_LAYERS} layers")
    found = [names[kind] for kind in kinds]
    if _ATTENTION not in found:
        raise config.wrong(key, "but some layer must attend")
    if config.optional_integer("num_hidden_layers", low=1, high=MAX_LAYERS) not in (None, len(found)):
        raise config.wrong("num_hidden_layers", f"but {key} has {len(found)} layers")
    return found


def _experts(config: Fields, kinds: list[str], *, has_bias: bool) -> Experts:
    if has_bias:
        raise config.wrong("mlp_bias", "which is not supported with experts")
    layers = [kind == _EXPERTS for kind in kinds]
    experts = read_sigmoid_experts(config, layers, factor=1.0)
    shared_size = config.integer("moe_shared_expert_intermediate_size", low=1, high=MAX_WIDTH)
    return replace(experts, shared_size=shared_size)
