"""Packing a decoder's weights beside the serving (`models/packed.py`): where it pays, as far as memory allows.

The copies are made one product after the other, by a thread of low priority, and are handed to the decoder to be taken
between two of its steps. The weights themselves stay where they are, and must be exact by now.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...loader.memory import MIB, available_bytes
from ...loader.timeline import Timeline
from ..models.linear import Linear
from ..models.packed import CannotPackError, PackedWeight, can_pack, packed_bytes
from .choice import Figures, LinearBackend, Times, covers, kernel_sizes, packed_sizes, table_of
from .kinds import kind_of, kind_of_layer, linears_of, products_of, projections_of

if TYPE_CHECKING:
    from ..models.decoder import Decoder

RESERVE_BYTES = 256 * MIB  # that stay free beside the copies, and beside what others were promised
NICENESS = 10
NUM_SAMPLES = 4  # of a kind, one after the other, as a step reads them: one alone would stay in a cache
CLOSED = "the model was closed before"
MIN_TRIALS, MAX_TRIALS, TRIALS_S = 3, 24, 0.1
BOTH = (LinearBackend.TORCH, LinearBackend.ONEDNN)

logger = logging.getLogger(__name__)


class Packing:
    """The packed copies of one decoder's weights, while they are being made. For one thread."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        limit_bytes: int,
        reserved_bytes: int = 0,
        free_bytes: Callable[[], int | None] = available_bytes,
    ) -> None:
        """All copies together take `limit_bytes` at most, and leave `reserved_bytes` and RESERVE_BYTES of what the
        container has free.
        """
        self.products = [each for each in products_of(decoder) if can_pack(each[1].weight)]
        self.sizes = {kind: sizes for kind, _, sizes in self.products}
        self.num_bytes = 0
        self._copies: dict[int, PackedWeight] = {}  # by the number of the product
        self._limit_bytes = limit_bytes
        self._reserved_bytes = reserved_bytes + RESERVE_BYTES
        self._free_bytes = free_bytes

    def copy(self, number: int) -> PackedWeight | None:
        """That of a product, by its number; None where it does not fit. Raises CannotPackError."""
        if number in self._copies:
            return self._copies[number]
        weight = self.products[number][1].weight
        size_bytes, free_bytes = packed_bytes(weight), self._free_bytes()
        if self.num_bytes + size_bytes > self._limit_bytes:
            return None
        if free_bytes is not None and free_bytes - self._reserved_bytes < size_bytes:
            return None
        self._copies[number] = copy = PackedWeight(weight)
        self.num_bytes += size_bytes
        return copy

    def samples(self, kind: str) -> list[tuple[Linear, PackedWeight]]:
        """Some products of a kind, with their copies; none where not one fits."""
        numbers = [number for number, product in enumerate(self.products) if product[0] == kind]
        copies = ((self.products[number][1], self.copy(number)) for number in numbers[:NUM_SAMPLES])
        return [(linear, copy) for linear, copy in copies if copy is not None]

    def forget(self, kind: str) -> None:
        """Give the copies of a kind up."""
        for number, (of_kind, linear, _) in enumerate(self.products):
            if of_kind == kind and self._copies.pop(number, None) is not None:
                self.num_bytes -= packed_bytes(linear.weight)

    @torch.inference_mode()
    def measure(self, kind: str, *, trials_s: float = TRIALS_S) -> dict[int, dict[LinearBackend, int]]:
        """What a product of this kind takes, by number of rows: with either backend the best of some trials, in turns,
        for about so long. Empty where no copy fits.
        """
        samples = self.samples(kind)
        if not samples:
            return {}
        times_ns = {}
        for num_rows in self.sizes[kind]:
            x = torch.randn(num_rows, samples[0][0].weight.shape[1]).to(samples[0][0].weight.dtype)
            best = dict.fromkeys(BOTH, 1 << 62)
            end_s = time.perf_counter() + trials_s
            for trial in range(-1, MAX_TRIALS):  # the first one is for waking threads and filling caches
                linear, copy = samples[trial % len(samples)]
                in_torch = partial(torch.nn.functional.linear, x, linear.weight, linear.bias)
                for backend, compute in zip(BOTH, (in_torch, partial(copy, x, linear.bias)), strict=True):
                    start_ns = time.perf_counter_ns()
                    compute()
                    if trial >= 0:
                        best[backend] = min(best[backend], max(1, time.perf_counter_ns() - start_ns))
                if trial + 1 >= MIN_TRIALS and time.perf_counter() > end_s:
                    break
            times_ns[num_rows] = best
        return times_ns


