"""Decides how a checkpoint is packed, before anything is written: a value made by pure functions.

Knows no stores and no content, but for which tensors turned out to be equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ... import __version__
from ..format.checkpoint import Checkpoint
from ..format.encoding import Encoding, Tier
from ..format.grouping import EMBED, HEAD, group_tensors
from ..format.layout import Stretch, arrange_tensors, cut_parts, fine_part_elements
from ..format.manifest import (
    PLANE_ALIGNMENT_BYTES,
    Blob,
    Codec,
    Manifest,
    Part,
    Plane,
    Segment,
    Tensor,
    align,
    decoded_plane_bytes,
)
from ..format.manifest_json import dump_manifest
from .tier_options import TierOptions

Job = tuple[Stretch, ...]  # what becomes one part of each tier that it has


@dataclass(frozen=True, slots=True)
class PackPlan:
    """A manifest that lacks blobs, parts and files yet, and the jobs whose results they will be, in order."""

    manifest: Manifest
    jobs: tuple[Job, ...]

    @property
    def read_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.manifest.tensors)


def plan_pack(
    checkpoint: Checkpoint, aliases: Mapping[str, str], options: TierOptions | None = None
) -> PackPlan:
    """The plan for all tensors but the aliases, which share the storage of others.

    Raises `ManifestError` now, and not after hours of packing, when the format cannot hold such a model.
    """
    entries = {name: stored.entry for name, stored in checkpoint.tensors.items() if name not in aliases}
    groups, tensors = arrange_tensors(
        {name: (entry.dtype, entry.shape) for name, entry in entries.items()},
        _encodings(checkpoint, aliases, options or TierOptions()),
    )
    jobs = tuple(
        job
        for group in groups
        for job in _cut_group(
            [tensors[index] for index in group.tensors], is_end=group in (groups[0], groups[-1])
        )
    )
    manifest = Manifest(
        generator=f"teneral {__version__}",
        blobs=(),
        files=(),
        groups=groups,
        tensors=tensors,
        parts=(),
        aliases=dict(aliases),
        metadata=checkpoint.metadata,
    )
    dump_manifest(_uncompressed(manifest, jobs))
    return PackPlan(manifest, jobs)


def _cut_group(tensors: list[Tensor], *, is_end: bool) -> Iterator[Job]:
    """The jobs of one group: small ones at both ends of the model, as large as a part may be between."""
    if is_end:
        return cut_parts(tensors, max_elements=fine_part_elements(tensors))
    return cut_parts(tensors)


def forward_order(checkpoint: Checkpoint) -> list[str]:
    """All names, in the order in which a forward pass needs their tensors."""
    return [name for _, names in _groups(checkpoint) for name in names]


def _groups(checkpoint: Checkpoint) -> list[tuple[str, list[str]]]:
    """Of all names, those that are aliases too."""
    return group_tensors({name: stored.entry.shape for name, stored in checkpoint.tensors.items()})


def _encodings(
    checkpoint: Checkpoint, aliases: Mapping[str, str], options: TierOptions
) -> Callable[[str, str, tuple[int, ...]], Encoding]:
    """The encoding of each tensor, by its name, dtype and shape, according to the groups in which it is used.

    Embeddings may be used as the head without a name there: a model without a matrix in the head uses them so.
    """
    used_in: dict[str, set[str]] = defaultdict(set)
    has_head = False
    for group, names in _groups(checkpoint):
        for name in names:
            used_in[aliases.get(name, name)].add(group)
            has_head |= group == HEAD and len(checkpoint.tensors[name].entry.shape) >= 2

    def encoding_of(name: str, dtype: str, shape: tuple[int, ...]) -> Encoding:
        groups = used_in[name]
        return options.encoding(groups if has_head or EMBED not in groups else groups | {HEAD}, dtype, shape)

    return encoding_of


def _uncompressed(manifest: Manifest, jobs: tuple[Job, ...]) -> Manifest:
    """The manifest as it would become if no plane could be compressed."""
    parts: list[Part] = []
    blobs: list[Blob] = []
    for tier in Tier:
        end = 0
        for job in jobs:
            segments, size_bytes = _raw_segments(job, tier)
            if segments:
                parts.append(
                    Part(
                        index=len(parts),
                        tier=tier,
                        group=job[0].tensor.group,
                        blob=len(blobs),
                        offset_bytes=end,
                        size_bytes=size_bytes,
                        digest=bytes(32),
                        segments=segments,
                    )
                )
                end += size_bytes
        if end:
            blobs.append(Blob(tier.name, end))
    return replace(manifest, blobs=tuple(blobs), parts=tuple(parts))


def _raw_segments(job: Job, tier: Tier) -> tuple[tuple[Segment, ...], int]:
    """A part's segments in one tier were they stored raw, and the part's size in bytes."""
    segments: list[Segment] = []
    end = 0
    for stretch in job:
        tensor = stretch.tensor
        planes: list[Plane] = []
        for size_bytes in decoded_plane_bytes(tensor.encoding, tier, tensor.element_bytes, stretch.count):
            planes.append(Plane(Codec.RAW, end, size_bytes))
            end = align(end + size_bytes, PLANE_ALIGNMENT_BYTES)
        if planes:
            segments.append(Segment(tensor.index, stretch.start, stretch.count, tuple(planes)))
    return tuple(segments), end
