"""Faults of the store server, made by a test for one request at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.support.store_http import Request


@dataclass(frozen=True)
class Fault:
    """How one request is treated. Byte counts are within the answer's body."""

    drop: bool = False  # close the connection without an answer
    status: int | None = None  # answer with this, and with an S3 error document of `code`
    code: str = "InternalError"
    headers: Mapping[str, str] = field(default_factory=dict)  # added to the answer, or replacing its own
    first_byte_s: float = 0.0  # wait so long before answering at all
    rate_bytes_s: float | None = None  # send the body no faster
    cut_after_bytes: int | None = None  # then close the connection
    stall_after_bytes: int | None = None  # then send nothing for `stall_s`
    stall_s: float = 60.0
    shift_range_bytes: int = 0  # answer, honestly labelled, with another range than was asked for
    swap_range_bytes: int = 0  # send the bytes so much further on, labelled as those that were asked for
    ignore_range: bool = False  # answer 200 with the whole object
    flip_bit: int | None = None  # invert the body's bit of this number; bit 8 is the second byte's lowest


FaultHook = Callable[[Request], Fault | None]


def on_requests(faults: Mapping[int, Fault]) -> FaultHook:
    """A hook that treats the n-th object GET (from 0) as given, and leaves all others alone."""
    seen = iter(range(1_000_000))
    return lambda request: faults.get(next(seen)) if request.method == "GET" and request.key else None
