"""transformers' models as GGUF files: written by gguf-py, with its names of tensors and keys.

Differences of an architecture (rows of heads in pairs, norms plus 1, experts in one tensor) are made here, from the
converter's documentation, without the code that is tested.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tests.support.gguf_files import random_blocks
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
}
PERMUTED = ("llama", "mistral", "mixtral", "granite", "smollm3")
_STACKED = {
    "gate_up_proj": "weight",
    "gate_up_proj_bias": "bias",
    "down_proj": "weight",
    "down_proj_bias": "bias",
}
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(.*)")


def write_gguf(path: Path, model: Any, kind: str = "F32") -> dict[str, torch.Tensor]:
    """Writes the model with matrices of this type of blocks, and returns the weights that the file means, by their
    names in a checkpoint. Rows that fill no blocks stay F32.
    """
    family, config = model.config.model_type, model.config
    arch = gguf.MODEL_ARCH[ARCHITECTURES[family]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _add_settings(writer, config)
    _add_vocabulary(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    meant: dict[str, torch.Tensor] = {}
    for stored, members in _stacked(_apart(tensors_of(model))).items():
        data = np.stack([tensor.numpy() for tensor in members.values()])
        data = data if _EXPERT.fullmatch(next(iter(members))) else data[0]
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            stored.split(".")[-2], 0
        )
        is_permuted = family in PERMUTED and heads
        if is_permuted:
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        if family.startswith("gemma") and stored.endswith("norm.weight"):
            data = data + np.float32(1.0)
        name = names.get_name(stored, try_suffixes=(".weight", ".bias"))
        assert name is not None, stored
        name = f"{name}.weight" if stored.endswith("sinks") else name
        held = _write(writer, name, data, kind)
        if is_permuted:
            held = held.reshape(heads, -1, 2, *held.shape[1:]).swapaxes(1, 2).reshape(held.shape)
        if family.startswith("gemma") and stored.endswith("norm.weight"):
            held = held - np.float32(1.0)
        parts = held if len(members) > 1 or _EXPERT.fullmatch(next(iter(members))) else [held]
        meant |= {
            member: torch.from_numpy(np.ascontiguousarray(part))
            for member, part in zip(members, parts, strict=True)
        }
    _add_rope_factors(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _together(meant)


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gpt-oss's gate and up, which alternate, in tensors of their own, with the outputs first."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
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


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by the name that gguf-py knows; experts of a layer under one, in their order."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        key = name if match is None else f"{match[1]}{match[3]}"
        found.setdefault(key, {})[name] = tensor
    return found


def _write(writer: Any, name: str, data: np.ndarray, kind: str) -> np.ndarray:
    """Adds the tensor; returns its numbers as they are read."""
    is_matrix = data.ndim > 1 and "ffn_gate_inp" not in name and not name.endswith("bias")
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
    rope = config.rope_parameters or {}
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    family = config.model_type
    if family != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if family in ("gemma2", "gemma3_text"):
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
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if family == "phi3":
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
    if family == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family in ("mixtral", "qwen3_moe", "gpt_oss"):
        writer.add_expert_count(config.num_experts if family == "qwen3_moe" else config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if family == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if family == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_vocabulary(writer: Any, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"<{number}>" for number in range(3, size))])
    writer.add_token_types([1] * 3 + [3] * (size - 3))
    writer.add_token_merges(["a b"])


def _add_rope_factors(writer: Any, config: Any) -> None:
    rope = config.rope_parameters or {}
    if config.model_type != "phi3" or "long_factor" not in rope:
        return
    original = config.original_max_position_embeddings
    scale = config.max_position_embeddings / original
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
    for name, key in (("rope_factors_long", "long_factor"), ("rope_factors_short", "short_factor")):
        writer.add_tensor(f"{name}.weight", np.array(rope[key], np.float32))
