"""Faults of the store server that strike at random, as command line flags or in a test: the same for one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.support.store_faults import Fault
from tests.support.store_http import Request

FOR_EVER_S = 3600.0
SWAP_BYTES = 4096  # how far away the other range is
FIRST_TURN = 10  # the request that what comes regularly begins with


@dataclass(frozen=True)
class FaultMix:
    """What goes wrong, and how often. A share is of the range requests. No request has two faults."""

    seed: int = 0
    stall_share: float = 0.0  # fall silent somewhere in the body
    cut_share: float = 0.0  # close the connection somewhere in the body
    late_share: float = 0.0  # answer only after `late_s`
    late_s: float = 2.0
    trickle_share: float = 0.0  # send no more than `trickle_kb_s`
    trickle_kb_s: float = 10.0
    busy_share: float = 0.0  # 503 SlowDown
    flip_share: float = 0.0  # invert a bit
    swap_share: float = 0.0  # send another range's bytes under the right label
    # Invert a bit of one request in this number: regularly, as a part may be wrong only once.
    flip_every: int = 0
    swap_every: int = 0  # the same with another range's bytes
    storm_s: float = 0.0  # answer everything with 503 for so long …
    storm_after: int = 40  # … from this request on
    slow_connections: int = 0  # of those accepted first, never faster than `slow_connection_kb_s`
    slow_connection_kb_s: float = 500.0
    dead_connections: int = 0  # of those accepted first, silent from their second range on


class RandomFaults:
    """A hook for the server. Ranges only: manifests are too few for shares."""

    def __init__(self, mix: FaultMix) -> None:
        self._mix = mix
        self._storm_ends_s: float | None = None
        self._used_connections: set[int] = set()

    def __call__(self, request: Request) -> Fault | None:
        mix = self._mix
        if request.method != "GET" or request.range is None:
            return None
        if self._is_stormy(request):
            return Fault(status=503, code="SlowDown")
        if request.connection <= mix.dead_connections and request.connection in self._used_connections:
            return Fault(first_byte_s=FOR_EVER_S)
        self._used_connections.add(request.connection)
        if request.connection <= mix.slow_connections:
            return Fault(rate_bytes_s=mix.slow_connection_kb_s * 1000)
        return self._drawn(request, request.range[1] - request.range[0])

    def _is_stormy(self, request: Request) -> bool:
        if not self._mix.storm_s or request.serial < self._mix.storm_after:
            return False
        if self._storm_ends_s is None:
            self._storm_ends_s = request.received_s + self._mix.storm_s
        return request.received_s < self._storm_ends_s

    def _drawn(self, request: Request, length: int) -> Fault | None:
        mix = self._mix
        chance = random.Random(f"{mix.seed}/{request.serial}")
        place = chance.randrange(length)
        if _is_turn(request, mix.flip_every):
            return Fault(flip_bit=place * 8 + chance.randrange(8))
        if _is_turn(request, mix.swap_every):
            return Fault(swap_range_bytes=SWAP_BYTES)
        faults = (
            (mix.stall_share, Fault(stall_after_bytes=place, stall_s=FOR_EVER_S)),
            (mix.cut_share, Fault(cut_after_bytes=place)),
            (mix.late_share, Fault(first_byte_s=mix.late_s)),
            (mix.trickle_share, Fault(rate_bytes_s=mix.trickle_kb_s * 1000)),
            (mix.busy_share, Fault(status=503, code="SlowDown")),
            (mix.flip_share, Fault(flip_bit=place * 8 + chance.randrange(8))),
            (mix.swap_share, Fault(swap_range_bytes=SWAP_BYTES)),
        )
        drawn = chance.random()
        for share, fault in faults:
            if drawn < share:
                return fault
            drawn -= share
        return None


def _is_turn(request: Request, every: int) -> bool:
    return bool(every) and request.serial >= FIRST_TURN and (request.serial - FIRST_TURN) % every == 0
