"""Who computes a product: the ways that there are, what was measured of each, and which one that makes.

Pure decisions about figures; it measures nothing, and knows neither torch nor numba. A kind is what products have in
common as far as time goes: shape and dtype of the weights. A layer as a whole is of a kind, too, since compiled kernels
go through a layer without a pause. A figure is about a number of rows, one of PRODUCT_SIZES, and stands for all
numbers from the next smaller one on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

SIZES = (1, 2, 4, 8, 16, 32)  # rows that compiled kernels take: a step of so many tokens
PRODUCT_SIZES = (*SIZES, 64, 128)  # beyond the last one it decides for all
MIN_GAIN = 1.03  # below that a second copy of the weights is not worth its memory


class LinearBackend(StrEnum):
    """A way to compute x @ weight.T."""

    TORCH = "torch"  # as the model's code has it, over the weights where they lie
    ONEDNN = "onednn"  # the same product by oneDNN, over a second copy of bf16 weights in its own order
    KERNELS = "kernels"  # all of a layer, by kernels that numba has compiled, over the weights where they lie
    ONNX_RUNTIME = (
        "onnxruntime"  # ONNX Runtime's product over a second copy of integers, with inputs in 8 bits
    )
    OPENVINO = "openvino"  # the same by OpenVINO


# By kind and number of rows, what a product or a layer takes with each backend, in ns.
Times = Mapping[LinearBackend, int]
Figures = Mapping[str, Mapping[int, Times]]


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """Whose copy products of a kind have, and the sizes at which they are computed over it."""

    backend: LinearBackend
    sizes: frozenset[int]


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


def copy_sizes(figures: Figures, kind: str, backend: LinearBackend) -> frozenset[int]:
    """Sizes at which a product of this kind is faster over this backend's copy than in torch, and clearly so."""
    chosen = set()
    for size, times in figures.get(kind, {}).items():
        torch_ns, copy_ns = times.get(LinearBackend.TORCH), times.get(backend)
        if torch_ns is not None and copy_ns is not None and torch_ns >= MIN_GAIN * copy_ns:
            chosen.add(size)
    return frozenset(chosen)


def copy_gain(figures: Figures, kind: str, backend: LinearBackend, at: Collection[int]) -> float:
    """The share of torch's time that this copy saves, added up over those sizes `at` which it would be used.

    A share and not a time, or 128 rows would decide alone; nobody knows which steps will come, so torch might spend as
    much time at each of these sizes as at any other, and this is what would be saved of it then.
    """
    gain = 0.0
    for size in copy_sizes(figures, kind, backend) & set(at):
        times = figures[kind][size]
        gain += 1 - times[backend] / times[LinearBackend.TORCH]
    return gain


def choose_copy(
    figures: Figures, kind: str, backends: Iterable[LinearBackend], at: Collection[int] = PRODUCT_SIZES
) -> CopyChoice | None:
    """The one copy that a product of this kind is to have: the one that gains most (`copy_gain`) at these sizes, among
    equals the first of `backends`. It is used at all sizes at which it is clearly faster than torch. None where none
    gains anything.
    """
    gains = {backend: copy_gain(figures, kind, backend, at) for backend in backends}
    best = max(gains, key=lambda backend: gains[backend], default=None)
    if best is None or not gains[best]:
        return None
    return CopyChoice(best, copy_sizes(figures, kind, best))


def choose_copies(
    figures: Figures,
    layer: str,
    products: Collection[str],
    candidates: Mapping[str, Collection[LinearBackend]],
) -> dict[str, CopyChoice]:
    """`choose_copy` for each of these kinds with their `candidates`; `products` are the kinds that a layer of the kind
    `layer` is made of. Only such sizes count as compiled kernels do not take in any case: because a layer is faster
    with them even if each of its products had the copy that is fastest at that size.
    """
    fastest: dict[str, dict[int, LinearBackend]] = {}
    for kind, backends in candidates.items():
        for backend in backends:
            for size in copy_sizes(figures, kind, backend):
                times, known = figures[kind][size], fastest.setdefault(kind, {})
                known[size] = min(known.get(size, backend), backend, key=lambda one: times[one])
    by_kernels = _kernel_sizes(figures, layer, _saved_ns(figures, products, fastest))
    left = set(PRODUCT_SIZES) - by_kernels
    chosen = {kind: choose_copy(figures, kind, backends, left) for kind, backends in candidates.items()}
    return {kind: choice for kind, choice in chosen.items() if choice is not None}


def kernel_sizes(
    figures: Figures,
    layer: str,
    products: Iterable[str] = (),
    copies: Mapping[str, CopyChoice] | None = None,
    *,
    copied_share: float = 1.0,
) -> frozenset[int]:
    """Sizes at which compiled kernels take a layer of the kind `layer` faster than torch does: torch as it is when this
    share of such layers, from 0 to 1, has its `products`, by their kinds, computed over these `copies`.
    """
    used = {kind: dict.fromkeys(choice.sizes, choice.backend) for kind, choice in (copies or {}).items()}
    saved_ns = _saved_ns(figures, products, used)
    return _kernel_sizes(figures, layer, {size: copied_share * ns for size, ns in saved_ns.items()})


def _saved_ns(
    figures: Figures, products: Iterable[str], used: Mapping[str, Mapping[int, LinearBackend]]
) -> dict[int, float]:
    """What a layer of these products takes less than torch, by size, when they are computed over the copies of `used`,
    by kind and size.
    """
    saved = dict.fromkeys(SIZES, 0.0)
    for kind in products:
        for size, backend in used.get(kind, {}).items():
            if size in saved:
                times = figures[kind][size]
                saved[size] += times[LinearBackend.TORCH] - times[backend]
    return saved


def _kernel_sizes(figures: Figures, layer: str, saved_ns: Mapping[int, float]) -> frozenset[int]:
    chosen = set()
    for size, times in figures.get(layer, {}).items():
        torch_ns, kernels_ns = times.get(LinearBackend.TORCH), times.get(LinearBackend.KERNELS)
        if (
            torch_ns is not None
            and kernels_ns is not None
            and kernels_ns < torch_ns - saved_ns.get(size, 0.0)
        ):
            chosen.add(size)
    return frozenset(chosen)
