"""The protocol of a decoder, as the engine uses it."""

from __future__ import annotations

from typing import Any, Protocol

from ..kv.kinds import KVKind
from ..step.backend import OnLayer
from ..step.batch import StepBatch


class DecoderLimits(Protocol):
    """The bounds of a model's sequences."""

    @property
    def max_context(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


class DecoderLike(Protocol):
    """The part of a decoder that is needed here."""

    @property
    def config(self) -> DecoderLimits: ...

    def kv_block_bytes(self, block_size: int, *, kind: KVKind = ...) -> int:
        """The bytes of one block of `block_size` tokens in the storage of `new_kv`."""

    def new_kv(self, num_blocks: int, block_size: int, *, kind: KVKind = ...) -> Any:
        """Storage of keys and values for `forward`; its memory is not touched before it is written.

        The engine itself needs `KVPool.copy_tokens`, and copies of whole blocks if these are
        spilled or come from snapshots.
        """

    def forward(self, batch: StepBatch, kv: Any, *, on_layer: OnLayer | None = None) -> Any:
        """Logits (R, vocab) float32 of the batch's `logit_rows`; R may be 0. May wait for weights."""
