"""Where tensors lie: their groups, their places in the slabs, and the stretches that parts are made of.

Pure functions over names, dtypes and shapes. The packer and the reader of plain safetensors share them, so a
model has the same slabs whichever way it comes. Knows no files, planes or codecs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from .grouping import group_tensors
from .manifest import (
    FRAME_ELEMENTS,
    MAX_PART_DECODED_BYTES,
    MAX_PART_ELEMENTS,
    MAX_PART_SEGMENTS,
    Encoding,
    Group,
    Tensor,
    place_tensors,
    tensor_bytes,
)

FINE_PART_ELEMENTS = 1024 * 1024
MAX_FINE_PARTS = 256

DtypeAndShape = tuple[str, tuple[int, ...]]


class Stretch(NamedTuple):
    """Elements [start, start + count) of a tensor."""

    tensor: Tensor
    start: int
    count: int  # type: ignore[assignment]  # not the method of tuples, which nobody calls

    @property
    def offset_bytes(self) -> int:
        """Counted from the tensor's first byte."""
        return self.start * self.tensor.element_bytes

    @property
    def size_bytes(self) -> int:
        return self.count * self.tensor.element_bytes


def arrange_tensors(
    tensors: Mapping[str, DtypeAndShape], encoding_of: Callable[[str, str, tuple[int, ...]], Encoding]
) -> tuple[tuple[Group, ...], tuple[Tensor, ...]]:
    """Groups in forward order, and all tensors, numbered group by group in slab order.

    `encoding_of` takes a tensor's name, dtype and shape.
    """
    groups: list[Group] = []
    placed: list[Tensor] = []
    for group_index, (group_name, names) in enumerate(
        group_tensors({name: shape for name, (_, shape) in tensors.items()})
    ):
        offsets, slab_bytes = place_tensors([tensor_bytes(*tensors[name]) for name in names])
        first = len(placed)
        for name, offset in zip(names, offsets, strict=True):
            dtype, shape = tensors[name]
            encoding = encoding_of(name, dtype, shape)
            placed.append(Tensor(len(placed), name, dtype, shape, group_index, encoding, offset))
        groups.append(Group(group_index, group_name, tuple(range(first, len(placed))), slab_bytes))
    return tuple(groups), tuple(placed)


def fine_part_elements(tensors: Iterable[Tensor]) -> int:
    """How many elements a part should hold where parts had better be small: of embeddings, whose rows are asked for
    one by one, and of what comes last, since nothing hides the time that its decoding takes.

    A group of any size has some 256 of them at most, or the manifest would grow too long.
    """
    share = -(-sum(tensor.num_elements for tensor in tensors) // MAX_FINE_PARTS)
    wanted = max(FINE_PART_ELEMENTS, -(-share // FRAME_ELEMENTS) * FRAME_ELEMENTS)
    return min(wanted, MAX_PART_ELEMENTS)


def cut_parts(
    tensors: Iterable[Tensor], *, max_elements: int = MAX_PART_ELEMENTS
) -> Iterator[tuple[Stretch, ...]]:
    """The stretches of consecutive parts, each filled greedily with these tensors in order as far as a part
    may reach, and up to `max_elements`, at least a frame's.

    A tensor is cut only at multiples of `FRAME_ELEMENTS`, so that every part starts its own frames. Tensors
    without elements are in no part.
    """
    part: list[Stretch] = []
    room_elements, room_bytes = max_elements, MAX_PART_DECODED_BYTES
    for tensor in tensors:
        start = 0
        while start < tensor.num_elements:
            count = tensor.num_elements - start
            fitting = min(room_elements, room_bytes // tensor.element_bytes)
            if count > fitting:
                count = fitting - fitting % FRAME_ELEMENTS
            if count == 0 or len(part) == MAX_PART_SEGMENTS:
                yield tuple(part)
                part = []
                room_elements, room_bytes = max_elements, MAX_PART_DECODED_BYTES
                continue
            part.append(Stretch(tensor, start, count))
            start += count
            room_elements -= count
            room_bytes -= count * tensor.element_bytes
    if part:
        yield tuple(part)
