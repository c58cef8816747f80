"""Encoders and classifiers computed by transformers, text by text, with the dense layers of
sentence-transformers after the pooling, in fp32.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import transformers

from ...models.encoder import take_dense
from ...models.executor import ComputeDtype
from ...models.fields import Fields
from ...models.pooling_config import SentenceConfig
from ...models.rope_config import MAX_POSITIONS
from ...models.spec import Pooling, activation_of
from ...tensors import DType
from ...weights import Weights
from ..torch.encoder import pool_states
from ..torch.layers import activation
from ..torch.tensors import to_torch
from .decoder import NamedExecutor, limits_of


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


class TransformersEncoder:
    """An `EncoderLike`. One forward pass at a time."""

    device = "cpu"

    def __init__(
        self,
        module: Any,
        settings: Any,
        computes: ComputeDtype,
        sentence: SentenceConfig | None,
        sentence_bert: Any,
        dense_weights: Mapping[str, Weights] | None,
    ) -> None:
        """`sentence` is None for a classifier."""
        limits = Fields({} if sentence_bert is None else sentence_bert, file="sentence_bert_config.json")
        most = limits.optional_integer("max_seq_length", low=1, high=MAX_POSITIONS)
        labels: tuple[str, ...] = ()
        if sentence is None:
            labels = tuple(settings.id2label[index] for index in range(settings.num_labels))
        self.config = limits_of(settings, labels, most=most)
        self.computes = computes
        self.executor = NamedExecutor("transformers", f"transformers/{transformers.__version__}")
        self._module = module
        self._takes_types = "token_type_ids" in inspect.signature(module.forward).parameters
        self._sentence = sentence
        self._layers = None if sentence is None else SentenceLayers(sentence, dense_weights or {})

    @property
    def dtype(self) -> DType:
        return self.computes.dtype

    @torch.inference_mode()
    def embed(
        self, token_lists: Sequence[Sequence[int]], type_lists: Sequence[Sequence[int] | None] | None = None
    ) -> npt.NDArray[np.float32]:
        """(N, columns): embeddings, or a classifier's scores. As `Encoder.embed`."""
        types = type_lists or [None] * len(token_lists)
        rows = [self._row(tokens, own) for tokens, own in zip(token_lists, types, strict=True)]
        joined: npt.NDArray[np.float32] = torch.stack(rows).numpy()
        return joined

    def _row(self, tokens: Sequence[int], types: Sequence[int] | None) -> torch.Tensor:
        given: dict[str, Any] = {"input_ids": torch.tensor([list(tokens)])}
        # Explicit, because some models otherwise infer padding from token ids.
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        if types is not None and self._takes_types:
            given["token_type_ids"] = torch.tensor([list(types)])
        result = self._module(**given)
        if self._sentence is None or self._layers is None:
            scores: torch.Tensor = result.logits[0].float()
            return scores
        states = result.last_hidden_state
        everything = torch.ones(states.shape[:2], dtype=torch.bool)
        row = self._layers(pool_states(states, everything, Pooling(self._sentence.pooling)))
        return (F.normalize(row, dim=-1) if self._sentence.normalize else row)[0]
