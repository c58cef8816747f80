"""Settings of each architecture of GGUF, as more of transformers' config.json.

What a file does not say is a constant of llama.cpp, and stated here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .fields import GgufFields

MAX_EXPERTS = 1_024
MAX_WIDTH = 1 << 20
MAX_HEAD_DIM = 1_024
MAX_CONTEXT = 1 << 24
MAX_LAYERS = 1_024
_SOFTMAX, _SIGMOID = 1, 2  # of `expert_gating_func`


def no_more(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def gemma2(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    caps = {name: fields.shortest(own + name, 1e-3, 1e6) for name in names}
    window = fields.integer(f"{own}attention.sliding_window", 1, MAX_CONTEXT)
    return {**_gemma_scale(config, 46), **caps, "sliding_window": window}


def gemma3(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        **_gemma_scale(config, 62),
        "sliding_window": fields.integer(f"{own}attention.sliding_window", 1, MAX_CONTEXT),
        "rope_local_base_freq": fields.shortest(f"{own}rope.freq_base_swa", 2.0, 1e12, 10_000.0),
    }
    if f"{own}final_logit_softcapping" in fields:
        found["final_logit_softcapping"] = fields.shortest(f"{own}final_logit_softcapping", 1e-3, 1e6)
    return {**found, **_layer_types(fields, own, config, 6)}


def gemma3n(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    if f"{own}attention.sliding_window_pattern" not in fields:
        raise fields.wrong(f"has no {own}attention.sliding_window_pattern")
    streams = fields.integer(f"{own}altup.num_inputs", 2, 16)
    # Deviations above the mean, of the share of gates that become 0
    cuts = fields.numbers(f"{own}activation_sparsity_scale", num_layers)
    return {
        **gemma3(fields, own, config),
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": fields.integers(
            f"{own}feed_forward_length", 1, MAX_WIDTH, num_layers=num_layers
        ),
        "final_logit_softcapping": fields.shortest(f"{own}final_logit_softcapping", 1e-3, 1e6, 30.0),
        "num_kv_shared_layers": fields.integer(f"{own}attention.shared_kv_layers", 0, num_layers),
        "hidden_size_per_layer_input": fields.integer(f"{own}embedding_length_per_layer_input", 1, MAX_WIDTH),
        "altup_num_inputs": streams,
        "altup_active_idx": fields.integer(f"{own}altup.active_idx", 0, streams - 1),
        "activation_sparsity_pattern": [round((1 + math.erf(cut / math.sqrt(2))) / 2, 6) for cut in cuts],
    }


def gemma4(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` has what is so of the layers with a window."""
    num_layers = config["num_hidden_layers"]
    if f"{own}attention.sliding_window_pattern" not in fields:
        raise fields.wrong(f"has no {own}attention.sliding_window_pattern")
    kinds = _layer_types(fields, own, config, 6)
    num_shared = fields.integer(f"{own}attention.shared_kv_layers", 0, num_layers, 0)
    widths = fields.integers(f"{own}feed_forward_length", 1, MAX_WIDTH, num_layers=num_layers)
    is_wide = widths[-1] != widths[0]
    expected = [
        widths[0] * (1 + (is_wide and layer >= num_layers - num_shared)) for layer in range(num_layers)
    ]
    if widths != expected:
        raise fields.wrong(
            f"{own}feed_forward_length may be doubled in layers that share keys, and only there"
        )
    found = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": fields.integer(f"{own}attention.sliding_window", 1, MAX_CONTEXT),
        **kinds,
        **_windowed_heads(fields, own, config, kinds["layer_types"]),
        "num_kv_shared_layers": num_shared,
        "use_double_wide_mlp": is_wide,
        "hidden_size_per_layer_input": fields.integer(
            f"{own}embedding_length_per_layer_input", 0, MAX_WIDTH, 0
        ),
    }
    if f"{own}final_logit_softcapping" in fields:
        found["final_logit_softcapping"] = fields.shortest(f"{own}final_logit_softcapping", 1e-3, 1e6)
    if fields.integer(f"{own}expert_count", 0, MAX_EXPERTS, 0):
        used = _used(fields, own)
        found |= {
            "enable_moe_block": True,
            "num_experts": _num_experts(fields, own),
            "top_k_experts": used["num_experts_per_tok"],
            "moe_intermediate_size": fields.integer(f"{own}expert_feed_forward_length", 1, MAX_WIDTH),
        }
    return found


