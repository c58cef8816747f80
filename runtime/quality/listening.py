"""Hears what a decoder's head is given: the hidden states that nothing else tells."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..models.decoder import Decoder
from ..models.linear import Projection


class ListeningHead:
    """A head in front of another. `states` is what it read last, (R, hidden_size)."""

    __slots__ = ("_head", "states")

    def __init__(self, head: Projection) -> None:
        self.states: torch.Tensor
        self._head = head

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.states = x
        return self._head(x)


@contextmanager
def listening_head(decoder: Decoder) -> Iterator[ListeningHead]:
    """Put one in front of the decoder's head until it is left. Nobody else may be using the decoder."""
    head = decoder.head
    listener = decoder.head = ListeningHead(head)
    try:
        yield listener
    finally:
        decoder.head = head
