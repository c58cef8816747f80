"""Pages: the experts of a mixture as they come and go, and the plan of which of them fit in memory at once. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import UsageError
from ..format.layout import is_stacked, layer_of
from ..format.manifest import Manifest, Part
from ..memory.limits import MIB
from .plan import RowParts, expert_groups, writing_order

MAX_THREADS = 8
BUFFER_BYTES = 96 * MIB  # of all threads together, if that is enough for two


class Page(NamedTuple):
    """Parts that come and go together. `shared` are the numbers of others, which stay, with elements of this expert
    and of a neighbour.
    """

    group: int
    parts: tuple[Part, ...]
    ranges: tuple[tuple[int, int], ...]  # [begin, end) in bytes of the group's slab
    shared: frozenset[int] = frozenset()

    @property
    def size_bytes(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


def find_pages(manifest: Manifest) -> dict[int, Page]:
    """All pages by their numbers: those of groups with one expert are the group's, and those of others follow them, a
    layer's one after the other.
    """
    pages: dict[int, Page] = {}
    stacked: list[Page] = []
    for index in sorted(expert_groups(manifest)):
        group = manifest.groups[index]
        if is_stacked(group.name):
            stacked += _pages_of_rows(manifest, index)
        else:
            parts = [part for part in manifest.parts if part.group == index]
            pages[index] = Page(index, tuple(sorted(parts, key=writing_order)), ((0, group.slab_bytes),))
    return pages | dict(enumerate(stacked, len(manifest.groups)))


def _pages_of_rows(manifest: Manifest, group: int) -> list[Page]:
    """A page for each row of a group's tensors; none where some row has no part of its own."""
    tensors = [manifest.tensors[number] for number in manifest.groups[group].tensors]
    num_rows = tensors[0].shape[0]
    tables = [RowParts(manifest, tensor.name) for tensor in tensors]
    held = [set[int]().union(*(table.holding([row]) for table in tables)) for row in range(num_rows)]
    num_holders = Counter(number for numbers in held for number in numbers)
    pages: list[Page] = []
    for numbers in held:
        own = [manifest.parts[number] for number in sorted(numbers) if num_holders[number] == 1]
        shared = frozenset(number for number in numbers if num_holders[number] > 1)
        ranges = [
            (begin, begin + segment.count * tensor.element_bytes)
            for part in own
            for segment in part.segments
            for tensor in [manifest.tensors[segment.tensor]]
            for begin in [tensor.offset_bytes + segment.start * tensor.element_bytes]
        ]
        if not own or any(part.tier is not own[0].tier for part in own):
            return []
        pages.append(Page(group, tuple(own), tuple(ranges), shared))
    return pages


class Paging(NamedTuple):
    """The pages that come and go, by their numbers, and the most memory for all weights."""

    pages: Mapping[int, Page]
    weights_bytes: int
    budget_bytes: int  # of that, for those pages
    part_bytes: int  # as it is stored, the largest of their parts

    @property
    def groups(self) -> frozenset[int]:
        """Those that have pages."""
        return frozenset(page.group for page in self.pages.values())

    @property
    def parts(self) -> frozenset[int]:
        """The numbers of all parts that come and go."""
        return frozenset(part.index for page in self.pages.values() for part in page.parts)

    @property
    def num_threads(self) -> int:
        """The number of pages fetched at the same time, each with memory for one part."""
        return max(2, min(MAX_THREADS, BUFFER_BYTES // max(1, self.part_bytes)))

    @property
    def buffer_bytes(self) -> int:
        """Memory for parts on their way, besides the weights."""
        return self.num_threads * self.part_bytes


def plan_paging(manifest: Manifest, weights_bytes: int) -> Paging | None:
    """The plan of which experts stay in memory within this size; None if all of the model fits.

    Raises `UsageError` if it cannot: nothing can be left out, or a step may need more at once.
    """
    if manifest.weight_bytes <= weights_bytes:
        return None
    pages = find_pages(manifest)
    need = _need_of(manifest, pages)
    if need is None:
        raise UsageError(
            f"weights_bytes is {_mib(weights_bytes)}, but the weights take {_mib(manifest.weight_bytes)}, and there "
            "are no experts in groups of their own that could be left out",
            key="weights_bytes",
            hint="Leave it out; or pack the model again, if it is a mixture of experts (docs/experts.md).",
        )
    if weights_bytes < need.least_bytes:
        raise UsageError(
            f"weights_bytes is {_mib(weights_bytes)}, but a step needs {_mib(need.least_bytes)}: "
            f"{_mib(need.resident_bytes)} for what every token goes through, and {_mib(need.layer_bytes)} for the "
            f"experts of {need.layer}, all of which its tokens may choose",
            key="weights_bytes",
            hint=f"Give at least {need.least_bytes}; the whole model takes {manifest.weight_bytes}.",
        )
    part_bytes = max(part.size_bytes for page in pages.values() for part in page.parts)
    return Paging(pages, weights_bytes, weights_bytes - need.resident_bytes, part_bytes)


class StepNeed(NamedTuple):
    """The memory for weights that one step of a mixture may need at once."""

    resident_bytes: int  # for what every token goes through
    layer: str  # the one with the largest experts
    layer_bytes: int  # for all of these

    @property
    def least_bytes(self) -> int:
        return self.resident_bytes + self.layer_bytes


def step_need(manifest: Manifest) -> StepNeed | None:
    """None for a model without experts that could be left out."""
    return _need_of(manifest, find_pages(manifest))


def _need_of(manifest: Manifest, pages: Mapping[int, Page]) -> StepNeed | None:
    layers: Counter[str] = Counter()
    for page in pages.values():
        layers[layer_of(manifest.groups[page.group].name) or ""] += page.size_bytes
    if not layers:
        return None
    largest = max(layers, key=lambda layer: layers[layer])
    resident_bytes = manifest.weight_bytes - layers.total()
    return StepNeed(resident_bytes, largest, layers[largest])


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.1f} MiB"
