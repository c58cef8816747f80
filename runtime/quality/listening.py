"""Hears what a decoder's head is given: the hidden states that nothing else tells, whoever computes the head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..models.decoder import Decoder


class ListeningHead:
    """In front of a decoder's norm and head. `states` is what the head read last, (R, hidden_size)."""

    __slots__ = ("_logits", "_norm", "states")

    def __init__(self, decoder: Decoder) -> None:
        self.states: torch.Tensor
        self._norm: Callable[[torch.Tensor], torch.Tensor] = decoder.norm
        self._logits = decoder.logits

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.states = self._norm(x)
        return self._logits(x)


@contextmanager
def listening_head(decoder: Decoder) -> Iterator[ListeningHead]:
    """Put one in front of the decoder's head until it is left. Nobody else may be using the decoder."""
    own = vars(decoder)
    further_out = own.get("logits")  # another one's, where the decoder is compared with itself
    listener = own["logits"] = ListeningHead(decoder)
    try:
        yield listener
    finally:
        del own["logits"]
        if further_out is not None:
            own["logits"] = further_out
