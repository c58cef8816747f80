"""Architectures of GGUF and the models that transformers knows them as: names of tensors, and how they are stored.

Each row of `FAMILIES` says how a file of llama.cpp's converter differs from transformers' checkpoint. Names only; no
content is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from . import settings
from .fields import GgufFields

# Matrices that make keys and values of latents: one, as in older files, or one for each, that for keys turned around.
LATENT_UP, LATENT_PARTS = "attn_kv_b", ("attn_k_b", "attn_v_b")

_ATTENTION_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output")
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTPUT_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LLAMA = {**_NORMS, **_ATTENTION, **_MLP}
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_LFM2 = {
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
_LATENTS = {
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
_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_DELTA_NETS = {
    "attn_qkv": "in_proj_qkv",
    "attn_gate": "in_proj_z",
    "ssm_conv1d": "conv1d",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
_QKV = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}
EMBEDDINGS = "token_embd.weight"
# Those of no layer, but for the final norm
_OUTER = {EMBEDDINGS: "model.embed_tokens.weight", "output.weight": "lm_head.weight"}

# (metadata, the architecture's prefix of keys, config.json so far) → more of config.json
Settings = Callable[[GgufFields, str, Mapping[str, Any]], dict[str, Any]]


class Family(NamedTuple):
    """How an architecture of GGUF is called by transformers, and stored."""

    model_type: str
    architecture: str
    outer: Mapping[str, str] = _OUTER
    inner: Mapping[str, str] = _LLAMA  # a layer's tensors
    whole: Mapping[str, str] = {}  # those of its tensors whose names end otherwise there
    experts: Mapping[str, str] | None = None  # those that hold all experts; {} is an expert's number
    experts_have_biases: bool = False
    merged: Mapping[str, tuple[str, ...]] = {}  # those that hold rows of several
    optional: Mapping[str, str] = {}  # those that a layer may lack, and the setting that says so
    final_norm: str = "norm"
    norm_eps: str = "rms_norm_eps"  # the setting
    has_layer_norms: bool = False
    norms_have_biases: bool = False
    biases: tuple[str, ...] = _ATTENTION_BIASES  # tensors that may have one: all of them, or none
    bias_setting: str = "attention_bias"  # says so
    always_has_biases: bool = False
    is_permuted: bool = False  # rows of q and k stand in pairs that turn together
    has_shifted_norms: bool = False  # weights of norms are stored plus 1, but for those of delta nets
    may_turn_partly: bool = False  # of a head
    has_latents: bool = False  # in place of keys and values
    activation: str = "silu"
    settings: Settings = settings.no_more


def _experts(gate: str, up: str, down: str) -> dict[str, str]:
    return {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}


_EXPERTS = _experts(*(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")))

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", is_permuted=True),  # Mistral's files say llama too
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", biases=_ATTENTION_BIASES[:3], always_has_biases=True),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", inner=_LLAMA | _HEAD_NORMS),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        inner=_FOUR_NORMS | _ATTENTION | _MLP,
        has_shifted_norms=True,
        activation="gelu_pytorch_tanh",
        settings=settings.gemma2,
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        inner=_FOUR_NORMS | _ATTENTION | _MLP | _HEAD_NORMS,
        has_shifted_norms=True,
        activation="gelu_pytorch_tanh",
        settings=settings.gemma3,
    ),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        inner=_NORMS
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        biases=(),
        may_turn_partly=True,
        settings=settings.phi3,
    ),
    "granite": Family("granite", "GraniteForCausalLM", is_permuted=True, settings=settings.granite),
    "olmo2": Family(
        "olmo2",
        "Olmo2ForCausalLM",
        inner=_OUTPUT_NORMS | _ATTENTION | _MLP | _HEAD_NORMS,
    ),
    "exaone4": Family(
        "exaone4",
        "Exaone4ForCausalLM",
        inner=_OUTPUT_NORMS | _ATTENTION | _MLP | _HEAD_NORMS,
        biases=(),
        settings=settings.windowed,
    ),
    "ernie4_5": Family("ernie4_5", "Ernie4_5ForCausalLM", biases=()),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", is_permuted=True, settings=settings.smollm3),
    "qwen3moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        inner=_LLAMA | _HEAD_NORMS | _ROUTER,
        experts=_EXPERTS,
        settings=settings.qwen3_moe,
    ),
    "qwen2moe": Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        inner=_NORMS
        | _ATTENTION
        | _ROUTER
        | {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")}
        | {SHARED_GATE: "mlp.shared_expert_gate"},
        experts=_EXPERTS,
        biases=_ATTENTION_BIASES[:3],
        bias_setting="qkv_bias",
        settings=settings.qwen2_moe,
    ),
    "olmoe": Family(
        "olmoe",
        "OlmoeForCausalLM",
        inner=_NORMS | _ATTENTION | _HEAD_NORMS | _ROUTER,
        experts=_EXPERTS,
        biases=(),
        settings=settings.olmoe,
    ),
    "ernie4_5-moe": Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        inner=_LLAMA | _ROUTER | _SHARED,
        whole={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        experts=_EXPERTS,
        biases=(),
        settings=settings.ernie_moe,
    ),
    "hunyuan-dense": Family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        inner=_LLAMA | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "starcoder2": Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        inner=_NORMS | _ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        norm_eps="norm_epsilon",
        has_layer_norms=True,
        norms_have_biases=True,
        biases=(*_ATTENTION_BIASES, "ffn_up", "ffn_down"),
        bias_setting="use_bias",
        activation="gelu_pytorch_tanh",
        settings=settings.starcoder2,
    ),
    "stablelm": Family(
        "stablelm",
        "StableLmForCausalLM",
        norm_eps="layer_norm_eps",
        has_layer_norms=True,
        norms_have_biases=True,
        biases=_ATTENTION_BIASES[:3],
        bias_setting="use_qkv_bias",
        may_turn_partly=True,
    ),
    "phi2": Family(
        "phi",
        "PhiForCausalLM",
        inner=_ATTENTION
        | {
            "attn_norm": "input_layernorm",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        merged=_QKV,
        final_norm="final_layernorm",
        norm_eps="layer_norm_eps",
        has_layer_norms=True,
        norms_have_biases=True,
        biases=(*_ATTENTION_BIASES, "ffn_up", "ffn_down"),
        always_has_biases=True,
        outer=_OUTER | {"output.bias": "lm_head.bias"},
        may_turn_partly=True,
        activation="gelu_new",
    ),
    "gpt2": Family(
        "gpt2",
        "GPT2LMHeadModel",
        outer=_OUTER | {"position_embd.weight": "model.embed_positions.weight"},
        inner=_NORMS | _ATTENTION | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        merged=_QKV,
        norm_eps="layer_norm_epsilon",
        has_layer_norms=True,
        norms_have_biases=True,
        biases=(*_ATTENTION_BIASES, "ffn_up", "ffn_down"),
        always_has_biases=True,
        activation="gelu_new",
        settings=settings.gpt2,
    ),
    "gptneox": Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        inner=_NORMS | _ATTENTION | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        merged=_QKV,
        norm_eps="layer_norm_eps",
        has_layer_norms=True,
        norms_have_biases=True,
        biases=(*_ATTENTION_BIASES, "ffn_up", "ffn_down"),
        always_has_biases=True,
        may_turn_partly=True,
        activation="gelu",
        settings=settings.gpt_neox,
    ),
    "nemotron": Family(
        "nemotron",
        "NemotronForCausalLM",
        inner=_NORMS | _ATTENTION | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        norm_eps="norm_eps",
        has_layer_norms=True,
        norms_have_biases=True,
        has_shifted_norms=True,
        may_turn_partly=True,
        activation="relu2",
    ),
    "command-r": Family(
        "cohere",
        "CohereForCausalLM",
        inner={"attn_norm": "input_layernorm"} | _ATTENTION | _MLP,
        norm_eps="layer_norm_eps",
        has_layer_norms=True,
        settings=settings.cohere,
    ),
    "cohere2": Family(
        "cohere2",
        "Cohere2ForCausalLM",
        inner={"attn_norm": "input_layernorm"} | _ATTENTION | _MLP,
        norm_eps="layer_norm_eps",
        has_layer_norms=True,
        biases=(),
        settings=settings.cohere2,
    ),
    "chatglm": Family(
        "glm",
        "GlmForCausalLM",
        inner=_NORMS | _ATTENTION | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        merged=_QKV,
        biases=_ATTENTION_BIASES[:3],
        may_turn_partly=True,
    ),
    "glm4": Family(
        "glm4",
        "Glm4ForCausalLM",
        inner=_NORMS
        | _ATTENTION
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        merged=_QKV,
        biases=_ATTENTION_BIASES[:3],
        may_turn_partly=True,
    ),
    "glm4moe": Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        inner={"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
        | _ATTENTION
        | _HEAD_NORMS
        | _MLP
        | _ROUTER
        | _SHARED,
        whole=_CORRECTION,
        experts=_EXPERTS,
        optional={"attn_q_norm": "use_qk_norm"},
        biases=_ATTENTION_BIASES[:3],
        may_turn_partly=True,
        settings=settings.sigmoid_moe,
    ),
    "lfm2": Family(
        "lfm2",
        "Lfm2ForCausalLM",
        inner=_LFM2
        | {"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"},
        final_norm="embedding_norm",
        norm_eps="norm_eps",
        biases=(),
        settings=settings.lfm2,
    ),
    "deepseek2": Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        inner=_NORMS | _LATENTS | _MLP | _ROUTER | _SHARED,
        experts=_EXPERTS,
        biases=(),
        has_latents=True,
        settings=settings.deepseek_v2,
    ),
}
FAMILIES["lfm2moe"] = FAMILIES["lfm2"]._replace(
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    inner={**FAMILIES["lfm2"].inner, "ffn_gate_inp": "feed_forward.gate"},
    whole={"exp_probs_b.bias": "feed_forward.expert_bias"},
    experts=_experts(*(f"feed_forward.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))),
    settings=settings.lfm2_moe,
)
FAMILIES["gpt-oss"] = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    inner={
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    }
    | _ATTENTION,
    whole={"attn_sinks.weight": "self_attn.sinks"},
    experts=_EXPERTS,
    experts_have_biases=True,
    biases=(*_ATTENTION_BIASES, "ffn_gate_inp"),
    always_has_biases=True,
    settings=settings.gpt_oss,
)


def _delta_family(architecture: str, prefix: str, inputs: Mapping[str, str], **fields: Any) -> Family:
    """A family of Qwen's with gated delta nets, whose tensors have names with this prefix."""
    inner = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    inner |= {kind: prefix + name for kind, name in {**_DELTA_NETS, **inputs}.items()}
    return Family(
        architecture=architecture,
        inner=inner | _ATTENTION | _HEAD_NORMS | fields.pop("mlp"),
        whole={"ssm_dt.bias": f"{prefix}dt_bias", "ssm_a": f"{prefix}A_log"},
        has_shifted_norms=True,
        may_turn_partly=True,
        **fields,
    )


