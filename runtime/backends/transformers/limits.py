"""Bounds of a model that transformers computes, from its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MOST_TOKENS = 1 << 20
_UNSTATED_TOKENS = 2_048  # of models whose settings name no length
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


@dataclass(frozen=True, slots=True)
class Limits:
    """The fields of the engine's `DecoderLimits` and `EncoderLimits`."""

    vocab_size: int
    max_context: int
    labels: tuple[str, ...] = ()

    @property
    def max_tokens(self) -> int:
        return self.max_context


def limits_of(settings: Any, labels: tuple[str, ...] = (), *, most: int | None = None) -> Limits:
    """`settings` is a PretrainedConfig; `most` bounds the tokens further."""
    stated = (getattr(settings, key, None) for key in _LENGTH_KEYS)
    length = next((value for value in stated if isinstance(value, int) and value > 0), _UNSTATED_TOKENS)
    offset = 0
    # Its positions begin after the padding's.
    if "roberta" in str(getattr(settings, "model_type", "")):
        offset = int(settings.pad_token_id or 0) + 1
    return Limits(int(settings.vocab_size), min(length - offset, most or _MOST_TOKENS, _MOST_TOKENS), labels)
