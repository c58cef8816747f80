"""The copies of one decoder's weights while they are being made: within a bound of memory, measured, and checked.

A library that raises is left out for products of that kind, and `left_out` says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...loader.memory import MIB, available_bytes
from ..models.packed import CannotPackError, Compute
from .choice import LinearBackend, choose_copy
from .copies import EXACT, ROUNDING, Libraries, libraries_for, objection
from .kinds import products_of

if TYPE_CHECKING:
    from ..models.decoder import Decoder

RESERVE_BYTES = 256 * MIB  # that stay free beside the copies, and beside what others were promised
NUM_SAMPLES = 4  # of a kind, one after the other, as a step reads them: one alone would stay in a cache
MIN_TRIALS, MAX_TRIALS, TRIALS_S = 3, 24, 0.1

_Product = Callable[[torch.Tensor], torch.Tensor]

logger = logging.getLogger(__name__)


class Packing:
    """For one thread."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        limit_bytes: int,
        num_threads: int,
        reserved_bytes: int = 0,
        free_bytes: Callable[[], int | None] = available_bytes,
        exact: Libraries = EXACT,
        rounding: Libraries = ROUNDING,
    ) -> None:
        """All copies together take `limit_bytes` at most, and leave `reserved_bytes` and RESERVE_BYTES of what the
        container has free. Raises `ModelError` for weights that come as GPTQ or AWQ store them and cannot be meant.
        """
        found = [
            (each, libraries_for(each.linear, exact=exact, rounding=rounding))
            for each in products_of(decoder)
        ]
        self.products = [product for product, libraries in found if libraries]
        self._libraries = [libraries for _, libraries in found if libraries]
        self.sizes = {product.kind: product.sizes for product in self.products}
        self.candidates: dict[str, tuple[LinearBackend, ...]] = {}
        for product, libraries in zip(self.products, self._libraries, strict=True):
            self.candidates.setdefault(product.kind, tuple(libraries))
        self.num_bytes = 0
        self.left_out: dict[tuple[str, LinearBackend], str] = {}  # by kind and library: why
        self._copies: dict[tuple[int, LinearBackend], Compute] = {}  # by the number of the product
        self._rounding = rounding
        self._num_threads = num_threads
        self._limit_bytes = limit_bytes
        self._reserved_bytes = reserved_bytes + RESERVE_BYTES
        self._free_bytes = free_bytes

    def starts_threads(self, backend: LinearBackend) -> bool:
        """Whether making this library's copies starts threads that compute with them later."""
        return backend in self._rounding

    def make(self, number: int, backend: LinearBackend) -> Compute | None:
        """The copy of a product, by its number; None where it does not fit, or the library is left out."""
        product, library = self.products[number], self._libraries[number].get(backend)
        if (number, backend) in self._copies:
            return self._copies[number, backend]
        if library is None or (product.kind, backend) in self.left_out:
            return None
        try:
            if not self._has_room(self.bytes_of(number, backend)):
                return None
            compute = library.Product(product.linear, num_threads=self._num_threads)
        except Exception as error:  # noqa: BLE001 of a library: told in `left_out` and by the log
            self._leave_out(product.kind, backend, error)
            return None
        self._copies[number, backend] = compute
        self.num_bytes += self.bytes_of(number, backend)
        return compute

    def bytes_of(self, number: int, backend: LinearBackend) -> int:
        """What this library's copy of a product takes at most; 0 where it has none."""
        library = self._libraries[number].get(backend)
        return 0 if library is None else library.packed_bytes(self.products[number].linear)

    def forget(self, kind: str, *, but: LinearBackend | None = None) -> None:
        """Give the copies of a kind up, except this library's."""
        for backend in self.candidates[kind]:
            if backend is not but:
                self._forget(kind, backend)

    def _forget(self, kind: str, backend: LinearBackend) -> None:
        for number, product in enumerate(self.products):
            if product.kind == kind and self._copies.pop((number, backend), None) is not None:
                self.num_bytes -= self.bytes_of(number, backend)

    @torch.inference_mode()
    def measure(self, kind: str, *, trials_s: float = TRIALS_S) -> dict[int, dict[LinearBackend, int]]:
        """What a product of this kind takes, by number of rows: in torch and over each copy the best of some trials, in
        turns, for about so long. Empty where no copy fits. Of the copies made for it, those stay that gain most.
        """
        ways = self._ways(kind)
        times_ns: dict[int, dict[LinearBackend, int]] = {}
        first = next(product for product in self.products if product.kind == kind)
        for num_rows in first.sizes:
            if len(ways) > 1:
                x = torch.randn(num_rows, first.linear.num_in).to(first.dtype)
                times_ns[num_rows] = self._measure(kind, x, ways, trials_s)
        if len(ways) == 1:  # torch's: no copy fits, or none computes
            times_ns = {}
        best = choose_copy({kind: times_ns}, kind, self.candidates[kind])
        self.forget(kind, but=best.backend if best is not None else None)
        return times_ns

    def _measure(
        self, kind: str, x: torch.Tensor, ways: dict[LinearBackend, list[_Product]], trials_s: float
    ) -> dict[LinearBackend, int]:
        """The best of each of these ways for this input, in ns. Who fails is taken out of them."""
        best: dict[LinearBackend, int] = {}
        end_s = time.perf_counter() + trials_s
        for trial in range(-1, MAX_TRIALS):  # the first one is for waking threads and filling caches
            for backend, computes in list(ways.items()):
                start_ns = time.perf_counter_ns()
                try:
                    computes[trial % len(computes)](x)
                except Exception as error:
                    if backend is LinearBackend.TORCH:
                        raise
                    self._leave_out(kind, backend, error)
                    self._forget(kind, backend)
                    best.pop(backend, None)
                    del ways[backend]
                    continue
                time_ns = max(1, time.perf_counter_ns() - start_ns)
                if trial >= 0:
                    best[backend] = min(best.get(backend, time_ns), time_ns)
            if trial + 1 >= MIN_TRIALS and time.perf_counter() > end_s:
                break
        return best

    def accepts(self, kind: str, backend: LinearBackend, sizes: Collection[int]) -> bool:
        """Whether the first product of this kind says with its copy what it says without (`copies.objection`), at these
        numbers of rows. Where not, the library is left out.
        """
        numbers = (number for number, product in enumerate(self.products) if product.kind == kind)
        number = next(each for each in numbers if backend in self._libraries[each])
        compute, product = self.make(number, backend), self.products[number]
        if compute is None:
            return False
        try:
            why = objection(product.linear, compute, sorted(sizes), product.dtype)
        except Exception as error:  # noqa: BLE001 as above
            self._leave_out(kind, backend, error)
        else:
            if why is None:
                return True
            self.left_out[kind, backend] = why
        self._forget(kind, backend)
        return False

    def _ways(self, kind: str) -> dict[LinearBackend, list[_Product]]:
        """Some products of a kind, by who computes them: in torch, and over as many copies as fit."""
        numbers = [number for number, product in enumerate(self.products) if product.kind == kind][
            :NUM_SAMPLES
        ]
        ways: dict[LinearBackend, list[_Product]] = {
            LinearBackend.TORCH: [self.products[number].linear.in_torch for number in numbers]
        }
        for number in numbers:
            for backend in self.candidates[kind]:
                compute, bias = self.make(number, backend), self.products[number].linear.bias
                if compute is not None:
                    ways.setdefault(backend, []).append(partial(_with_bias, compute, bias))
        for backend in [each for each in ways if (kind, each) in self.left_out]:
            self._forget(kind, backend)
            del ways[backend]
        return ways

    def _leave_out(self, kind: str, backend: LinearBackend, error: Exception) -> None:
        if isinstance(error, CannotPackError):
            self.left_out[kind, backend] = str(error)
        else:  # of a library that we may not know, without which all goes on as before
            logger.warning("%s is left out for %s", backend, kind, exc_info=error)
            self.left_out[kind, backend] = f"{type(error).__name__}: {error}"[:200]

    def _has_room(self, size_bytes: int) -> bool:
        free_bytes = self._free_bytes()
        if self.num_bytes + size_bytes > self._limit_bytes:
            return False
        return free_bytes is None or free_bytes - self._reserved_bytes >= size_bytes


def _with_bias(compute: Compute, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return compute(x, bias)
