"""A Qwen2 or Llama checkpoint as llama.cpp reads models: `to_gguf.py DIRECTORY TARGET [KIND …]` writes
TARGET/bf16.gguf, and from it KIND.gguf as llama.cpp's own quantiser makes them: q8_0, q4_0, q4_k_m, or q4_0_pure with
every matrix in 4 bits. Without a KIND it writes all but q4_k_m. KIND-imatrix is chosen with an importance matrix,
TARGET/importance.npz: the mean square of each input (K,) fp32 of a matrix, by the checkpoint's names.

The vocabulary is that of tokenizer.json, which llama.cpp's server needs. Vectors are stored in fp32, as llama.cpp
wants them.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch
from gguf import GGMLQuantizationType as StoredAs
from safetensors import safe_open

KINDS = {
    "q8_0": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, False),
    "q4_0": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, False),
    "q4_0_pure": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True),
    "q4_k_m": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, False),
}
WEIGHTED = "-imatrix"
DEFAULT_KINDS = ("q8_0", "q4_0", "q4_0_pure")
SPLITTERS = {"qwen2": "qwen2", "llama": "smollm"}  # llama.cpp's names of the rules that split text
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    target.mkdir(parents=True, exist_ok=True)
    whole = target / "bf16.gguf"
    if not whole.exists():
        unfinished = target / "bf16.unfinished"
        convert(source, unfinished)
        unfinished.rename(whole)
    for name in sys.argv[3:] or DEFAULT_KINDS:
        kind, is_pure = KINDS[name.removesuffix(WEIGHTED)]
        if not (target / f"{name}.gguf").exists():
            unfinished = target / f"{name}.unfinished"
            importance = dict(np.load(target / "importance.npz")) if name.endswith(WEIGHTED) else {}
            quantize(whole, unfinished, kind, is_pure, importance)
            unfinished.rename(target / f"{name}.gguf")


def convert(source: Path, target: Path) -> None:
    """Raises SystemExit for anything but a Qwen2 or Llama model."""
    config = json.loads((source / "config.json").read_text())
    family = config["model_type"]
    if family not in SPLITTERS:
        raise SystemExit(f"only {' and '.join(SPLITTERS)} are converted here, not {family}")
    writer = gguf.GGUFWriter(target, family)
    _describe(writer, config)
    _add_vocabulary(writer, source, config["vocab_size"], SPLITTERS[family])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                stored, tensor = stored_name(name), file.get_tensor(name)
                kind = stored.split(".")[-2]
                if family == "llama" and kind in heads:
                    tensor = in_pairs(tensor, heads[kind])
                _add(writer, stored, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_name(name: str) -> str:
    """The name of the tensor in llama.cpp."""
    if name in _OUTER:
        return _OUTER[name]
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if not found or found[2] not in _INNER:
        raise SystemExit(f"no tensor of these families: {name}")
    return f"blk.{found[1]}.{_INNER[found[2]]}.{found[3]}"


def in_pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of queries or keys in llama.cpp's order for Llama: the two that are turned together are neighbours."""
    halves = tensor.view(num_heads, 2, -1, tensor.shape[1])
    return halves.transpose(1, 2).reshape(tensor.shape)


def quantize(
    source: Path, target: Path, kind: int, is_pure: bool, importance: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    """`importance`, by the checkpoint's names, of some matrices; the others are rounded without."""
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = kind
    settings.pure = is_pure
    settings.nthread = 2
    # Rows are read until one without a name.
    rows = (llama_cpp.llama_model_imatrix_data * (len(importance) + 1))()
    kept = [np.ascontiguousarray(values, np.float32) for values in importance.values()]
    for row, name, values in zip(rows, importance, kept, strict=False):
        row.name, row.size = stored_name(name).encode(), len(values)
        row.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if importance:
        settings.imatrix = rows
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), settings):
        raise SystemExit(f"{source} could not be quantised")


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(llama_cpp.LLAMA_FTYPE_MOSTLY_BF16)


def _add_vocabulary(writer: gguf.GGUFWriter, source: Path, size: int, splitter: str) -> None:
    """The byte-level BPE of tokenizer.json; places without a token are marked as unused."""
    parsed = json.loads((source / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in parsed["added_tokens"]}
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [gguf.TokenType.UNUSED] * size
    for text, number in {**parsed["model"]["vocab"], **special}.items():
        tokens[number] = text
        types[number] = gguf.TokenType.CONTROL if text in special else gguf.TokenType.NORMAL
    merges = parsed["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitter)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_add_bos_token(False)


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() == 1:
        writer.add_tensor(name, tensor.float().numpy())
    else:
        as_bytes = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, as_bytes, raw_dtype=StoredAs.BF16)


if __name__ == "__main__":
    main()
