"""The functions that make probabilities, or relevance, of a classifier's logits; config.json says which, or
config_sentence_transformers.json.

Pure. It knows no tokens and no way to compute a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Floats = npt.NDArray[np.float32]


class ScoreFunctions(Struct, frozen=True):
    """Of one classifier."""

    labels_exclude_each_other: bool = True  # unless config.json has several labels apply to one text
    relevance_is_logit: bool = False  # of a cross-encoder whose file says so; else the logit's sigmoid

    @classmethod
    def of(
        cls, config: Mapping[str, Any], sentence: Any = None, *, is_log_odds: bool = False
    ) -> ScoreFunctions:
        """By a config.json as transformers and sentence-transformers write it, else by `sentence`, what
        config_sentence_transformers.json holds. What they do not say has its default. Log odds of two tokens become
        the probability of one, whatever the files say.
        """
        nested = config.get("sentence_transformers")
        named = (nested.get("activation_fn") if isinstance(nested, Mapping) else None) or config.get(
            "sbert_ce_default_activation_function"
        )
        if named is None and isinstance(sentence, Mapping):
            named = sentence.get("activation_fn")
        return cls(
            labels_exclude_each_other=config.get("problem_type") != "multi_label_classification",
            relevance_is_logit=not is_log_odds
            and isinstance(named, str)
            and named.rpartition(".")[2] == "Identity",
        )

    def probabilities(self, logits: Floats) -> Floats:
        """(N, num_labels): a softmax over labels that exclude each other, else the sigmoid of each."""
        if logits.shape[1] == 1 or not self.labels_exclude_each_other:
            return sigmoid(logits)
        wide = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
        probabilities: Floats = (wide / wide.sum(axis=1, keepdims=True)).astype(np.float32)
        return probabilities

    def relevance(self, logits: Floats) -> Floats:
        """(N, 1), of a model with one label."""
        return logits if self.relevance_is_logit else sigmoid(logits)


def sigmoid(logits: Floats) -> Floats:
    """Elementwise; large magnitudes do not overflow."""
    half: Floats = (0.5 * (1.0 + np.tanh(0.5 * logits.astype(np.float64)))).astype(np.float32)
    return half