def _windowed_heads(
    fields: GgufFields, own: str, config: Mapping[str, Any], kinds: list[str]
) -> dict[str, int]:
    """The sizes of heads without a window, and the numbers of heads of keys with one and without."""
    head_dim = fields.integer(f"{own}attention.key_length", 4, MAX_HEAD_DIM)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(own + key, 1, MAX_HEAD_DIM, head_dim) != head_dim:
            raise fields.wrong(f"{own}{key} differs from the {head_dim} columns of a head")
    key = f"{own}attention.head_count_kv"
    heads = fields.integers(key, 1, config["num_attention_heads"], num_layers=len(kinds))
    of_kinds: dict[str, int] = {}
    for kind, num in zip(kinds, heads, strict=True):
        if of_kinds.setdefault(kind, num) != num:
            raise fields.wrong(f"{key} must be the same of all layers with a window, and of all without")
    whole = of_kinds.get("full_attention", heads[0])
    return {
        "global_head_dim": head_dim,
        "num_key_value_heads": of_kinds.get("sliding_attention", whole),
        "num_global_key_value_heads": whole,
    }


def _gemma_scale(config: Mapping[str, Any], layers_of_largest: int) -> dict[str, Any]:
    """The largest model of a generation scales scores by another number than the size of a head."""
    is_largest = config["num_hidden_layers"] == layers_of_largest
    largest = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": largest if is_largest else config["head_dim"],
    }


