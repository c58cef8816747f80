"""Encoders with a head that classifies texts: Bert-, Roberta- and XLMRobertaForSequenceClassification.

The head sees the state of a text's first token. Scores are logits, label by label: what they mean, one label of several
or each by itself, is for their reader to know. One text at a time is scored: pairs of texts, as rerankers take
them, are not.
"""

from __future__ import annotations

import torch

from ..weights import Weights
from .compute_dtype import ComputePolicy
from .config import EncoderConfig
from .encoder import Encoder
from .expanded import expansion_of
from .linear import take_linear
from .parameters import Parameters

# Where each family keeps the two layers of its head; BERT's first one is its pooler's.
_LAYERS = {"bert": ("bert.pooler.dense", "classifier")}
_LAYERS_OF_OTHERS = ("classifier.dense", "classifier.out_proj")


class Classifier(Encoder):
    """Its `embed` gives scores, (N, num_labels) float32, in place of embeddings."""

    def __init__(self, config: EncoderConfig, weights: Weights, policy: ComputePolicy | None = None) -> None:
        """As an `Encoder`; `config` has labels. Raises `ModelError` when the head is missing or does not fit these."""
        super().__init__(config, weights, policy)
        self.num_columns = len(config.labels)
        dense, scores = _LAYERS.get(config.family, _LAYERS_OF_OTHERS)
        stored, expansion = self.computes.stored, expansion_of(self.computes)
        head = Parameters(weights, "", stored, expansion=expansion)
        hidden_size = config.hidden_size
        self._dense = take_linear(head, dense, hidden_size, hidden_size, bias=True)
        self._scores = take_linear(head, scores, hidden_size, self.num_columns, bias=True)
        self._head_gate = head.gate()

    def _finish(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """states (N, L, hidden) → (N, num_labels) fp32; waits for the head."""
        self._head_gate()
        return self._scores(torch.tanh(self._dense(states[:, 0]))).float()
