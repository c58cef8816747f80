"""Architectures of GGUF whose layers have gated delta nets or Mamba-2 in place of attention, or next to it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from . import settings
from .family import (
    ATTENTION,
    DELTA_NETS,
    EMBEDDINGS,
    EXPERTS,
    FEED_FORWARD,
    GATED_MIXTURE,
    HEAD_NORMS,
    LLAMA,
    MAMBA,
    MAMBA_WHOLE,
    MLP,
    ROUTER,
    SHARED,
    Family,
)

HYBRIDS: dict[str, Family] = {}


def _prefixed(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {kind: prefix + name for kind, name in names.items()}


def _delta_family(architecture: str, prefix: str, inputs: Mapping[str, str], **fields: Any) -> Family:
    """A family of Qwen's with gated delta nets, whose tensors have names with this prefix."""
    inner = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    inner |= _prefixed(prefix, {**DELTA_NETS, **inputs})
    return Family(
        architecture=architecture,
        inner=inner | ATTENTION | HEAD_NORMS | fields.pop("mlp"),
        whole={"ssm_dt.bias": f"{prefix}dt_bias", "ssm_a": f"{prefix}A_log"},
        has_shifted_norms=True,
        may_turn_partly=True,
        **fields,
    )


_TILED = ("tiled_linear_attn.", {"ssm_beta": "in_proj_b", "ssm_alpha": "in_proj_a"})
HYBRIDS["qwen35"] = _delta_family(
    "Qwen3_5ForCausalLM", *_TILED, model_type="qwen3_5_text", mlp=MLP, settings=settings.delta_nets
)
HYBRIDS["qwen35moe"] = _delta_family(
    "Qwen3_5MoeForCausalLM",
    *_TILED,
    model_type="qwen3_5_moe_text",
    mlp=GATED_MIXTURE,
    experts=EXPERTS,
    settings=settings.qwen3_5_moe,
)
HYBRIDS["qwen3next"] = _delta_family(
    "Qwen3NextForCausalLM",
    "linear_attn.",
    {"ssm_ba": "in_proj_ba", "ssm_in": "in_proj_qkvz"},
    model_type="qwen3_next",
    mlp=GATED_MIXTURE,
    experts=EXPERTS,
    settings=partial(settings.qwen3_5_moe, order="split"),
)
HYBRIDS["granitehybrid"] = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    inner=LLAMA | ROUTER | SHARED | _prefixed("mamba.", MAMBA),
    whole=_prefixed("mamba.", MAMBA_WHOLE),
    experts=EXPERTS,
    optional={"ssm_conv1d.bias": "mamba_conv_bias"},
    is_permuted=True,
    settings=settings.granite_hybrid,
)
BAMBA = Family(
    "bamba",
    "BambaForCausalLM",
    inner={"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
    | ATTENTION
    | FEED_FORWARD
    | _prefixed("mamba.", MAMBA),
    whole=_prefixed("mamba.", MAMBA_WHOLE),
    final_norm="final_layernorm",
    optional={"ssm_conv1d.bias": "mamba_conv_bias"},
    is_permuted=True,
    may_turn_partly=True,
    settings=settings.bamba,
)
HYBRIDS["falcon-h1"] = BAMBA._replace(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    whole={**BAMBA.whole, "ffn_norm": "pre_ff_layernorm.weight"},
    optional={**BAMBA.optional, "ssm_norm.weight": "mamba_rms_norm"},
    is_permuted=False,
    may_turn_partly=False,
    settings=settings.falcon_h1,
)
HYBRIDS["nemotron_h"] = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    outer={EMBEDDINGS: "model.embeddings.weight", "output.weight": "lm_head.weight"},
    inner={"attn_norm": "norm", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"}
    | {kind: name.replace("self_attn", "mixer") for kind, name in ATTENTION.items()}
    | _prefixed("mixer.", MAMBA),
    whole=_prefixed("mixer.", MAMBA_WHOLE),
    final_norm="norm_f",
    norm_eps="layer_norm_epsilon",
    optional={"ssm_conv1d.bias": "use_conv_bias"},
    is_permuted=True,
    may_turn_partly=True,
    activation="relu2",
    settings=settings.nemotron_h,
)
HYBRIDS["nemotron_h_moe"] = HYBRIDS["nemotron_h"]._replace(
    inner={
        **HYBRIDS["nemotron_h"].inner,
        "ffn_gate_inp": "mixer.gate",
        **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    },
    whole={**HYBRIDS["nemotron_h"].whole, "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
    experts={f"ffn_{part}_exps": f"mixer.experts.{{}}.{part}_proj" for part in ("up", "down")},
    settings=settings.nemotron_h_moe,
)
