"""Architectures of GGUF and the models that transformers knows them as: names of tensors, and settings of their own.

Each row of `FAMILIES` says how a file of llama.cpp's converter differs from transformers' checkpoint. What a file does
not say is a constant of llama.cpp, and stated here. Names and numbers only; no content is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .fields import GgufFields

MAX_EXPERTS = 1_024
MAX_WIDTH = 1 << 20
MAX_CONTEXT = 1 << 24

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

# (metadata, the architecture's prefix of keys, config.json so far) → more of config.json
Settings = Callable[[GgufFields, str, Mapping[str, Any]], dict[str, Any]]


def _no_more(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


class Family(NamedTuple):
    """How an architecture of GGUF is called by transformers, and stored."""

    model_type: str
    architecture: str
    inner: Mapping[str, str] = _LLAMA  # a layer's tensors
    experts: Mapping[str, str] | None = None  # those that hold all experts; {} is an expert's number
    experts_have_biases: bool = False
    biases: tuple[str, ...] = _ATTENTION_BIASES  # tensors that may have one: all of them, or none
    always_has_biases: bool = False
    is_permuted: bool = False  # rows of q and k stand in pairs that turn together
    has_shifted_norms: bool = False  # weights of norms are stored plus 1
    may_turn_partly: bool = False  # of a head
    activation: str = "silu"
    settings: Settings = _no_more


def _gemma2(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    caps = {name: fields.shortest(own + name, 1e-3, 1e6) for name in names}
    window = fields.integer(f"{own}attention.sliding_window", 1, MAX_CONTEXT)
    return {**_gemma_scale(config, 46), **caps, "sliding_window": window}


def _gemma3(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        **_gemma_scale(config, 62),
        "sliding_window": fields.integer(f"{own}attention.sliding_window", 1, MAX_CONTEXT),
        "rope_local_base_freq": fields.shortest(f"{own}rope.freq_base_swa", 2.0, 1e12, 10_000.0),
    }
    if f"{own}final_logit_softcapping" in fields:
        found["final_logit_softcapping"] = fields.shortest(f"{own}final_logit_softcapping", 1e-3, 1e6)
    return {**found, **_layer_types(fields, own, config, 6)}


def _gemma_scale(config: Mapping[str, Any], layers_of_largest: int) -> dict[str, Any]:
    """The largest model of a generation scales scores by another number than the size of a head."""
    is_largest = config["num_hidden_layers"] == layers_of_largest
    largest = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": largest if is_largest else config["head_dim"],
    }


def _phi3(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    window = fields.integer(f"{own}attention.sliding_window", 0, MAX_CONTEXT)
    original = fields.integer(
        f"{own}rope.scaling.original_context_length", 1, MAX_CONTEXT, config["max_position_embeddings"]
    )
    return {"sliding_window": window or None, "original_max_position_embeddings": original}


def _granite(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    keys = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {name: fields.shortest(own + key, 1e-6, 1e6) for name, key in keys.items()}


def _windowed(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Windows in the layers that the file lists, or else in three of four; in none where the file has no size."""
    if f"{own}attention.sliding_window" not in fields:
        return {"sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}
    window = fields.integer(f"{own}attention.sliding_window", 1, MAX_CONTEXT)
    return {"sliding_window": window, **_layer_types(fields, own, config, 4)}


def _layer_types(fields: GgufFields, own: str, config: Mapping[str, Any], interval: int) -> dict[str, Any]:
    """The layers with a window, by default all but each `interval`-th."""
    pattern = fields.get(f"{own}attention.sliding_window_pattern")
    if pattern is None:
        return {"sliding_window_pattern": interval}
    if not isinstance(pattern, list) or len(pattern) != config["num_hidden_layers"]:
        raise fields.wrong(f"{own}attention.sliding_window_pattern must say true or false for each layer")
    return {"layer_types": ["sliding_attention" if local is True else "full_attention" for local in pattern]}


def _smollm3(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"no_rope_layer_interval": 4}


def _mixtral(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_local_experts": _num_experts(fields, own), **_used(fields, own), "sliding_window": None}


def _qwen3_moe(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    size = fields.integer(f"{own}expert_feed_forward_length", 1, MAX_WIDTH)
    experts = {"num_experts": _num_experts(fields, own), "moe_intermediate_size": size}
    return {**experts, **_used(fields, own), "norm_topk_prob": True, "decoder_sparse_step": 1}


def _gpt_oss(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    window = fields.integer(f"{own}attention.sliding_window", 1, MAX_CONTEXT)
    size = fields.integer(f"{own}expert_feed_forward_length", 1, MAX_WIDTH)
    experts = {"num_local_experts": _num_experts(fields, own), "intermediate_size": size}
    if f"{own}rope.scaling.type" not in fields:
        raise fields.wrong(f"has no {own}rope.scaling.type")
    return {**experts, **_used(fields, own), "sliding_window": window}


def _num_experts(fields: GgufFields, own: str) -> int:
    return fields.integer(f"{own}expert_count", 1, MAX_EXPERTS)


def _used(fields: GgufFields, own: str) -> dict[str, Any]:
    number = fields.integer(f"{own}expert_used_count", 1, _num_experts(fields, own))
    for key, most in (("expert_shared_count", 0), ("expert_group_count", 1)):
        if fields.integer(own + key, 0, MAX_EXPERTS, 0) > most:
            raise fields.wrong(f"{own}{key} is not supported")
    return {"num_experts_per_tok": number}


def _experts(gate: str, up: str, down: str) -> dict[str, str]:
    return {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}


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
        settings=_gemma2,
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        inner=_FOUR_NORMS | _ATTENTION | _MLP | _HEAD_NORMS,
        has_shifted_norms=True,
        activation="gelu_pytorch_tanh",
        settings=_gemma3,
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
        settings=_phi3,
    ),
    "granite": Family("granite", "GraniteForCausalLM", is_permuted=True, settings=_granite),
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
        settings=_windowed,
    ),
    "ernie4_5": Family("ernie4_5", "Ernie4_5ForCausalLM", biases=()),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", is_permuted=True, settings=_smollm3),
    "qwen3moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        inner=_LLAMA | _HEAD_NORMS | {"ffn_gate_inp": "mlp.gate"},
        experts=_experts(*(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))),
        settings=_qwen3_moe,
    ),
}
FAMILIES["gpt-oss"] = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    inner={
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
    }
    | _ATTENTION,
    experts=FAMILIES["qwen3moe"].experts,
    experts_have_biases=True,
    biases=(*_ATTENTION_BIASES, "ffn_gate_inp"),
    always_has_biases=True,
    settings=_gpt_oss,
)
# Models of an architecture that these keys tell apart, by the keys' ends
_ALIKE = {
    "llama": (
        "expert_count",
        Family(
            "mixtral",
            "MixtralForCausalLM",
            inner=_NORMS | _ATTENTION | {"ffn_gate_inp": "block_sparse_moe.gate"},
            experts=_experts(*(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))),
            biases=(),
            is_permuted=True,
            settings=_mixtral,
        ),
    ),
    "olmo2": (
        "attention.sliding_window",
        FAMILIES["olmo2"]._replace(model_type="olmo3", architecture="Olmo3ForCausalLM", settings=_windowed),
    ),
}


def model_types() -> set[str]:
    """Those of transformers, of all models that are read."""
    families = (*FAMILIES.values(), *(family for _, family in _ALIKE.values()))
    return {"mistral", *(family.model_type for family in families)}  # its files say llama


def family_of(fields: GgufFields) -> Family:
    """Raises `CheckpointError` for an architecture that is not known here."""
    name = fields.text("general.architecture")
    if name not in FAMILIES:
        raise fields.wrong(
            f"the architecture {name[:60]!r} is not supported",
            hint=f"Supported are {', '.join(sorted(FAMILIES))}. Others may be packed from the original model.",
        )
    key, other = _ALIKE.get(name, ("", None))
    is_other = other is not None and fields.integer(f"{name}.{key}", 0, MAX_CONTEXT, 0)
    family = other if other is not None and is_other else FAMILIES[name]
    if family.experts is None and fields.integer(f"{name}.expert_count", 0, MAX_EXPERTS, 0):
        raise fields.wrong(f"a mixture of experts of the architecture {name!r} is not supported")
    return family
