"""Checkpoints of gpt-oss with random experts in MXFP4, all of a layer in one tensor, as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.support.tiny_models import config_json, tensors_of, tiny_model, with_tensors
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

EXPERTS = ("gate_up_proj", "down_proj")


def checkpoint(seed: int = 0, **overrides: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor], Any]:
    """config.json, tensors in bf16 with random blocks, and transformers' model of their numbers in fp32. `overrides`
    are of config.json.
    """
    model = tiny_model("gpt_oss", seed=seed, **overrides)
    generator = torch.Generator().manual_seed(seed)
    plain = {name: tensor.bfloat16() for name, tensor in tensors_of(model).items()}
    floats = {name: tensor.float() for name, tensor in plain.items()}
    for name in [name for name in plain if name.endswith(EXPERTS)]:
        num, num_in, num_out = plain.pop(name).shape
        shape = (num, num_out, num_in // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 124, shape[:-1], generator=generator, dtype=torch.uint8)
        plain |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        floats[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    config = {
        **config_json(model),
        "quantization_config": {"quant_method": "mxfp4"},
        "torch_dtype": "bfloat16",
    }
    return config, plain, with_tensors(model, floats)


def saved(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Write it, and return the folder."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