_GATED_MIXTURE = {kind: FAMILIES["qwen2moe"].inner[kind] for kind in ("ffn_gate_inp", SHARED_GATE, *_SHARED)}
_TILED = ("tiled_linear_attn.", {"ssm_beta": "in_proj_b", "ssm_alpha": "in_proj_a"})
FAMILIES["qwen35"] = _delta_family(
    "Qwen3_5ForCausalLM", *_TILED, model_type="qwen3_5_text", mlp=_MLP, settings=settings.delta_nets
)
FAMILIES["qwen35moe"] = _delta_family(
    "Qwen3_5MoeForCausalLM",
    *_TILED,
    model_type="qwen3_5_moe_text",
    mlp=_GATED_MIXTURE,
    experts=_EXPERTS,
    settings=settings.qwen3_5_moe,
)
FAMILIES["qwen3next"] = _delta_family(
    "Qwen3NextForCausalLM",
    "linear_attn.",
    {"ssm_ba": "in_proj_ba", "ssm_in": "in_proj_qkvz"},
    model_type="qwen3_next",
    mlp=_GATED_MIXTURE,
    experts=_EXPERTS,
    settings=partial(settings.qwen3_5_moe, order="split"),
)
# Models of an architecture that a key tells apart, or an end of some tensors' names
_ALIKE = {
    "llama": (
        "llama.expert_count",
        Family(
            "mixtral",
            "MixtralForCausalLM",
            inner=_NORMS | _ATTENTION | {"ffn_gate_inp": "block_sparse_moe.gate"},
            experts=_experts(*(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))),
            biases=(),
            is_permuted=True,
            settings=settings.mixtral,
        ),
    ),
    "olmo2": (
        "olmo2.attention.sliding_window",
        FAMILIES["olmo2"]._replace(
            model_type="olmo3", architecture="Olmo3ForCausalLM", settings=settings.windowed
        ),
    ),
    # Older files have transformers' one matrix.
    "qwen3next": (
        ".ssm_in.weight",
        FAMILIES["qwen3next"]._replace(settings=partial(settings.qwen3_5_moe, order="grouped")),
    ),
    "deepseek2": (
        ".exp_probs_b.bias",
        FAMILIES["deepseek2"]._replace(
            model_type="deepseek_v3",
            architecture="DeepseekV3ForCausalLM",
            whole=_CORRECTION,
            settings=settings.deepseek_v3,
        ),
    ),
}


