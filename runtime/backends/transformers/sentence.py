"""Dense layers of sentence-transformers after the pooling, in fp32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from ...models.encoder_tensors import take_dense
from ...models.pooling_config import SentenceConfig
from ...models.spec import activation_of
from ...weights import Weights
from ..torch.activations import activation
from ..torch.tensors import to_torch


class SentenceLayers:
    """The dense layers in sequence."""

    def __init__(self, sentence: SentenceConfig, weights: Mapping[str, Weights]) -> None:
        """Raises `ModelError` for weights that are missing or do not fit."""
        self._layers = [
            (take_dense(layer, weights), activation_of(layer.activation)) for layer in sentence.dense
        ]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """(N, num_in) fp32 → (N, num_out)."""
        for matrix, name in self._layers:
            bias = None if matrix.bias is None else to_torch(matrix.bias).float()
            rows = F.linear(rows, to_torch(matrix.weight).float(), bias)
            rows = rows if name is None else activation(name)(rows)
        return rows
