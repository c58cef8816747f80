"""docs/sizing.md: its tables are what the packer, the KV pool and the renderer of deployments say of published shapes.

The models are files of a real header and no content: sparse, so that eight billion weights take no room.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.support.doc_fragments import ROOT

from teneral.handlers.pool.file import parse_pool
from teneral.infra.render.documents import ModelSize
from teneral.infra.render.limits import LIMITS, needed_bytes
from teneral.loader.format.checkpoint import open_checkpoint
from teneral.loader.sources.open import open_source
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions, plan_quantize
from teneral.runtime.backends.describe import describe_model
from teneral.runtime.synth import SHAPES, tensor_specs

PAGE = ROOT / "docs" / "sizing.md"
CONTEXT = 8192


def decoder(model_type: str, *sizes: int, tied: bool = True, head_dim: int | None = None) -> dict[str, Any]:
    """config.json by its sizes as published: vocabulary, columns, inner columns, layers, heads, heads of keys."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = dict(SHAPES["qwen2.5-0.5b"]) | dict(
        zip((*names, "num_key_value_heads"), sizes, strict=True), model_type=model_type
    )
    config |= {"tie_word_embeddings": tied} | ({"head_dim": head_dim} if head_dim else {})
    return config | {"architectures": [f"{model_type.capitalize()}ForCausalLM"]}


MODELS = {
    "SmolLM2-135M": decoder("llama", 49152, 576, 1536, 30, 9, 3),
    "Qwen2.5-0.5B": SHAPES["qwen2.5-0.5b"],
    "Qwen3-0.6B": SHAPES["qwen3-0.6b"],
    "Llama-3.2-1B": SHAPES["llama-3.2-1b"],
    "Qwen2.5-1.5B": decoder("qwen2", 151936, 1536, 8960, 28, 12, 2),
    "Llama-3.2-3B": decoder("llama", 128256, 3072, 8192, 28, 24, 8),
    "Qwen3-4B": decoder("qwen3", 151936, 2560, 9728, 36, 32, 8, head_dim=128),
    "Qwen2.5-7B": decoder("qwen2", 152064, 3584, 18944, 28, 28, 4, tied=False),
    "Llama-3.1-8B": SHAPES["llama-3.1-8b"],
}


def weights_bytes(config: dict[str, Any], folder: Path) -> dict[str, int]:
    """In memory: as published, and by `pack --quantize`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for spec in tensor_specs(config):
        size = 2 * math.prod(spec.shape)
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": spec.shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    source = open_source(str(folder))
    found = {"bf16": offset}
    for bits in (8, 4):
        plan = plan_quantize(source, open_checkpoint(source), QuantizeOptions(bits))
        replaced = sum(2 * matrix.rows * matrix.columns for matrix in plan.matrices.values())
        pieces = (piece for matrix in plan.matrices.values() for piece in matrix.pieces())
        found[f"int{bits}"] = (
            offset
            - replaced
            + sum({"BF16": 2}.get(dtype, 1) * math.prod(shape) for _, dtype, shape in pieces)
        )
    source.close()
    return found


def instance_bytes(weight_bytes: int, kv_bytes: int) -> int:
    """The sum of `teneral pool render --read-manifests`."""
    text = f'version = 1\n[models.m]\nsource = "s3://b/m"\n[models.m.serve]\nkv_bytes = "{kv_bytes}"\n'
    (model,) = parse_pool(text).models.values()
    return needed_bytes(model, ModelSize(weight_bytes, has_kv=True))


def row(name: str, folder: Path) -> str:
    weights = weights_bytes(MODELS[name], folder)
    token = describe_model(json.dumps(MODELS[name]).encode())["kv_bytes_per_token"]["bf16"]
    cells = [name, *(f"{size / 1e9:.2f}" for size in weights.values()), f"{token * 1000 / 1e6:.0f}"]
    for size in weights.values():
        needed = instance_bytes(size, CONTEXT * token)
        mb = math.ceil(needed / (1 << 20))
        cells.append(f"{mb:,}" if mb <= lambda_mb() else f"<del>{mb:,}</del>")
    return f"| {' | '.join(cells)} |"


def lambda_mb() -> float:
    (limit,) = [limit for limit in LIMITS["lambda"] if limit.key == "instance.memory"]
    return limit.high / (1 << 20)


@pytest.mark.parametrize("name", MODELS)
def test_a_row_of_the_page_is_what_the_product_counts(name: str, tmp_path: Path) -> None:
    assert row(name, tmp_path / "model") in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_shapes_are_those_of_the_models(tmp_path: Path) -> None:
    """By the numbers of weights that their makers publish."""
    published = {"SmolLM2-135M": 134_515_008, "Qwen2.5-1.5B": 1_543_714_304, "Llama-3.2-3B": 3_212_749_824}
    published |= {"Qwen2.5-7B": 7_615_616_512, "Qwen2.5-0.5B": 494_032_768, "Llama-3.1-8B": 8_030_261_248}
    published |= {"Llama-3.2-1B": 1_235_814_400, "Qwen3-0.6B": 596_049_920, "Qwen3-4B": 4_022_468_096}
    counted = {
        name: sum(math.prod(spec.shape) for spec in tensor_specs(config)) for name, config in MODELS.items()
    }
    assert counted == published


def test_the_page_names_lambdas_limit() -> None:
    assert f"{lambda_mb():,.0f} MB" in PAGE.read_text(encoding="utf-8")
