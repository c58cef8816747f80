"""The hidden states that a decoder's head is given, which nothing else tells. For decoders that torch computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..backends.torch.decoder import TorchExecutor
from ..models.decoder import Decoder


class ListeningHead:
    """In front of an executor's norm and head. `states` is what the head read last, (R, hidden_size)."""

    __slots__ = ("_head_of", "_norm", "states")

    def __init__(self, executor: TorchExecutor) -> None:
        self.states: torch.Tensor
        self._norm = executor.norm
        self._head_of = executor.head_of

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.states = self._norm(x)
        return self._head_of(x)


@contextmanager
def listening_head(decoder: Decoder) -> Iterator[ListeningHead]:
    """Put one in front of the decoder's head until it is left. Nobody else may be using the decoder."""
    executor = decoder.executor
    assert isinstance(executor, TorchExecutor)
    own = vars(executor)
    further_out = own.get("head_of")  # another one's, where the decoder is compared with itself
    listener = own["head_of"] = ListeningHead(executor)
    try:
        yield listener
    finally:
        del own["head_of"]
        if further_out is not None:
            own["head_of"] = further_out
