"""Architectures of GGUF and the models that transformers knows them as: names of tensors, and how they are stored.

Each row of `FAMILIES` says how a file of llama.cpp's converter differs from transformers' checkpoint. Names only; no
content is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from . import settings
from .family import (
    ATTENTION,
    ATTENTION_BIASES,
    CORRECTION,
    EXPERTS,
    FEED_FORWARD,
    FOUR_NORMS,
    GATED_MIXTURE,
    HEAD_NORMS,
    INPUTS_TABLE,
    LATENTS,
    LAYER_INPUTS,
    LFM2,
    LLAMA,
    MLP,
    NORMS,
    OF_LAYER_INPUTS,
    OUTER,
    OUTPUT_NORMS,
    QKV,
    ROUTER,
    SHARED,
    STREAMS,
    Family,
    experts_of,
)
from .fields import GgufFields
from .hybrids import BAMBA, HYBRIDS

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", is_permuted=True),  # Mistral's files say llama too
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", biases=ATTENTION_BIASES[:3], always_has_biases=True),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", inner=LLAMA | HEAD_NORMS),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        inner=FOUR_NORMS | ATTENTION | MLP,
        has_shifted_norms=True,
        activation="gelu_pytorch_tanh",
        settings=settings.gemma2,
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        inner=FOUR_NORMS | ATTENTION | MLP | HEAD_NORMS,
        has_shifted_norms=True,
        activation="gelu_pytorch_tanh",
        settings=settings.gemma3,
    ),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        inner=NORMS
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
        inner=OUTPUT_NORMS | ATTENTION | MLP | HEAD_NORMS,
    ),
    "exaone4": Family(
        "exaone4",
        "Exaone4ForCausalLM",
        inner=OUTPUT_NORMS | ATTENTION | MLP | HEAD_NORMS,
        biases=(),
        settings=settings.windowed,
    ),
    "ernie4_5": Family("ernie4_5", "Ernie4_5ForCausalLM", biases=()),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", is_permuted=True, settings=settings.smollm3),
    "qwen3moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        inner=LLAMA | HEAD_NORMS | ROUTER,
        experts=EXPERTS,
        settings=settings.qwen3_moe,
    ),
    "qwen2moe": Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        inner=NORMS | ATTENTION | GATED_MIXTURE,
        experts=EXPERTS,
        biases=ATTENTION_BIASES[:3],
        bias_setting="qkv_bias",
        settings=settings.qwen2_moe,
    ),
    "olmoe": Family(
        "olmoe",
        "OlmoeForCausalLM",
        inner=NORMS | ATTENTION | HEAD_NORMS | ROUTER,
        experts=EXPERTS,
        biases=(),
        settings=settings.olmoe,
    ),
    "ernie4_5-moe": Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        inner=LLAMA | ROUTER | SHARED,
        whole={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        experts=EXPERTS,
        biases=(),
        settings=settings.ernie_moe,
    ),
    "hunyuan-dense": Family(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        inner=LLAMA | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "starcoder2": Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        inner=NORMS | ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        norm_eps="norm_epsilon",
        has_layer_norms=True,
        norms_have_biases=True,
        biases=(*ATTENTION_BIASES, "ffn_up", "ffn_down"),
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
        biases=ATTENTION_BIASES[:3],
        bias_setting="use_qkv_bias",
        may_turn_partly=True,
    ),
    "phi2": Family(
        "phi",
        "PhiForCausalLM",
        inner=ATTENTION
        | {
            "attn_norm": "input_layernorm",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        merged=QKV,
        final_norm="final_layernorm",
        norm_eps="layer_norm_eps",
        has_layer_norms=True,
        norms_have_biases=True,
        biases=(*ATTENTION_BIASES, "ffn_up", "ffn_down"),
        always_has_biases=True,
        outer=OUTER | {"output.bias": "lm_head.bias"},
        may_turn_partly=True,
        activation="gelu_new",
    ),
    "gpt2": Family(
        "gpt2",
        "GPT2LMHeadModel",
        outer=OUTER | {"position_embd.weight": "model.embed_positions.weight"},
        inner=NORMS | ATTENTION | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        merged=QKV,
        norm_eps="layer_norm_epsilon",
        has_layer_norms=True,
        norms_have_biases=True,
        biases=(*ATTENTION_BIASES, "ffn_up", "ffn_down"),
        always_has_biases=True,
        activation="gelu_new",
        settings=settings.gpt2,
    ),
    "gptneox": Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        inner=NORMS | ATTENTION | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        merged=QKV,
        norm_eps="layer_norm_eps",
        has_layer_norms=True,
        norms_have_biases=True,
        biases=(*ATTENTION_BIASES, "ffn_up", "ffn_down"),
        always_has_biases=True,
        may_turn_partly=True,
        activation="gelu",
        settings=settings.gpt_neox,
    ),
    "nemotron": Family(
        "nemotron",
        "NemotronForCausalLM",
        inner=NORMS | ATTENTION | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
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
        inner={"attn_norm": "input_layernorm"} | ATTENTION | MLP,
        norm_eps="layer_norm_eps",
        has_layer_norms=True,
        settings=settings.cohere,
    ),
    "cohere2": Family(
        "cohere2",
        "Cohere2ForCausalLM",
        inner={"attn_norm": "input_layernorm"} | ATTENTION | MLP,
        norm_eps="layer_norm_eps",
        has_layer_norms=True,
        biases=(),
        settings=settings.cohere2,
    ),
    "chatglm": Family(
        "glm",
        "GlmForCausalLM",
        inner=NORMS | ATTENTION | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        merged=QKV,
        biases=ATTENTION_BIASES[:3],
        may_turn_partly=True,
    ),
    "glm4": Family(
        "glm4",
        "Glm4ForCausalLM",
        inner=NORMS
        | ATTENTION
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        merged=QKV,
        biases=ATTENTION_BIASES[:3],
        may_turn_partly=True,
    ),
    "glm4moe": Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        inner={"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
        | ATTENTION
        | HEAD_NORMS
        | MLP
        | ROUTER
        | SHARED,
        whole=CORRECTION,
        experts=EXPERTS,
        optional={"attn_q_norm.weight": "use_qk_norm"},
        biases=ATTENTION_BIASES[:3],
        may_turn_partly=True,
        settings=settings.sigmoid_moe,
    ),
    "lfm2": Family(
        "lfm2",
        "Lfm2ForCausalLM",
        inner=LFM2
        | {"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"},
        final_norm="embedding_norm",
        norm_eps="norm_eps",
        biases=(),
        settings=settings.lfm2,
    ),
    "deepseek2": Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        inner=NORMS | LATENTS | MLP | ROUTER | SHARED,
        experts=EXPERTS,
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
    experts=experts_of(*(f"feed_forward.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))),
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
    | ATTENTION,
    whole={"attn_sinks.weight": "self_attn.sinks"},
    experts=EXPERTS,
    experts_have_biases=True,
    biases=(*ATTENTION_BIASES, "ffn_gate_inp"),
    always_has_biases=True,
    settings=settings.gpt_oss,
)
FAMILIES |= HYBRIDS
FAMILIES["llama4"] = Family(
    "llama4_text",
    "Llama4ForCausalLM",
    inner=NORMS
    | ATTENTION
    | FEED_FORWARD
    | {"ffn_gate_inp": "feed_forward.router"}
    | {
        kind: name.replace("mlp.shared_experts", "feed_forward.shared_expert")
        for kind, name in SHARED.items()
    },
    experts={kind: name.replace("mlp", "feed_forward") for kind, name in EXPERTS.items()},
    settings=settings.llama4,
)
FAMILIES["gemma4"] = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    outer=OUTER | OF_LAYER_INPUTS,
    inner=FOUR_NORMS
    | ATTENTION
    | MLP
    | HEAD_NORMS
    | LAYER_INPUTS
    | {
        "ffn_gate_inp": "router.proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    whole={
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    experts={
        **experts_of(*(f"experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))),
        "ffn_gate_up_exps": "experts.{}.gate_proj experts.{}.up_proj",
    },
    rows={"vocab_size_per_layer_input": INPUTS_TABLE},
    shares_keys=True,
    has_windowed_heads=True,
    activation="gelu_pytorch_tanh",
    settings=settings.gemma4,
)
FAMILIES["gemma3n"] = Family(
    "gemma3n_text",
    "Gemma3nForCausalLM",
    outer=OUTER | OF_LAYER_INPUTS,
    stacked={
        "altup_proj.weight": "model.altup_projections.{}.weight",
        "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
    },
    inner=FOUR_NORMS | ATTENTION | MLP | HEAD_NORMS | LAYER_INPUTS | STREAMS,
    whole={"altup_correct_scale.weight": "altup.correct_output_scale"},
    rows={"vocab_size_per_layer_input": INPUTS_TABLE, "laurel_rank": "blk.0.laurel_l.weight"},
    shares_keys=True,
    activation="gelu_pytorch_tanh",
    settings=settings.gemma3n,
)
# Their text models: the tower is another file, which is not read.
FAMILIES["qwen3vl"] = FAMILIES["qwen3"]
FAMILIES["qwen3vlmoe"] = FAMILIES["qwen3moe"]
# Models of an architecture that a key tells apart, or an end of some tensors' names
_ALIKE = {
    "llama": (
        "llama.expert_count",
        Family(
            "mixtral",
            "MixtralForCausalLM",
            inner=NORMS | ATTENTION | {"ffn_gate_inp": "block_sparse_moe.gate"},
            experts=experts_of(*(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2"))),
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
    "granitehybrid": ("granitehybrid.rope.scaling.finetuned", BAMBA),
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
            whole=CORRECTION,
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
    elif mark.endswith("finetuned"):
        is_other = fields.boolean(mark, False)
    else:
        is_other = fields.integer(mark, 0, settings.MAX_CONTEXT, 0) > 0
    family = other if is_other else family
    if family.experts is None and fields.integer(f"{name}.expert_count", 0, settings.MAX_EXPERTS, 0):
        raise fields.wrong(f"a mixture of experts of the architecture {name!r} is not supported")
    return family
