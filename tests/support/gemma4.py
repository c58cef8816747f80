"""Settings of tiny models of Gemma 3n and 4, for `tiny_models.py`: small numbers, so that caps and windows show."""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 12,
    "final_logit_softcapping": 8.0,
    "pad_token_id": 0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "head_dim": 16,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
        "sliding_window": 12,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 300,
        "laurel_rank": 32,
        "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0, 0.3],
        "final_logit_softcapping": 8.0,
        "pad_token_id": 0,
    },
    "gemma4_text": {
        **_COMMON,
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 320,
    },
    "gemma4_unified_text": {
        **_COMMON,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
}
# Overrides of `gemma4_text`.
PLAIN: dict[str, Any] = {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
}
EQUAL: dict[str, Any] = {**PLAIN, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
MIXTURE: dict[str, Any] = {
    **EQUAL,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}
