"""Inputs of layers, and streams of x of which a layer computes one, of Gemma 3n and Gemma 4."""

from __future__ import annotations

from msgspec import Struct


class LayerInputs(Struct, frozen=True):
    """Inputs of each layer by itself: x += norm(up(activation(gate(x)) · inputs)) behind its MLP (Gemma 3n's
    "per-layer embeddings").

    They are (norm(projection(x) · hidden_size^-1/2) + rows) / sqrt(2) of a token's first x, and its row of a table of
    `vocab_size` rows, times sqrt(size); of every layer's `size` numbers.
    """

    size: int
    vocab_size: int
    default_row: int = 0  # that of all tokens of images, and of tokens behind the table's
    rounds_factors: bool = False  # hidden_size^-1/2 and 2^-1/2 are rounded to the model's dtype


class Streams(Struct, frozen=True):
    """Streams of x, of which each layer computes one, predicts all before it, and corrects all behind it (AltUp, arXiv
    2301.13310). The layers' inputs are added to all but the first then.
    """

    num: int
    active: int
    has_scales: bool  # the active one is multiplied with a vector before it meets a layer's inputs
