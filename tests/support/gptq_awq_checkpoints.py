"""Whole checkpoints of GPTQ, AWQ, fp8 and compressed-tensors, of any family, with random numbers, and their meaning."""

from __future__ import annotations

import re
from typing import Any

import torch
from tests.support.quantized import stored_matrix
from tests.support.tiny_models import config_json, tensors_of

_PROJECTION = re.compile(r"(_proj|\.w[123])\.weight$")


def is_projection(name: str) -> bool:
    """True of the matrices that the tools quantise: those of layers but for routers."""
    return ".layers." in name and name.endswith(".weight") and _PROJECTION.search(name) is not None


def foreign_checkpoint(
    model: Any, note: dict[str, Any], *, act_order: bool = False
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A transformers model with its projections as a tool stores them: config.json, the checkpoint's tensors in
    fp32, and the weights that these mean.
    """
    config = {**config_json(model), "quantization_config": note, "torch_dtype": "float16"}
    checkpoint, floats = {}, {}
    for seed, (name, tensor) in enumerate(tensors_of(model).items()):
        if is_projection(name):
            matrix = stored_matrix(*tensor.shape, note, seed=seed, act_order=act_order)
            checkpoint |= matrix.tensors(name.removesuffix(".weight"))
            floats[name] = matrix.weight()
        else:
            checkpoint[name] = tensor.to(torch.float32)
            floats[name] = checkpoint[name]
    return config, checkpoint, floats
