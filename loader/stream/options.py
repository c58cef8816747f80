"""How a load goes about it, as one frozen value."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..errors import UsageError

MIB = 1024 * 1024


class Order(enum.StrEnum):
    """Which weights come first."""

    EXACT = "exact"  # group by group, draft parts and then refine parts: the first exact token soonest
    DRAFT_FIRST = "draft-first"  # all draft parts, then all refine parts: the first draft token soonest


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load. Raises `UsageError` for values that cannot be meant."""

    connections: int = 8  # fetch threads, each with one request on its way
    staging_bytes: int = 128 * MIB  # memory beside the weights; at least one part's, whatever is said here
    range_bytes: int = 4 * MIB  # most that one request asks for
    decode_threads: int | None = None  # default: as many as this process may use CPUs
    order: Order = Order.EXACT
    available_bytes: int | None = None  # memory that may be taken; default: what the system says

    def __post_init__(self) -> None:
        limits = {
            "connections": (self.connections, 1, 256),
            "staging_bytes": (self.staging_bytes, 0, 1 << 40),
            "range_bytes": (self.range_bytes, 1, 1 << 30),
            "decode_threads": (self.decode_threads, 1, 256),
        }
        for key, (value, least, most) in limits.items():
            if value is not None and not least <= value <= most:
                raise UsageError(f"{key} must be between {least} and {most}, not {value}", key=key)
