"""Whole checkpoints of GPTQ, AWQ, fp8 and compressed-tensors, of any family, with random numbers, and their meaning."""

from __future__ import annotations

import re
from typing import Any

import torch
from tests.support.quantized import stored_matrix
from tests.support.tiny_models import config_json, tensors_of

_PROJECTION = re.compile(
    r"(_proj(_with_mqa|_qkvz?|_z)?|\.w[123]|\.fc[12]|\.c_fc|\.dense(_h_to_4h|_4h_to_h)?|\.query_key_value|\.c_(attn|proj)|\.(input|output)_linear|\.per_layer_(input_gate|projection)|\.laurel\.linear_(left|right))\.weight$"
)


def is_projection(name: str) -> bool:
    """True of the matrices that the tools quantise: those of layers but for routers."""
    return (
        (".layers." in name or ".h." in name)
        and name.endswith(".weight")
        and _PROJECTION.search(name) is not None
    )


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
            has_inputs_first = ".h." in name
            shape = reversed(tensor.shape) if has_inputs_first else tensor.shape
            matrix = stored_matrix(*shape, note, seed=seed, act_order=act_order)
            checkpoint |= matrix.tensors(name.removesuffix(".weight"))
            floats[name] = matrix.weight().T if has_inputs_first else matrix.weight()
        else:
            checkpoint[name] = tensor.to(torch.float32)
            floats[name] = checkpoint[name]
    return config, checkpoint, floats
