"""GGUF files byte by byte: sound ones, and ones with any field replaced; and tiny models as llama.cpp's converter has
them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from teneral.loader.format.gguf.blocks import BlockType

U32, I32, F32, BOOL, TEXT, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
PIECES = ("a", "b", "c", "ab", "<|end|>", "<|start|>")
KINDS = (1, 1, 1, 1, 3, 3)
HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 64, 2, 1, 96, 1


class RawTensor(NamedTuple):
    """`sizes` as the file has them: neighbours first. `offset` None is where it belongs."""

    name: str
    sizes: tuple[int, ...]
    type: int
    data: bytes
    offset: int | None = None


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(given: Any) -> bytes:
    """With its type. Bytes are taken as they are, type included."""
    if isinstance(given, bytes):
        return given
    if isinstance(given, bool):
        return struct.pack("<IB", BOOL, given)
    if isinstance(given, int):
        return struct.pack("<II", U32, given)
    if isinstance(given, float):
        return struct.pack("<If", F32, given)
    if isinstance(given, str):
        return struct.pack("<I", TEXT) + text(given)
    if all(isinstance(each, str) for each in given):
        return struct.pack("<IIQ", ARRAY, TEXT, len(given)) + b"".join(map(text, given))
    kind, code = (F32, "f") if isinstance(given[0], float) else (I32, "i")
    return struct.pack("<IIQ", ARRAY, kind, len(given)) + struct.pack(f"<{len(given)}{code}", *given)


def gguf_file(
    metadata: Mapping[str, Any],
    tensors: Sequence[RawTensor] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
    tail: bytes = b"",
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(metadata) if num_keys is None else num_keys,
    )
    head = magic + struct.pack("<IQQ", version, *counts)
    head += b"".join(text(key) + value(given) for key, given in metadata.items())
    content = b""
    for tensor in tensors:
        offset = len(content) if tensor.offset is None else tensor.offset
        sizes = struct.pack(f"<I{len(tensor.sizes)}Q", len(tensor.sizes), *tensor.sizes)
        head += text(tensor.name) + sizes + struct.pack("<IQ", tensor.type, offset)
        content += tensor.data + bytes(-len(tensor.data) % alignment)
    return head + bytes(-len(head) % alignment) + content + tail if tensors else head + tail


def metadata(architecture: str = "llama", **more: Any) -> dict[str, Any]:
    """Of a tiny model. Keys of `more` have `__` for a dot; None takes one out."""
    own = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    found: dict[str, Any] = {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": given for key, given in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 5,
        "tokenizer.ggml.eos_token_id": 4,
    }
    found |= {key.replace("__", "."): given for key, given in more.items()}
    return {key: given for key, given in found.items() if given is not None}


def shapes(architecture: str = "llama", vocab_size: int = len(PIECES)) -> dict[str, tuple[int, ...]]:
    """By llama.cpp's names, as numpy has them."""
    head_dim = HIDDEN // HEADS
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab_size, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        sizes = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV_HEADS * head_dim, HIDDEN),
            "attn_v": (KV_HEADS * head_dim, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FEED_FORWARD, HIDDEN),
            "ffn_up": (FEED_FORWARD, HIDDEN),
            "ffn_down": (HIDDEN, FEED_FORWARD),
        }
        found |= {f"blk.{layer}.{kind}.weight": shape for kind, shape in sizes.items()}
        if architecture == "qwen2":
            found |= {f"blk.{layer}.{kind}.bias": sizes[kind][:1] for kind in ("attn_q", "attn_k", "attn_v")}
    return found


def float_tensors(
    architecture: str = "llama", seed: int = 0, *, vocab_size: int = len(PIECES)
) -> list[RawTensor]:
    """All tensors of a tiny model, in F32."""
    rng = np.random.default_rng(seed)
    return [
        RawTensor(name, tuple(reversed(shape)), 0, (rng.standard_normal(shape) * 0.1).astype("<f4").tobytes())
        for name, shape in shapes(architecture, vocab_size).items()
    ]


SCALE_PLACES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
}


def random_blocks(kind: BlockType, count: int, seed: int = 0) -> np.ndarray:
    """(count, block bytes): any bits, but for scales, which are numbers."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    if kind.dtype is not None:
        values = (rng.standard_normal(count) * 0.1).astype("<f4")
        if kind.dtype == "BF16":
            return (values.view("<u4") >> 16).astype("<u2").view(np.uint8).reshape(count, 2)
        return values.astype({"F32": "<f4", "F16": "<f2"}[kind.dtype]).view(np.uint8).reshape(count, -1)
    if kind.name == "MXFP4":
        blocks[:, 0] = rng.integers(0, 255, count)  # 255 is NaN, which gguf-py takes for a number
        return blocks
    for at in SCALE_PLACES.get(kind.name, (0,)):
        blocks[:, at : at + 2] = (
            (rng.standard_normal(count) * 0.01).astype("<f2").view(np.uint8).reshape(count, 2)
        )
    return blocks
