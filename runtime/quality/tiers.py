"""The values of a model of which only some tiers have arrived.

Tiers are added in order, all parts of one before the first of the next; each part is verified
before it is decoded. Missing values are those that a load has at the same moment. This module knows
no models.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from ...loader.format.manifest import Manifest, Part, Tier
from ...loader.format.manifest import Tensor as Entry
from ...loader.tools.part_reader import PartReader, map_in_order
from ..tensors import DType, Tensor, aligned_empty
from ..weights import DictWeights

if TYPE_CHECKING:
    from numpy.typing import NDArray


def usable_tiers(manifest: Manifest) -> list[Tier]:
    """The tiers after which every tensor has values, in order. The last of them gives the exact
    model.
    """
    wanted = {tensor.index for tensor in manifest.tensors if tensor.num_elements}
    filled: set[int] = set()
    usable = []
    for tier in sorted({part.tier for part in manifest.parts}):
        filled.update(
            segment.tensor for part in manifest.parts if part.tier is tier for segment in part.segments
        )
        if filled >= wanted:
            usable.append(tier)
    return usable


class TieredWeights:
    """One model's slabs, `manifest.weight_bytes` of memory. Values that no tier has filled yet are
    undefined.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._held: Tier | None = None
        self._slabs = [aligned_empty((group.slab_bytes,), np.uint8) for group in manifest.groups]

    def fill(
        self,
        tier: Tier,
        reader: PartReader,
        *,
        threads: int | None = None,
        on_part: Callable[[Part], None] | None = None,
    ) -> None:
        """Read the missing parts of this tier and of those before it, and put their values in
        place.

        Blocks; `on_part` is called from this thread. Raises `IntegrityError` naming a bad part, and
        the source's errors; the values are then undefined.
        """
        for missing in Tier:
            if (self._held is None or self._held < missing) and missing <= tier:
                self._add(missing, reader, threads, on_part)
        self._held = tier

    def _add(
        self, tier: Tier, reader: PartReader, threads: int | None, on_part: Callable[[Part], None] | None
    ) -> None:
        """All parts of a tier; differences to a base after the base's own values are there."""
        for has_delta in (False, True):
            parts = [
                part for part in self._manifest.parts if part.tier is tier and part.has_delta is has_delta
            ]
            self._add_parts(parts, reader, threads, on_part)

    def _add_parts(
        self,
        parts: list[Part],
        reader: PartReader,
        threads: int | None,
        on_part: Callable[[Part], None] | None,
    ) -> None:
        def place(part: Part) -> None:
            stored = reader.read(part)
            for segment in part.segments:
                tensor = self._manifest.tensors[segment.tensor]
                begin = tensor.offset_bytes + segment.start * tensor.element_bytes
                out: NDArray[np.uint8] = self._slabs[part.group][
                    begin : begin + reader.segment_bytes(segment)
                ]
                reader.decode(part, segment, stored, out)

        with closing(map_in_order(place, parts, threads)) as placed:
            for part, _ in zip(parts, placed, strict=True):
                if on_part is not None:
                    on_part(part)

    def copy_(self, other: TieredWeights) -> None:
        """Take the values of the same model's `other` weights."""
        for slab, values in zip(self._slabs, other._slabs, strict=True):
            np.copyto(slab, values)
        self._held = other._held

    def tensors(self) -> DictWeights:
        """Views of the slabs by every name, aliases included; filling changes them.

        Dtypes that models are not computed in are left out.
        """
        return DictWeights(
            {
                name: Tensor(dtype, self._bytes(entry).view(dtype.numpy).reshape(entry.shape))
                for name, entry in self._manifest.by_name.items()
                if (dtype := DType.__members__.get(entry.dtype)) is not None
            }
        )

    def _bytes(self, entry: Entry) -> NDArray[np.uint8]:
        slab: NDArray[np.uint8] = self._slabs[entry.group]
        return slab[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
