"""Which parts hold which rows of a tensor: pure, made from the manifest.

A forward pass needs few rows of its largest matrix, the embeddings. Who knows them can wait for their parts alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from ..format.manifest import Manifest, Tier


class RowParts:
    """The parts of one tensor, in all tiers. Takes every name, aliases included; raises `KeyError` for others."""

    def __init__(self, manifest: Manifest, name: str) -> None:
        tensor = manifest.by_name[name]
        # Of packed dtypes an element is a byte, so a row has fewer of them than numbers.
        self._row_elements = max(1, tensor.num_elements // max(1, tensor.shape[0] if tensor.shape else 1))
        self._tiers: list[tuple[list[int], list[int]]] = []  # of each: first elements, in order, and parts
        for tier in Tier:
            stretches = sorted(
                (segment.start, part.index)
                for part in manifest.parts_of(tensor.group, tier)
                for segment in part.segments
                if segment.tensor == tensor.index
            )
            if stretches:
                self._tiers.append(([start for start, _ in stretches], [number for _, number in stretches]))

    @property
    def all(self) -> frozenset[int]:
        """The numbers of all parts that hold some of the tensor."""
        return frozenset(number for _, numbers in self._tiers for number in numbers)

    def holding(self, rows: Iterable[int]) -> set[int]:
        """The numbers of the parts that hold these rows; each row must be one that the tensor has."""
        found: set[int] = set()
        width = self._row_elements
        for row in set(rows):
            for starts, numbers in self._tiers:
                first = bisect_right(starts, row * width) - 1
                last = bisect_right(starts, row * width + width - 1)
                found.update(numbers[first:last])
        return found
