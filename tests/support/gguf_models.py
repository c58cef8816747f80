"""transformers' models as GGUF files: written by gguf-py, with its names of tensors and keys.

Differences of an architecture (rows of heads in pairs, norms plus 1, experts in one tensor) are made here, from the
converter's documentation, without the code that is tested.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tests.support.gguf_files import random_blocks
from tests.support.gguf_gemma4 import add_gemma3n, add_gemma4, name_of_gemma4
from tests.support.gguf_mamba import add_mamba, known_of_mamba, mamba_factors, mamba_kv_heads, mamba_shaped
from tests.support.tiny_models import tensors_of

from teneral.loader.format.gguf.blocks import BLOCK_TYPES

KINDS = {kind.name: kind for kind in BLOCK_TYPES.values()}

# transformers' model_type → gguf-py's name
ARCHITECTURES = {
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "mixtral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "qwen2_moe": "QWEN2MOE",
    "qwen3_moe": "QWEN3MOE",
    "gemma2": "GEMMA2",
    "gemma3_text": "GEMMA3",
    "phi3": "PHI3",
    "granite": "GRANITE",
    "olmo2": "OLMO2",
    "olmo3": "OLMO2",
    "exaone4": "EXAONE4",
    "ernie4_5": "ERNIE4_5",
    "smollm3": "SMOLLM3",
    "gpt_oss": "GPT_OSS",
    "olmoe": "OLMOE",
    "ernie4_5_moe": "ERNIE4_5_MOE",
    "hunyuan_v1_dense": "HUNYUAN_DENSE",
    "starcoder2": "STARCODER2",
    "stablelm": "STABLELM",
    "phi": "PHI2",
    "gpt2": "GPT2",
    "gpt_neox": "GPTNEOX",
    "nemotron": "NEMOTRON",
    "cohere": "COMMAND_R",
    "cohere2": "COHERE2",
    "glm": "CHATGLM",
    "glm4": "GLM4",
    "glm4_moe": "GLM4_MOE",
    "deepseek_v2": "DEEPSEEK2",
    "deepseek_v3": "DEEPSEEK2",
    "glm4_moe_lite": "DEEPSEEK2",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2MOE",
    "qwen3_5_text": "QWEN35",
    "qwen3_5_moe_text": "QWEN35MOE",
    "qwen3_next": "QWEN3NEXT",
    "granitemoehybrid": "GRANITE_HYBRID",
    "bamba": "GRANITE_HYBRID",
    "falcon_h1": "FALCON_H1",
    "nemotron_h": "NEMOTRON_H_MOE",
    "llama4_text": "LLAMA4",
    "gemma3n_text": "GEMMA3N",
    "gemma4_text": "GEMMA4",
}
TILED = ("qwen3_5_text", "qwen3_5_moe_text")  # value heads of delta nets
SHIFTED = ("gemma2", "gemma3_text", "nemotron", "qwen3_next", *TILED)  # weights of norms are stored plus 1
MERGED = ("glm",)  # with queries, keys and values in one tensor, as its first files have them
LATENTS_APART = ("deepseek_v3", "glm4_moe_lite")  # as newer files have them; others as older ones
PERMUTED = (
    *("llama", "mistral", "mixtral", "granite", "smollm3"),
    *("granitemoehybrid", "bamba", "nemotron_h"),
)
_STACKED = {
    "gate_up_proj": "weight",
    "gate_up_proj_bias": "bias",
    "down_proj": "weight",
    "down_proj_bias": "bias",
}
# Experts, and matrices of streams
_EXPERT = re.compile(r"(.*\.(?:experts|altup\w*_projections)\.)(\d+)\.(.*)")
_QKV = re.compile(r"(.*\.self_attn\.)[qkv]_proj\.(.*)")
# transformers' names of corrections → those by which gguf-py knows them
_CORRECTIONS = {"e_score_correction_bias": "e_score_correction.bias", "expert_bias": "expert_bias.bias"}


def tensors_and_config(source: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the config.json of a file that was opened as a model."""
    from safetensors.torch import load

    data, _ = source.read("model.safetensors", max_bytes=1 << 28)
    return load(data), json.loads(source.read("config.json", max_bytes=1 << 20)[0])


