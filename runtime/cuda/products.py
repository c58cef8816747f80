"""Products with one row: by torch, or by a kernel of ours where that has been found to be faster.

Which it is depends on the device and the matrix's shape, so it is measured, once, when a step of one row is about to be
recorded; until then torch computes all of them. Only plain matrices without a bias are meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from ..backends.torch.linear import Linear
from .launch import Launcher
from .variants import PRODUCT_ROWS, Variant, product_variant

if TYPE_CHECKING:
    from ..backends.torch.decoder import TorchExecutor

NUM_TRIALS = 12
MAX_MATRICES = 8  # of a shape, in turns: so many do not fit into a device's cache
ALIGNMENT_BYTES = 16


class RowProducts:
    """Of one model. One thread at a time."""

    def __init__(self, launch: Launcher, dtype: str) -> None:
        """`dtype` as Triton calls it."""
        self._launch = launch
        self._dtype = dtype
        self._variants: dict[tuple[int, bool], Variant] = {}
        self.shapes: set[tuple[int, int]] = set()  # (out, in) of the matrices for which the kernel is used

    def __call__(self, projection: Any, x: torch.Tensor) -> torch.Tensor:
        """projection(x)."""
        if len(x) == 1 and self._takes(projection):
            out = x.new_empty((1, len(projection.weight)))
            self._run(projection.weight, x, out, out, adds=False)
            return out
        result: torch.Tensor = projection(x)
        return result

    def add_(self, x: torch.Tensor, projection: Any, inner: torch.Tensor) -> torch.Tensor:
        """x += projection(inner). Where the product itself can add, it is one kernel less."""
        if len(x) == 1 and self._takes(projection):
            self._run(projection.weight, inner, x, x, adds=True)
            return x
        if is_plain(projection):
            return torch.addmm(x, inner, projection.weight.t(), out=x)
        return x.add_(projection(inner))

    def use_for(self, shapes: Iterable[tuple[int, int]]) -> None:
        self.shapes.update(shapes)

    def measure(self, projections: Sequence[Any]) -> dict[tuple[int, int], tuple[float, float]]:
        """By shape: milliseconds of (the kernel, torch). What is faster is used from now on. On a device only."""
        found: dict[tuple[int, int], tuple[float, float]] = {}
        by_shape: dict[tuple[int, int], list[Linear]] = {}
        for projection in projections:
            if is_plain(projection) and _is_aligned(projection.weight):
                by_shape.setdefault(_shape(projection.weight), []).append(projection)
        for shape, alike in by_shape.items():
            some = alike[:MAX_MATRICES]
            row = torch.ones((1, shape[1]), dtype=some[0].weight.dtype, device=some[0].weight.device)
            out = row.new_empty((1, shape[0]))

            def ours(number: int, some: Any = some, row: Any = row, out: Any = out) -> None:
                self._run(some[number].weight, row, out, out, adds=False)

            def theirs(number: int, some: Any = some, row: Any = row) -> None:
                some[number](row)

            found[shape] = (_least_ms(ours, len(some)), _least_ms(theirs, len(some)))
        self.use_for(shape for shape, (ours_ms, theirs_ms) in found.items() if ours_ms < theirs_ms)
        return found

    def _takes(self, projection: Any) -> bool:
        return (
            bool(self.shapes)
            and is_plain(projection)
            and _shape(projection.weight) in self.shapes
            and _is_aligned(projection.weight)
        )

    def _run(
        self, matrix: torch.Tensor, x: torch.Tensor, added: torch.Tensor, out: torch.Tensor, *, adds: bool
    ) -> None:
        num_out, num_in = matrix.shape
        variant = self._variants.get((num_in, adds))
        if variant is None:
            variant = self._variants[num_in, adds] = product_variant(self._dtype, num_in, adds=adds)
        self._launch(variant, (-(-num_out // PRODUCT_ROWS),), x, matrix, added, out, num_out)


def projections_of(executor: TorchExecutor) -> list[Any]:
    """All that a step multiplies rows with."""
    parts = [
        (each.attention.qkv, each.attention.output, each.mlp.gate_up, each.mlp.down)
        for each in executor.layers_of
    ]
    return [*(each for part in parts for each in part), executor.head]


def is_plain(projection: Any) -> TypeGuard[Linear]:
    return type(projection) is Linear and projection.bias is None


def _shape(matrix: torch.Tensor) -> tuple[int, int]:
    return matrix.shape[0], matrix.shape[1]


def _is_aligned(matrix: torch.Tensor) -> bool:
    """Whether all of its rows begin where the kernel wants them to: matrices lie where the loader has put them."""
    row_bytes = matrix.shape[1] * matrix.element_size()
    return not (matrix.data_ptr() % ALIGNMENT_BYTES or row_bytes % ALIGNMENT_BYTES) and matrix.is_contiguous()


def _least_ms(work: Any, num: int) -> float:
    """For one call, of several: each trial calls it `num` times, with another number each."""
    least_ms = float("inf")
    for trial in range(NUM_TRIALS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for number in range(num):
            work(number)
        end.record()
        end.synchronize()
        if trial > 1:
            least_ms = min(least_ms, begin.elapsed_time(end) / num)
    return least_ms
