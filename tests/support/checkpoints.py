"""Model directories made in memory; their safetensors are spelled out here, without the loader's writer."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from tests.support.memory_store import MemoryStore

from teneral.loader.format.manifest import DTYPE_BITS

Content = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes
Contents = dict[str, Content]


def raw_file(
    header: Mapping[str, Any] | bytes, data: bytes = b"", *, header_bytes: int | None = None
) -> bytes:
    """A file with any header, however wrong; `header_bytes` is what its prefix claims."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + data


def safetensors_file(contents: Mapping[str, Content], metadata: Mapping[str, str] | None = None) -> bytes:
    """A right file with the tensors' bytes in the given order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape, content) in contents.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + len(content)],
        }
        position += len(content)
    return raw_file(header, b"".join(content for _, _, content in contents.values()))


def random_content(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Content:
    """Normally distributed where that is bf16, fp16 or fp32, as weights are; any bits elsewhere."""
    rng = np.random.default_rng(seed)
    size_bytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if dtype in ("BF16", "F16", "F32"):
        values = rng.normal(0, 0.02, math.prod(shape)).astype("<f4")
        if dtype == "F32":
            data = values.tobytes()
        elif dtype == "F16":
            data = values.astype("<f2").tobytes()
        else:
            data = (values.view("<u4") >> 16).astype("<u2").tobytes()
    else:
        data = rng.integers(0, 2 if dtype == "BOOL" else 256, size_bytes, dtype=np.uint8).tobytes()
    assert len(data) == size_bytes
    return dtype, shape, data


def llama_contents(
    *, num_layers: int = 2, hidden: int = 64, vocabulary: int = 300, dtype: str = "BF16", tied: bool = False
) -> Contents:
    """Tensors of a Llama-type model under Hugging Face's names, in the order in which it writes them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, 2 * hidden)
        shapes[prefix + "mlp.gate_proj.weight"] = (2 * hidden, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (2 * hidden, hidden)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "self_attn.k_proj.weight"] = (hidden // 2, hidden)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[prefix + "self_attn.q_proj.weight"] = (hidden, hidden)
        shapes[prefix + "self_attn.v_proj.weight"] = (hidden // 2, hidden)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocabulary, hidden)
    contents = {name: random_content(dtype, shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    if tied:
        contents["lm_head.weight"] = contents["model.embed_tokens.weight"]
    return contents


SMALL_FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"version": "1.0"}',
    "1_Pooling/config.json": b"{}",
}


def model_objects(
    contents: Mapping[str, Content], *, num_shards: int = 1, metadata: Mapping[str, str] | None = None
) -> dict[str, bytes]:
    """A whole model directory: one file, or shards with an index, and some small files."""
    objects = dict(SMALL_FILES)
    if num_shards == 1:
        objects["model.safetensors"] = safetensors_file(contents, metadata)
        return objects
    names = list(contents)
    weight_map: dict[str, str] = {}
    for number in range(num_shards):
        file_name = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        members = names[number::num_shards]
        objects[file_name] = safetensors_file({name: contents[name] for name in members}, metadata)
        weight_map.update(dict.fromkeys(members, file_name))
    objects["model.safetensors.index.json"] = index_file(weight_map)
    return objects


def index_file(weight_map: Mapping[str, Any]) -> bytes:
    return json.dumps({"metadata": {"total_size": 1.0}, "weight_map": dict(weight_map)}).encode()


def model_store(contents: Mapping[str, Content], **options: Any) -> MemoryStore:
    return MemoryStore(model_objects(contents, **options))


def read_back(files: Iterable[bytes]) -> Contents:
    """All tensors of some safetensors files, by a reader of the tests' own."""
    contents: Contents = {}
    for data in files:
        (header_bytes,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + header_bytes])
        body = data[8 + header_bytes :]
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                assert name not in contents
                contents[name] = (entry["dtype"], tuple(entry["shape"]), body[begin:end])
    return contents
