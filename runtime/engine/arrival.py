"""The engine's view of a decoder, and of weights that are still arriving."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ...loader.format.manifest import Tier
from ...loader.load.options import Order
from ...loader.load.policy import WEIGHT_BYTES_PER_S
from ..kv.storage import KVKind
from ..step.backend import OnLayer
from ..step.batch import StepBatch

if TYPE_CHECKING:
    from ...loader.format.manifest import Manifest
    from ...loader.load.base import AnyLoad


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


class Arrival(Protocol):
    """The arrival of weights. Cheap calls, from any thread."""

    def is_exact(self) -> bool:
        """True if all weights are exact."""

    def holds(self, tier: Tier) -> bool:
        """True if all weights have at least this tier."""

    def order(self) -> Order:
        """True if the whole draft comes before the refining bytes; AUTO while undecided."""

    def left_s(self) -> float:
        """The measured estimate of the time until all weights are exact; infinity without
        measurements.
        """

    def token_s(self) -> float:
        """The time of a token, estimated from the model's size."""

    def refine_wait_s(self) -> float:
        """The total time that computing has waited for weights being refined."""


def token_s(manifest: Manifest) -> float:
    """The time of a token, estimated from the model's size."""
    return manifest.weight_bytes / WEIGHT_BYTES_PER_S


class LoadArrival:
    """The arrival of a load's weights."""

    def __init__(self, load: AnyLoad) -> None:
        self._load = load

    def is_exact(self) -> bool:
        return self.holds(Tier.REFINE)

    def holds(self, tier: Tier) -> bool:
        return all(self._load.is_ready(group.index, tier) for group in self._load.manifest.groups)

    def order(self) -> Order:
        return self._load.order

    def left_s(self) -> float:
        return self._load.left_s()

    def token_s(self) -> float:
        return token_s(self._load.manifest)

    def refine_wait_s(self) -> float:
        return self._load.refine_wait_s


class BasedArrival(LoadArrival):
    """The arrival of a fine-tune's weights while its base drafts: the draft is there from the
    beginning.
    """

    def holds(self, tier: Tier) -> bool:
        return tier is not Tier.REFINE or super().holds(tier)

    def order(self) -> Order:
        return Order.DRAFT_FIRST
