"""The options of a load, as one frozen value."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ..errors import UsageError

MIB = 1024 * 1024


class Order(enum.StrEnum):
    """The weights that come first."""

    # Group by group, draft parts and then refine parts: the first exact token soonest.
    EXACT = "exact"
    # All draft parts, then all refine parts: the first draft token soonest.
    DRAFT_FIRST = "draft-first"
    AUTO = "auto"  # one or the other, by what the link turns out to give (`plan.py`)


class _Values(NamedTuple):
    # Most fetch threads, each with one request on its way; fewer where these do.
    connections: int = 32
    staging_bytes: int | None = None  # memory for what is on its way; default: see `staging.py`
    reserved_bytes: int = 0  # memory that must be left when the weights are there
    # Memory of the processes other than the weights; what they have taken already counts.
    serving_bytes: int = 0
    range_bytes: int = 16 * MIB  # most that one request asks for
    decode_threads: int | None = None  # default: as many as this process may use CPUs
    order: Order = Order.EXACT
    ready_s: float = 0.0  # for AUTO: when the weights can first be used, since the load began
    # For AUTO: clients get tokens of the draft, and not only what was confirmed.
    sends_drafts: bool = False
    # Rows of the embeddings, and experts, are asked for (`want_parts`): the rest of them comes last.
    on_demand: bool = False
    weights_bytes: int | None = None  # most memory for weights (`PagedLoad`); default: what they take
    available_bytes: int | None = None  # memory that may be taken; default: what the system says
    cache_dir: str | None = None  # where this node keeps parts for the next load; default: nowhere
    cache_bytes: int = 20 * 1024 * MIB  # most that is kept there
    verify_files: bool = True  # plain files are compared with the digests that their store states


class LoadOptions(_Values):
    """The options of a load. Raises `UsageError` for invalid values."""

    __slots__ = ()

    if not TYPE_CHECKING:  # which has the signature from the fields

        def __new__(cls, *values: Any, **named: Any) -> Self:
            self = super().__new__(cls, *values, **named)
            self._check()
            return self

    def _check(self) -> None:
        limits = {
            "connections": (self.connections, 1, 256),
            "staging_bytes": (self.staging_bytes, 0, 1 << 40),
            "reserved_bytes": (self.reserved_bytes, 0, 1 << 50),
            "serving_bytes": (self.serving_bytes, 0, 1 << 50),
            "range_bytes": (self.range_bytes, 1, 1 << 30),
            "decode_threads": (self.decode_threads, 1, 256),
            "cache_bytes": (self.cache_bytes, 1, 1 << 50),
            "weights_bytes": (self.weights_bytes, 1, 1 << 50),
        }
        for key, (value, least, most) in limits.items():
            if value is not None and not least <= value <= most:
                raise UsageError(f"{key} must be between {least} and {most}, not {value}", key=key)