def phi3(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    window = fields.integer(f"{own}attention.sliding_window", 0, MAX_CONTEXT)
    original = fields.integer(
        f"{own}rope.scaling.original_context_length", 1, MAX_CONTEXT, config["max_position_embeddings"]
    )
    return {"sliding_window": window or None, "original_max_position_embeddings": original}


def granite(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    keys = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {name: fields.shortest(own + key, 1e-6, 1e6) for name, key in keys.items()}


def windowed(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
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


def starcoder2(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": None}


_OF_LLAMA = {"tensor_names": "llama"}  # of families whose own checkpoints have other matrices


def gpt2(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_OF_LLAMA, "n_inner": config["intermediate_size"]}


def gpt_neox(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_OF_LLAMA, "use_parallel_residual": fields.boolean(f"{own}use_parallel_residual", True)}


def cohere(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"logit_scale": fields.shortest(f"{own}logit_scale", 1e-6, 1e6)}


def cohere2(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    window = fields.integer(f"{own}attention.sliding_window", 1, MAX_CONTEXT)
    return {**cohere(fields, own, config), "sliding_window": window, **_layer_types(fields, own, config, 4)}


def smollm3(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"no_rope_layer_interval": 4}


def mixtral(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_local_experts": _num_experts(fields, own), **_used(fields, own), "sliding_window": None}


def olmoe(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_experts": _num_experts(fields, own), **_used(fields, own), "norm_topk_prob": False}


def qwen2_moe(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    size = fields.integer(f"{own}expert_shared_feed_forward_length", 1, MAX_WIDTH)
    mixture = {**qwen3_moe(fields, own, config), "norm_topk_prob": False}
    return {**mixture, "shared_expert_intermediate_size": size}


def qwen3_moe(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    size = fields.integer(f"{own}expert_feed_forward_length", 1, MAX_WIDTH)
    experts = {"num_experts": _num_experts(fields, own), "moe_intermediate_size": size}
    return {**experts, **_used(fields, own), "norm_topk_prob": True, "decoder_sparse_step": 1}


def delta_nets(
    fields: GgufFields, own: str, config: Mapping[str, Any], *, order: str = "tiled"
) -> dict[str, Any]:
    """Gated delta nets in the layers that the file lists, or else in all but each fourth or so."""
    num_layers = config["num_hidden_layers"]
    kinds = fields.get(f"{own}attention.recurrent_layers")
    if kinds is None:
        interval = fields.integer(f"{own}full_attention_interval", 1, MAX_LAYERS, 4)
        kinds = [bool((layer + 1) % interval) for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) < num_layers:
        raise fields.wrong(f"{own}attention.recurrent_layers must say true or false for each layer")
    heads, size = _heads_of_states(fields, own)
    return {
        "layer_types": [
            "linear_attention" if is_net is True else "full_attention" for is_net in kinds[:num_layers]
        ],
        "linear_num_key_heads": fields.integer(f"{own}ssm.group_count", 1, heads),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": fields.integer(f"{own}ssm.state_size", 1, MAX_HEAD_DIM),
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": fields.integer(f"{own}ssm.conv_kernel", 1, 16),
        "delta_net_order": order,
    }


def _heads_of_states(fields: GgufFields, own: str) -> tuple[int, int]:
    """Heads of layers with a recurrent state, and the values of each."""
    heads = fields.integer(f"{own}ssm.time_step_rank", 1, MAX_WIDTH)
    inner_size = fields.integer(f"{own}ssm.inner_size", heads, MAX_WIDTH)
    if inner_size % heads:
        raise fields.wrong(f"{heads} heads of a layer with a state cannot share {inner_size} values")
    return heads, inner_size // heads


def qwen3_5_moe(
    fields: GgufFields, own: str, config: Mapping[str, Any], *, order: str = "tiled"
) -> dict[str, Any]:
    mixture = {**qwen2_moe(fields, own, config), "norm_topk_prob": True}
    return {**mixture, **delta_nets(fields, own, config, order=order)}


def gpt_oss(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    window = fields.integer(f"{own}attention.sliding_window", 1, MAX_CONTEXT)
    size = fields.integer(f"{own}expert_feed_forward_length", 1, MAX_WIDTH)
    experts = {"num_local_experts": _num_experts(fields, own), "intermediate_size": size}
    if f"{own}rope.scaling.type" not in fields:
        raise fields.wrong(f"has no {own}rope.scaling.type")
    return {**experts, **_used(fields, own), "sliding_window": window}


def sigmoid_moe(
    fields: GgufFields, own: str, config: Mapping[str, Any], *, gating: int = _SIGMOID
) -> dict[str, Any]:
    """DeepSeek's kind of mixture."""
    num = _num_experts(fields, own)
    if fields.integer(f"{own}expert_gating_func", 0, 16, gating) != gating:
        raise fields.wrong(f"{own}expert_gating_func must be {gating}")
    groups = fields.integer(f"{own}expert_group_count", 1, num, 1)
    return {
        "n_routed_experts": num,
        "num_experts_per_tok": fields.integer(f"{own}expert_used_count", 1, num),
        "moe_intermediate_size": fields.integer(f"{own}expert_feed_forward_length", 1, MAX_WIDTH),
        "n_shared_experts": fields.integer(f"{own}expert_shared_count", 0, MAX_EXPERTS, 0),
        "n_group": groups,
        "topk_group": fields.integer(f"{own}expert_group_used_count", 1, groups, groups),
        "first_k_dense_replace": fields.integer(f"{own}leading_dense_block_count", 0, MAX_LAYERS, 0),
        "norm_topk_prob": fields.boolean(f"{own}expert_weights_norm", False),
        "routed_scaling_factor": fields.shortest(f"{own}expert_weights_scale", 1e-6, 1e6, 1.0),
    }


def deepseek_v2(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    experts = sigmoid_moe(fields, own, config, gating=_SOFTMAX)
    method = "greedy" if experts["n_group"] == 1 else "group_limited_greedy"
    return {**_latents(fields, own, config), **experts, "topk_method": method}


def deepseek_v3(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_latents(fields, own, config), **sigmoid_moe(fields, own, config)}


def _latents(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Lengths of heads as they are without latents; older files state no others."""
    end = "_mla" if f"{own}attention.key_length_mla" in fields else ""
    turned, low = config["head_dim"], f"{own}attention.q_lora_rank"
    key_length = fields.integer(f"{own}attention.key_length{end}", turned + 1, MAX_HEAD_DIM)
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": fields.integer(f"{own}attention.kv_lora_rank", 1, MAX_HEAD_DIM),
        "q_lora_rank": fields.integer(low, 1, MAX_WIDTH) if low in fields else None,
        "qk_nope_head_dim": key_length - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": fields.integer(f"{own}attention.value_length{end}", 1, MAX_HEAD_DIM),
    }


def ernie_moe(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    num = _num_experts(fields, own)
    return {
        "use_bias": False,
        "moe_num_experts": num,
        "moe_k": fields.integer(f"{own}expert_used_count", 1, num),
        "moe_intermediate_size": fields.integer(f"{own}expert_feed_forward_length", 1, MAX_WIDTH),
        "moe_num_shared_experts": fields.integer(f"{own}expert_shared_count", 0, MAX_EXPERTS, 0),
        "moe_layer_interval": fields.integer(f"{own}interleave_moe_layer_step", 1, MAX_LAYERS),
        "moe_layer_start_index": fields.integer(f"{own}leading_dense_block_count", 0, MAX_LAYERS, 0),
    }


def _of_layers(fields: GgufFields, key: str, config: Mapping[str, Any]) -> list[bool]:
    """A flag for each layer, True if the key has a number for it, and not 0."""
    numbers, num_layers = fields.get(key), config["num_hidden_layers"]
    numbers = numbers.tolist() if hasattr(numbers, "tolist") else None
    if numbers is None or len(numbers) < num_layers:
        raise fields.wrong(f"{key} must have a number for each layer")
    return [bool(number) for number in numbers[:num_layers]]


def lfm2(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without heads of keys convolve."""
    attending = _of_layers(fields, f"{own}attention.head_count_kv", config)
    return {
        "layer_types": ["full_attention" if attends else "conv" for attends in attending],
        "conv_L_cache": fields.integer(f"{own}shortconv.l_cache", 2, 16),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if fields.integer(f"{own}expert_gating_func", 0, 16) != _SIGMOID:
        raise fields.wrong(f"{own}expert_gating_func must be {_SIGMOID}, the sigmoid")
    return {
        **lfm2(fields, own, config),
        "num_experts": _num_experts(fields, own),
        **_used(fields, own),
        "moe_intermediate_size": fields.integer(f"{own}expert_feed_forward_length", 1, MAX_WIDTH),
        "num_dense_layers": fields.integer(f"{own}leading_dense_block_count", 0, MAX_LAYERS, 0),
    }


def _mamba(fields: GgufFields, own: str, keys: str) -> dict[str, Any]:
    """Mamba-2 layers, by their family's keys for heads, the size of each, groups, states and convolutions."""
    heads, size = _heads_of_states(fields, own)
    groups = fields.integer(f"{own}ssm.group_count", 1, heads)
    state_size = fields.integer(f"{own}ssm.state_size", 1, MAX_HEAD_DIM)
    seen = fields.integer(f"{own}ssm.conv_kernel", 1, 16)
    return dict(zip(keys.split(), (heads, size, groups, state_size, seen), strict=True))


_MAMBA_KEYS = "mamba_n_heads mamba_d_head mamba_n_groups mamba_d_state mamba_d_conv"


def _expanded_mamba(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    found = _mamba(fields, own, _MAMBA_KEYS)
    factor, rest = divmod(found["mamba_n_heads"] * found["mamba_d_head"], config["hidden_size"])
    if rest:
        raise fields.wrong(f"{own}ssm.inner_size must be a multiple of {own}embedding_length")
    return {**found, "mamba_expand": factor}


def granite_hybrid(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without heads of keys are Mamba-2 layers; nothing turns."""
    attending = _of_layers(fields, f"{own}attention.head_count_kv", config)
    num = fields.integer(f"{own}expert_count", 0, MAX_EXPERTS, 0)
    shared = fields.integer(
        f"{own}expert_shared_feed_forward_length", 1, MAX_WIDTH, config["intermediate_size"]
    )
    return {
        **_OF_LLAMA,
        **granite(fields, own, config),
        **_expanded_mamba(fields, own, config),
        "layer_types": ["full_attention" if attends else "linear_attention" for attends in attending],
        "position_embedding_type": "nope",
        "num_local_experts": num,
        **(_used(fields, own) if num else {}),
        "shared_intermediate_size": shared,
    }


def bamba(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    attending = _of_layers(fields, f"{own}attention.head_count_kv", config)
    layers = [layer for layer, attends in enumerate(attending) if attends]
    return {**_expanded_mamba(fields, own, config), "attn_layer_indices": layers}


def falcon_h1(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Multipliers are part of the weights."""
    found = _mamba(fields, own, _MAMBA_KEYS)
    num_values = found["mamba_n_heads"] * found["mamba_d_head"]
    return {**found, "mamba_d_ssm": num_values, "mamba_norm_before_gate": False}


def nemotron_h(
    fields: GgufFields, own: str, config: Mapping[str, Any], *, mlp: str = "mlp"
) -> dict[str, Any]:
    """Layers with heads of keys attend, and those with a width are of the kind `mlp`."""
    attending = _of_layers(fields, f"{own}attention.head_count_kv", config)
    with_width = _of_layers(fields, f"{own}feed_forward_length", config)
    both = zip(attending, with_width, strict=True)
    keys = "mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel"
    return {
        **_mamba(fields, own, keys),
        "layers_block_type": [
            "full_attention" if attends else mlp if has_width else "linear_attention"
            for attends, has_width in both
        ],
        "mlp_hidden_act": "relu2",
    }


def nemotron_h_moe(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if f"{own}moe_latent_size" in fields:
        raise fields.wrong(f"{own}moe_latent_size is not supported")
    shared = fields.integer(f"{own}expert_shared_feed_forward_length", 1, MAX_WIDTH)
    return {
        **nemotron_h(fields, own, config, mlp="moe"),
        **sigmoid_moe(fields, own, config),
        "moe_shared_expert_intermediate_size": shared,
    }


def llama4(fields: GgufFields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Chunks, scales of queries and layers that do not turn are llama.cpp's constants."""
    if fields.integer(f"{own}attention.sliding_window", 0, MAX_CONTEXT, 8_192) != 8_192:
        raise fields.wrong(f"{own}attention.sliding_window must be 8192")
    num = _num_experts(fields, own)
    return {
        "intermediate_size": fields.integer(f"{own}expert_feed_forward_length", 1, MAX_WIDTH),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": fields.integer(f"{own}interleave_moe_layer_step", 1, MAX_LAYERS),
        "num_local_experts": num,
        **_used(fields, own),
        "use_qk_norm": num != 128,  # Maverick has none
        "attention_chunk_size": 8_192,
        "no_rope_layer_interval": 4,
        "floor_scale": 8_192,
        "attn_scale": 0.1,
    }


def _num_experts(fields: GgufFields, own: str) -> int:
    return fields.integer(f"{own}expert_count", 1, MAX_EXPERTS)


def _used(fields: GgufFields, own: str) -> dict[str, Any]:
    number = fields.integer(f"{own}expert_used_count", 1, _num_experts(fields, own))
    for key, most in (("expert_shared_count", 0), ("expert_group_count", 1)):
        if fields.integer(own + key, 0, MAX_EXPERTS, 0) > most:
            raise fields.wrong(f"{own}{key} is not supported")
    return {"num_experts_per_tok": number}