def prepack(
    decoder: Decoder,
    *,
    limit_bytes: int,
    reserved_bytes: int = 0,
    layers: Figures | None = None,
    kept: Callable[[], Figures] = dict,
    timeline: Timeline,
    ended: threading.Event,
) -> None:
    """Gives the decoder packed weights where these are faster and there is room; the timeline says what came of it.

    Blocks for as long as it takes, which `ended` cuts short, and leaves this thread with a low priority. `layers` is
    what is known of the decoder's compiled kernels, if it has any: where they are the faster ones no copies are needed,
    and they step back where these are faster. `kept` is what was measured before, asked for once.
    """
    with timeline.span("process", "pack weights") as said:
        _stand_back()
        packing = Packing(decoder, limit_bytes=limit_bytes, reserved_bytes=reserved_bytes)
        if not packing.products:
            said["outcome"] = "there is nothing that could be packed here"
            return
        try:
            said["outcome"] = _prepack(decoder, packing, layers or {}, kept(), said, ended)
        except CannotPackError as error:
            said["outcome"] = str(error)
        except Exception as error:  # of a torch that we may not know, which can do it all as it did before
            logger.exception("weights could not be packed; they are used as they lie")
            said["outcome"] = f"{type(error).__name__}: {error}"[:200]


def _prepack(
    decoder: Decoder,
    packing: Packing,
    layers: Figures,
    kept: Figures,
    said: dict[str, object],
    ended: threading.Event,
) -> str:
    layer = kind_of_layer(decoder.layers[0])
    parts = [kind_of(part) for each in projections_of(decoder.layers[0]) for part in linears_of(each)]
    figures = dict(layers)
    for kind, sizes in packing.sizes.items():
        if ended.is_set():
            return CLOSED
        if set(sizes) <= kernel_sizes(layers, layer):
            said[kind] = "compiled kernels compute it"
            continue
        is_kept = covers(kept, kind, sizes, BOTH)
        figures[kind] = kept[kind] if is_kept else packing.measure(kind)
        said[kind] = f"{_told(figures[kind])} ({'kept beside the model' if is_kept else 'measured'})"
    kernels_at = kernel_sizes(figures, layer, parts, packed_share=1.0)
    tables = {}
    for kind in packing.sizes:
        sizes_here = packed_sizes(figures, kind)
        if sizes_here - kernels_at and _agrees(packing, kind, sizes_here):
            tables[kind] = table_of(sizes_here)
        else:
            packing.forget(kind)
    wanted = [number for number, product in enumerate(packing.products) if product[0] in tables]
    packed = list(_pack(decoder, packing, wanted, tables, ended))
    said["packed"] = f"{len(packed)} of {len(packing.products)} products"
    said["bytes"] = packing.num_bytes
    if ended.is_set():
        return CLOSED
    if decoder.kernels is not None and packed:
        own = [kind for kind in parts if kind in tables]
        decoder.kernels.keep_to(kernel_sizes(figures, layer, own, packed_share=len(packed) / len(wanted)))
    if len(packed) < len(wanted):
        return "used where they are faster, as far as there is room"
    return "used where they are faster" if packed else "they would gain nothing here, or do not fit"


def _pack(
    decoder: Decoder,
    packing: Packing,
    numbers: Sequence[int],
    tables: Mapping[str, bytes],
    ended: threading.Event,
) -> Iterator[int]:
    """Make copies of these products and hand them over; the numbers of those that fit."""
    for number in numbers:
        if ended.is_set():
            return
        kind, linear, _ = packing.products[number]
        copy = packing.copy(number)
        if copy is not None:
            copy.use_for(tables[kind])
            decoder.between_steps(partial(setattr, linear, "packed", copy))
            yield number


def _agrees(packing: Packing, kind: str, sizes: Iterable[int]) -> bool:
    """Whether the first product of this kind says with its copy what it says without, at these numbers of rows."""
    samples = packing.samples(kind)
    if not samples:
        return False
    linear, copy = samples[0]
    return copy.agrees(linear.weight, linear.bias, sorted(sizes))


def _told(times: Mapping[int, Times]) -> str:
    if not times:
        return "no room for a copy"
    gains = {size: by[LinearBackend.TORCH] / by[LinearBackend.ONEDNN] for size, by in times.items()}
    return ", ".join(f"{size} rows {gain:.2f}x" for size, gain in gains.items())


def _stand_back() -> None:
    """Let whoever serves go first. Linux has priorities for single threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