def write_gguf(
    path: Path, model: Any, kind: str = "F32", *, is_older: bool = False, architecture: str = ""
) -> dict[str, torch.Tensor]:
    """Writes the model with matrices of this type of blocks, and returns the weights that the file means, by their
    names in a checkpoint. Rows that fill no blocks stay F32. `is_older` as the first files of Qwen3-Next.
    `architecture`: gguf-py's name of another one than the family's.
    """
    family, config = model.config.model_type, model.config
    arch = gguf.MODEL_ARCH[architecture or ARCHITECTURES[family]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    config.allow_global_per_layer_attribute_access = True  # of families whose layers differ
    _add_settings(writer, config)
    _add_vocabulary(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    meant: dict[str, torch.Tensor] = {}
    for stored, members in _stacked(_apart(tensors_of(model)), family in MERGED).items():
        parts = [tensor.numpy() for tensor in members.values()]
        is_experts = _EXPERT.fullmatch(next(iter(members))) is not None
        data = np.stack(parts) if is_experts else np.concatenate(parts)
        if family in LATENTS_APART and "kv_b_proj" in stored:
            meant[stored] = _write_latents(writer, int(stored.split(".")[2]), config, data, kind)
            continue
        if "in_proj_qkvz" in stored and not is_older:
            meant[stored] = _write_split(writer, int(stored.split(".")[2]), config, data, kind)
            continue
        data = data[:, 0] if stored.endswith(("conv.conv.weight", "conv1d.weight")) else data
        data = -np.exp(data) if stored.endswith("A_log") else data
        factors = mamba_factors(config, stored)
        data = mamba_shaped(config, stored, data * factors)
        tiles = _tiles(config, stored) if family in TILED and ".linear_attn." in stored else None
        if tiles is not None:
            data = data[:, tiles] if "out_proj" in stored else data[tiles]
        has_inputs_first = family == "gpt2" and ".h." in stored and data.ndim == 2
        data = np.ascontiguousarray(data.T) if has_inputs_first else data
        is_interleaved = "query_key_value" in stored
        if is_interleaved:  # the file has all queries, all keys, all values
            data = _swapped(data, (config.num_attention_heads, 3))
        data = data[0] if stored.endswith("shared_expert_gate.weight") and kind == "F32" else data
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            stored.split(".")[-2], 0
        )
        is_permuted = family in PERMUTED and heads
        if is_permuted:
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        is_shifted = family in SHIFTED and stored.endswith("norm.weight") and "linear_attn.norm" not in stored
        data = data + np.float32(1.0) if is_shifted else data
        known = _known(known_of_mamba(config, stored))
        name = name_of_gemma4(stored) or names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert name is not None, stored
        name = name if name.endswith((".weight", ".bias", ".scale")) or "ssm_" in name else f"{name}.weight"
        held = _write(writer, name, data, kind)
        if is_permuted:
            held = held.reshape(heads, -1, 2, *held.shape[1:]).swapaxes(1, 2).reshape(held.shape)
        held = held - np.float32(1.0) if is_shifted else held
        held = _swapped(held, (3, config.num_attention_heads)) if is_interleaved else held
        held = held.T if has_inputs_first else held
        if tiles is not None:
            back = np.argsort(tiles)
            held = held[:, back] if "out_proj" in stored else held[back]
        held = np.log(-held) if stored.endswith("A_log") else held / factors
        ends = np.cumsum([len(part) for part in parts])[:-1]
        apart = held if is_experts else np.split(held, ends)
        meant |= {
            member: torch.from_numpy(np.ascontiguousarray(part)).reshape(tensor.shape)
            for (member, tensor), part in zip(members.items(), apart, strict=True)
        }
    _add_rope_factors(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _together(meant)


def _swapped(data: np.ndarray, sides: tuple[int, int]) -> np.ndarray:
    """Rows in (sides[0], sides[1], rest) with the first two swapped."""
    return data.reshape(*sides, -1, *data.shape[1:]).swapaxes(0, 1).reshape(data.shape)


def _tiles(config: Any, stored: str) -> np.ndarray | None:
    """The order of a tensor's rows, or of the output's columns, in which value heads go round the key heads; None
    where it has none.
    """
    if stored.endswith("linear_attn.norm.weight"):
        return None
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    of_keys = 2 * keys * config.linear_key_head_dim if "in_proj_qkv" in stored or "conv1d" in stored else 0
    is_scalar = stored.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"))
    size = 1 if is_scalar else config.linear_value_head_dim
    heads = np.arange(values * size).reshape(keys, values // keys, size).swapaxes(0, 1).reshape(-1)
    return np.concatenate([np.arange(of_keys), of_keys + heads])


def _write_split(writer: Any, layer: int, config: Any, data: np.ndarray, kind: str) -> torch.Tensor:
    """Rows of each key head as those of all queries, keys and values, and those of gates; and what they mean."""
    keys = config.linear_num_key_heads
    sizes = [config.linear_key_head_dim] * 2
    sizes.append(config.linear_num_value_heads // keys * config.linear_value_head_dim)
    parts = np.split(data.reshape(keys, -1, data.shape[1]), np.cumsum(sizes), axis=1)
    *qkv, gates = [part.reshape(-1, data.shape[1]) for part in parts]
    qkv = _write(writer, f"blk.{layer}.attn_qkv.weight", np.concatenate(qkv), kind)
    gates = _write(writer, f"blk.{layer}.attn_gate.weight", gates, kind)
    ends = np.cumsum([keys * size for size in sizes])[:2]
    held = [part.reshape(keys, -1, data.shape[1]) for part in (*np.split(qkv, ends), gates)]
    return torch.from_numpy(np.concatenate(held, axis=1).reshape(data.shape))


def _write_latents(writer: Any, layer: int, config: Any, data: np.ndarray, kind: str) -> torch.Tensor:
    """A matrix for keys and values of latents as two, that for keys turned around; and what they mean."""
    heads = data.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
    keys = _write(writer, f"blk.{layer}.attn_k_b.weight", np.ascontiguousarray(keys.swapaxes(1, 2)), kind)
    values = _write(writer, f"blk.{layer}.attn_v_b.weight", values, kind)
    held = np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(data.shape)
    rounded: torch.Tensor = (
        torch.from_numpy(held) if kind == "F32" else torch.from_numpy(held).bfloat16().float()
    )
    return rounded


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gpt-oss's gate and up, which alternate, in tensors of their own, with the outputs first; Granite's likewise."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if "input_linear" in name:
            parts = zip(("gate", "up"), tensor.chunk(2), strict=True)
            found |= {name.replace("input", part): rows.contiguous() for part, rows in parts}
            continue
        kind = (
            name.rpartition("mlp.experts.")[2]
            if "mlp.experts.gate_up" in name or "experts.down" in name
            else ""
        )
        if kind not in _STACKED:
            found[name] = tensor
            continue
        suffix, prefix = _STACKED[kind], name.removesuffix(kind)
        rows = tensor.transpose(1, 2) if suffix == "weight" else tensor
        parts = {"down": rows} if kind.startswith("down") else {"gate": rows[:, ::2], "up": rows[:, 1::2]}
        found |= {f"{prefix}{part}_proj.{suffix}": each.contiguous() for part, each in parts.items()}
    return found


def _together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same back."""
    found = dict(tensors)
    for name in tensors:
        if "gate_linear" in name:
            both = [found.pop(name.replace("gate_linear", f"{part}_linear")) for part in ("gate", "up")]
            found[name.replace("gate_linear", "input_linear")] = torch.cat(both)
        for suffix, end in (("weight", ""), ("bias", "_bias")):
            if name.endswith(f"mlp.experts.gate_proj.{suffix}"):
                prefix = name.removesuffix(f"gate_proj.{suffix}")
                gate, up, down = (
                    found.pop(f"{prefix}{part}_proj.{suffix}") for part in ("gate", "up", "down")
                )
                rows = torch.stack([gate, up], dim=2).flatten(1, 2)
                found[f"{prefix}gate_up_proj{end}"] = rows if end else rows.transpose(1, 2)
                found[f"{prefix}down_proj{end}"] = down if end else down.transpose(1, 2)
    return found


def _known(name: str) -> str:
    """The name by which gguf-py knows a tensor."""
    name = name.replace("dt_bias", "dt_proj.bias")
    end = name.rpartition(".")[2]
    name = name.removesuffix(end) + _CORRECTIONS.get(end, end)
    return name.removeprefix("model.") if ".feed_forward.experts.w" in name else name


def _stacked(tensors: dict[str, torch.Tensor], is_merged: bool) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by the name of what is stored: experts of a layer under one, in their order, and where `is_merged`
    queries, keys and values.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match, qkv = _EXPERT.fullmatch(name), _QKV.fullmatch(name)
        key = name if match is None else f"{match[1]}{match[3]}"
        key = f"{qkv[1]}qkv_proj.{qkv[2]}" if qkv is not None and is_merged else key
        found.setdefault(key, {})[name] = tensor
    return found


def _write(writer: Any, name: str, data: np.ndarray, kind: str) -> np.ndarray:
    """Adds the tensor; returns its numbers as they are read."""
    stays = (
        *("ffn_gate_inp" in name, name.endswith("bias"), name.endswith("_norm.weight")),
        name.startswith("position_embd"),
        any(part in name for part in ("altup", "laurel", "per_layer_model_proj")),
    )
    is_matrix = data.ndim > 1 and not any(stays)
    quantised = gguf.GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[quantised]
    if kind == "F32" or not is_matrix or data.shape[-1] % block:
        writer.add_tensor(name, np.ascontiguousarray(data, np.float32))
        return data.astype(np.float32)
    if kind.endswith("_K"):  # which the package reads, and does not write
        blocks = random_blocks(KINDS[kind], data.size // block, len(name)).reshape(*data.shape[:-1], -1)
    else:
        blocks = gguf.quants.quantize(data.astype(np.float32), quantised)
    writer.add_tensor(name, blocks, raw_dtype=quantised)
    numbers: np.ndarray = gguf.quants.dequantize(blocks, quantised).reshape(data.shape)
    return numbers


def _add_settings(writer: Any, config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    family = config.model_type
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    # Layers for multi-token prediction, which are not used
    predicting = 1 if family in ("glm4_moe", "qwen3_5_text") else 0
    writer.add_block_count(config.num_hidden_layers + predicting)
    if family == "gemma4_text":
        add_gemma4(writer, config)
        return
    if predicting:
        writer.add_nextn_predict_layers(predicting)
        name = f"blk.{config.num_hidden_layers}.nextn.enorm.weight"
        writer.add_tensor(name, np.ones(config.hidden_size, np.float32))
    inner = {"gpt2": "n_inner", "llama4_text": "intermediate_size_mlp"}.get(family, "intermediate_size")
    if family not in ("qwen3_5_moe_text", "nemotron_h"):
        writer.add_feed_forward_length(getattr(config, inner))
    writer.add_head_count(config.num_attention_heads)
    kv_heads = mamba_kv_heads(config)
    if family.startswith("lfm2"):
        kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in config.layer_types]
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type in LATENTS_APART:
        kv_heads = 1
    writer.add_head_count_kv(kv_heads)
    eps = [
        getattr(config, name, None)
        for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "rms_norm_eps")
    ]
    is_layer_norm = family in (
        "starcoder2",
        "stablelm",
        "phi",
        "gpt2",
        "gpt_neox",
        "nemotron",
        "cohere",
        "cohere2",
    )
    add_eps = writer.add_layer_norm_eps if is_layer_norm else writer.add_layer_norm_rms_eps
    add_eps(next(each for each in eps if each is not None))
    if family == "gpt2":
        return
    add_mamba(writer, config)
    writer.add_rope_freq_base(rope.get("rope_theta", 1e4))
    if "partial_rotary_factor" in rope and not hasattr(config, "kv_lora_rank"):
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if hasattr(config, "kv_lora_rank"):
        _add_latents(writer, config, rope)
    elif family not in ("phi3", "phi", "starcoder2", "stablelm", "gpt_neox", "nemotron", "cohere"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if hasattr(config, "linear_num_key_heads"):
        _add_delta_nets(writer, config)
    if family == "gpt_neox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if family in ("cohere", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    if family == "gemma3n_text":
        add_gemma3n(writer, config)
    if family in ("gemma2", "gemma3_text", "gemma3n_text", "cohere2"):
        writer.add_sliding_window(config.sliding_window)
    if family in ("olmo3", "exaone4") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if family == "olmo3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if family == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
    if family in ("granite", "granitemoehybrid"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if writer.arch != "nemotron_h":
        _add_experts(writer, config)


def _add_delta_nets(writer: Any, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    kinds = [kind == "linear_attention" for kind in config.layer_types]
    if config.model_type == "qwen3_next":
        writer.add_array("qwen3next.attention.recurrent_layers", kinds)
    else:
        writer.add_full_attention_interval(kinds.index(False) + 1)


def _add_latents(writer: Any, config: Any, rope: dict[str, Any]) -> None:
    lengths = (config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if config.model_type in LATENTS_APART:
        writer.add_key_length_mla(lengths[0])
        writer.add_value_length_mla(lengths[1])
        lengths = (config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank)
    writer.add_key_length(lengths[0])
    writer.add_value_length(lengths[1])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add_experts(writer: Any, config: Any) -> None:
    """Keys of a mixture, from those that config.json calls by these names."""
    keys = {
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "n_routed_experts": writer.add_expert_count,
        "moe_num_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_k": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "n_shared_experts": writer.add_expert_shared_count,
        "moe_num_shared_experts": writer.add_expert_shared_count,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "moe_layer_start_index": writer.add_leading_dense_block_count,
        "num_dense_layers": writer.add_leading_dense_block_count,
        "moe_layer_interval": writer.add_interleave_moe_layer_step,
        "routed_scaling_factor": writer.add_expert_weights_scale,
    }
    named = json.loads(config.to_json_string(use_diff=False))
    added = set()
    for key, add in keys.items():
        if named.get(key) is not None and add not in added:
            add(named[key])
            added.add(add)
    if config.model_type in ("gpt_oss", "llama4_text"):
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type == "llama4_text":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if config.model_type == "nemotron_h":
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if config.model_type in ("glm4_moe", "lfm2_moe", *LATENTS_APART):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config.norm_topk_prob)


def _add_vocabulary(writer: Any, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"<{number}>" for number in range(3, size))])
    writer.add_token_types([1] * 3 + [3] * (size - 3))
    writer.add_token_merges(["a b"])


def _add_rope_factors(writer: Any, config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type != "phi3" or "long_factor" not in rope:
        return
    original = config.original_max_position_embeddings
    scale = config.max_position_embeddings / original
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
    for name, key in (("rope_factors_long", "long_factor"), ("rope_factors_short", "short_factor")):
        writer.add_tensor(f"{name}.weight", np.array(rope[key], np.float32))