def model_types() -> set[str]:
    """Those of transformers, of all models that are read."""
    families = (*FAMILIES.values(), *(family for _, family in _ALIKE.values()))
    # Files of the first say llama, those of the second deepseek2 with DeepSeek V3's mixtures.
    return {"mistral", "glm4_moe_lite", *(family.model_type for family in families)}


def family_of(fields: GgufFields, names: Iterable[str]) -> Family:
    """The family of a file with these tensors. Raises `CheckpointError` for an architecture that is not known here."""
    name = fields.text("general.architecture")
    if name not in FAMILIES:
        raise fields.wrong(
            f"the architecture {name[:60]!r} is not supported",
            hint=f"Supported are {', '.join(sorted(FAMILIES))}. Others may be packed from the original model.",
        )
    family = FAMILIES[name]
    mark, other = _ALIKE.get(name, ("", family))
    if mark.startswith("."):
        is_other = any(each.endswith(mark) for each in names)
    else:
        is_other = fields.integer(mark, 0, settings.MAX_CONTEXT, 0) > 0
    family = other if is_other else family
    if family.experts is None and fields.integer(f"{name}.expert_count", 0, settings.MAX_EXPERTS, 0):
        raise fields.wrong(f"a mixture of experts of the architecture {name!r} is not supported")
    return family
