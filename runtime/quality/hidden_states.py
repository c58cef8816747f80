"""Access to the hidden states that enter a decoder's head. For decoders that torch computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..backends.torch.decoder import TorchExecutor
from ..models.decoder import Decoder


class HiddenStatesHead:
    """A wrapper of an executor's norm and head. `states` is its last input, (R, hidden_size)."""

    __slots__ = ("_head_of", "_norm", "states")

    def __init__(self, executor: TorchExecutor) -> None:
        self.states: torch.Tensor
        self._norm = executor.norm
        self._head_of = executor.head_of

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.states = self._norm(x)
        return self._head_of(x)


@contextmanager
def hidden_states_head(decoder: Decoder) -> Iterator[HiddenStatesHead]:
    """Wrap the decoder's head inside the context. The decoder must have no other users."""
    executor = decoder.executor
    assert isinstance(executor, TorchExecutor)
    own = vars(executor)
    # The wrapper of an outer context, if the decoder is compared with itself.
    further_out = own.get("head_of")
    listener = own["head_of"] = HiddenStatesHead(executor)
    try:
        yield listener
    finally:
        del own["head_of"]
        if further_out is not None:
            own["head_of"] = further_out
