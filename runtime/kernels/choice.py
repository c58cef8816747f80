"""Who computes a product: the ways that there are, what was measured of each, and which one that makes.

Pure decisions about figures; it measures nothing, and knows neither torch nor numba. A kind is what products have in
common as far as time goes: shape and dtype of the weights. A layer as a whole is of a kind, too, since compiled kernels
go through a layer without a pause. A figure is about a number of rows, one of PRODUCT_SIZES, and stands for all
numbers from the next smaller one on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

SIZES = (1, 2, 4, 8, 16, 32)  # rows that compiled kernels take: a step of so many tokens
PRODUCT_SIZES = (*SIZES, 64, 128)  # beyond the last one it decides for all
MIN_GAIN = 1.03  # below that a second copy of the weights is not worth its memory


class LinearBackend(StrEnum):
    """A way to compute x @ weight.T."""

    TORCH = "torch"  # torch's F.linear, over the weights where they lie
    ONEDNN = "onednn"  # the same product by oneDNN, over a second copy in its own order
    KERNELS = "kernels"  # all of a layer, by kernels that numba has compiled, over the weights where they lie


# By kind and number of rows, what a product or a layer takes with each backend, in ns.
Times = Mapping[LinearBackend, int]
Figures = Mapping[str, Mapping[int, Times]]


def size_of(num_rows: int) -> int:
    """The one of PRODUCT_SIZES that stands for so many rows."""
    return next((size for size in PRODUCT_SIZES if num_rows <= size), PRODUCT_SIZES[-1])


def rows_of(sizes: Iterable[int]) -> frozenset[int]:
    """The numbers of rows, up to the largest of SIZES, that these of them stand for."""
    chosen = set(sizes)
    return frozenset(rows for rows in range(1, SIZES[-1] + 1) if size_of(rows) in chosen)


def table_of(sizes: Iterable[int]) -> bytes:
    """1 at the numbers of rows that these of PRODUCT_SIZES stand for; the last item is that of all numbers beyond."""
    chosen = set(sizes)
    return bytes([0, *(size_of(rows) in chosen for rows in range(1, PRODUCT_SIZES[-1] + 1))])


def covers(figures: Figures, kind: str, sizes: Iterable[int], backends: tuple[LinearBackend, ...]) -> bool:
    """Whether it is known what all of these take."""
    of_kind = figures.get(kind, {})
    return all(backend in of_kind.get(size, {}) for size in sizes for backend in backends)


def packed_sizes(figures: Figures, kind: str) -> frozenset[int]:
    """Sizes at which a product of this kind is faster over packed weights, and clearly so."""
    chosen = set()
    for size, times in figures.get(kind, {}).items():
        torch_ns, onednn_ns = times.get(LinearBackend.TORCH), times.get(LinearBackend.ONEDNN)
        if torch_ns is not None and onednn_ns is not None and torch_ns >= MIN_GAIN * onednn_ns:
            chosen.add(size)
    return frozenset(chosen)


def kernel_sizes(
    figures: Figures, layer: str, products: Iterable[str] = (), *, packed_share: float = 0.0
) -> frozenset[int]:
    """Sizes at which compiled kernels take a layer of the kind `layer` faster than torch does: torch as it is when this
    share of such layers, from 0 to 1, has its `products` packed.
    """
    saved = dict.fromkeys(SIZES, 0.0)
    for kind in products:
        for size in packed_sizes(figures, kind) & saved.keys():
            times = figures[kind][size]
            saved[size] += packed_share * (times[LinearBackend.TORCH] - times[LinearBackend.ONEDNN])
    chosen = set()
    for size, times in figures.get(layer, {}).items():
        torch_ns, kernels_ns = times.get(LinearBackend.TORCH), times.get(LinearBackend.KERNELS)
        if torch_ns is not None and kernels_ns is not None and kernels_ns < torch_ns - saved.get(size, 0.0):
            chosen.add(size)
    return frozenset(chosen)
