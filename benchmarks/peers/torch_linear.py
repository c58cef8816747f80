"""Linear layers as torch multiplies them in other layouts and precisions, in place of a model's own.

    onednn    bf16, in the layout that oneDNN chooses
    int8      8 bits and a scale a row, inputs rounded to 8 bits as well: torch's dynamic quantisation
    int4      4 bits and a scale and a zero for each 32 of a row

It runs in the peers' environment and knows nothing of Teneral.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

GROUP = 32


def converted(model: Any, kind: str) -> tuple[Any, int]:
    """The model with such layers, and how many bytes of weights one token reads in them."""
    num_bytes = 0
    if kind == "int8":
        warnings.simplefilter("ignore", DeprecationWarning)
        elements = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Linear))
        return torch.ao.quantization.quantize_dynamic(model.float(), {nn.Linear}, torch.qint8), elements
    make: Callable[[nn.Linear], Any] = {"onednn": OneDnnLinear, "int4": Int4Linear}[kind]
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear):
                replacement = make(layer)
                setattr(parent, name, replacement)
                num_bytes += replacement.num_bytes
    return model, num_bytes


class OneDnnLinear(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), 1)
        self._bias = None if layer.bias is None else layer.bias.detach()
        self.num_bytes = layer.weight.nbytes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.contiguous(), self._weight, self._bias, "none", [], ""
        )
        return result


class Int4Linear(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        groups = layer.weight.detach().float().unflatten(1, (-1, GROUP))
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale = ((high - low) / 15).clamp(min=1e-6)
        levels = ((groups - low) / scale).round().clamp(0, 15).int().flatten(1)
        self._levels = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
        scales = torch.cat([scale, low + 8 * scale], 2).transpose(0, 1)
        self._scales = scales.contiguous().to(torch.bfloat16)
        self._bias = None if layer.bias is None else layer.bias.detach()
        self._num_outputs = layer.out_features
        self.num_bytes = levels.numel() // 2 + self._scales.nbytes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.flatten(0, -2).contiguous()
        result = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self._levels, GROUP, self._scales)
        if self._bias is not None:
            result = result + self._bias
        return result.unflatten(0, rows.shape[:-1])
