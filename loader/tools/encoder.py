"""Tensor bytes of a checkpoint → parts as they are stored, one job at a time.

A job is the stretches of one part. It becomes one part of each tier that any of them has. Runs in worker threads;
nearly all of its time is spent without the GIL.
Knows no blobs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from ..errors import LoadCancelledError
from ..format.checkpoint import Checkpoint
from ..format.codec import encode_segment
from ..format.layout import Stretch
from ..format.manifest import PLANE_ALIGNMENT_BYTES, Codec, Plane, Segment, Tier, align
from ..sources.base import Source
from .quantizing_reader import QuantizingReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_PADDING = bytes(PLANE_ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """A part's content in pieces that follow one another. They may be views of the job's buffer."""

    tier: Tier
    group: int
    segments: tuple[Segment, ...]
    pieces: tuple[bytes | memoryview, ...]
    size_bytes: int
    digest: bytes


class Encoder:
    """Reads and encodes the jobs of one checkpoint. Thread-safe."""

    def __init__(
        self, source: Source, checkpoint: Checkpoint, quantizing: QuantizingReader | None = None
    ) -> None:
        """`quantizing` has the content of tensors that the checkpoint does not have so."""
        self._source = source
        self._checkpoint = checkpoint
        self._quantizing = quantizing
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """Make jobs in work end with `LoadCancelledError` at their next tensor."""
        self._is_stopped.set()
        if self._quantizing is not None:
            self._quantizing.stop()

    def encode(self, stretches: Sequence[Stretch], buffer: Bytes) -> list[EncodedPart]:
        """The job's parts, one a tier, in the tiers' order.

        `buffer` takes the tensors' bytes (`buffer_bytes(stretches)`) and must stay untouched while the
        result is used. Memory besides: three times the largest tensor's stretch, and the parts themselves.
        """
        builders = [_PartBuilder(tier) for tier in Tier]
        position = 0
        for stretch in stretches:
            if self._is_stopped.is_set():
                raise LoadCancelledError("packing was stopped")
            tensor = stretch.tensor
            data = buffer[position : position + stretch.size_bytes]
            position += align(stretch.size_bytes)
            self._read(stretch, data)
            planes = encode_segment(tensor.dtype, tensor.encoding, data)
            for tier, coded in planes.items():
                builders[tier].add(stretch, coded)
        group = stretches[0].tensor.group
        return [builder.build(group) for builder in builders if builder.segments]

    def _read(self, stretch: Stretch, data: Bytes) -> None:
        if self._quantizing is not None and stretch.tensor.name in self._quantizing:
            self._quantizing.read(stretch, data)
            return
        stored = self._checkpoint.tensors[stretch.tensor.name]
        shard = self._checkpoint.shards[stored.shard]
        start = stored.entry.begin + stretch.offset_bytes
        self._source.read_into(shard.name, start, data.data, version=shard.version)


def buffer_bytes(stretches: Sequence[Stretch]) -> int:
    """The buffer that `Encoder.encode` needs: every tensor's stretch starts aligned in it."""
    return sum(align(stretch.size_bytes) for stretch in stretches)


class _PartBuilder:
    """Lays the planes of one part one behind another, each at a multiple of 8 bytes."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.segments: list[Segment] = []
        self._pieces: list[bytes | memoryview] = []
        self._size_bytes = 0
        self._digest = blake3()

    def add(self, stretch: Stretch, coded: Sequence[tuple[Codec, bytes | memoryview]]) -> None:
        planes: list[Plane] = []
        for codec, content in coded:
            size_bytes = memoryview(content).nbytes
            planes.append(Plane(codec, self._size_bytes, size_bytes))
            self._append(content, size_bytes)
            if padding_bytes := -self._size_bytes % PLANE_ALIGNMENT_BYTES:
                self._append(_PADDING[:padding_bytes], padding_bytes)
        self.segments.append(Segment(stretch.tensor.index, stretch.start, stretch.count, tuple(planes)))

    def build(self, group: int) -> EncodedPart:
        return EncodedPart(
            tier=self.tier,
            group=group,
            segments=tuple(self.segments),
            pieces=tuple(self._pieces),
            size_bytes=self._size_bytes,
            digest=self._digest.digest(),
        )

    def _append(self, content: bytes | memoryview, size_bytes: int) -> None:
        self._pieces.append(content)
        self._digest.update(content)
        self._size_bytes += size_bytes
