"""An architecture of GGUF as llama.cpp's converter writes it, and names of tensors that several have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import settings
from .fields import GgufFields

# Matrices that make keys and values of latents: one, as in older files, or one for each, that for keys turned around.
LATENT_UP, LATENT_PARTS = "attn_kv_b", ("attn_k_b", "attn_v_b")

ATTENTION_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output")
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OUTPUT_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LLAMA = {**NORMS, **ATTENTION, **MLP}
ROUTER = {"ffn_gate_inp": "mlp.gate"}
LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
LATENTS = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    LATENT_UP: "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
}
SHARED_GATE = "ffn_gate_inp_shexp"
SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
GATED_MIXTURE = {
    **ROUTER,
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    SHARED_GATE: "mlp.shared_expert_gate",
}
CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
DELTA_NETS = {
    "attn_qkv": "in_proj_qkv",
    "attn_gate": "in_proj_z",
    "ssm_conv1d": "conv1d",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
MAMBA = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_out": "out_proj"}
# Of Mamba-2, whose names end otherwise in a checkpoint
MAMBA_WHOLE = {
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_dt.bias": "dt_bias",
    "ssm_conv1d.bias": "conv1d.bias",
    "ssm_norm.weight": "norm.weight",
}
FLAT = ("ssm_a", "ssm_d", "ssm_norm.weight")  # vectors that some files have as matrices
FEED_FORWARD = {kind: name.replace("mlp", "feed_forward") for kind, name in MLP.items()}
QKV = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}
LAYER_INPUTS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
STREAMS = {
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_correct_coef": "altup.correction_coefs",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
EMBEDDINGS = "token_embd.weight"
# Those of no layer, but for the final norm
OUTER = {EMBEDDINGS: "model.embed_tokens.weight", "output.weight": "lm_head.weight"}
INPUTS_TABLE = "per_layer_token_embd.weight"
OF_LAYER_INPUTS = {
    INPUTS_TABLE: "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}

# (metadata, the architecture's prefix of keys, config.json so far) → more of config.json
Settings = Callable[[GgufFields, str, Mapping[str, Any]], dict[str, Any]]


class Family(NamedTuple):
    """An architecture of GGUF: its name in transformers, and its stored form."""

    model_type: str
    architecture: str
    outer: Mapping[str, str] = OUTER
    inner: Mapping[str, str] = LLAMA  # a layer's tensors
    stacked: Mapping[str, str] = {}  # those of no layer that hold several matrices; {} is a matrix' number
    whole: Mapping[str, str] = {}  # those of its tensors whose names end otherwise there
    # Those that hold all experts; {} is an expert's number. Two names: the first half of its rows, and the second.
    experts: Mapping[str, str] | None = None
    experts_have_biases: bool = False
    merged: Mapping[str, tuple[str, ...]] = {}  # those that hold rows of several
    rows: Mapping[str, str] = {}  # settings that are the number of a tensor's rows
    optional: Mapping[str, str] = {}  # ends of those that all layers may lack, and the setting that says so
    final_norm: str = "norm"
    norm_eps: str = "rms_norm_eps"  # the setting
    has_layer_norms: bool = False
    norms_have_biases: bool = False
    biases: tuple[str, ...] = ATTENTION_BIASES  # tensors that may have one: all of them, or none
    bias_setting: str = "attention_bias"  # says so
    always_has_biases: bool = False
    is_permuted: bool = False  # rows of q and k stand in pairs that turn together
    has_shifted_norms: bool = False  # weights of norms are stored plus 1, but for those of delta nets
    may_turn_partly: bool = False  # of a head
    has_latents: bool = False  # in place of keys and values
    # The last layers attend to earlier ones' keys; numbers of a layer's heads of keys and of its MLP's columns may be
    # several.
    shares_keys: bool = False
    # Keys about heads are those of layers without a window, and others', which end with _swa.
    has_windowed_heads: bool = False
    activation: str = "silu"
    settings: Settings = settings.no_more


def experts_of(gate: str, up: str, down: str) -> dict[str, str]:
    return {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}


EXPERTS = experts_of(*(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")))
