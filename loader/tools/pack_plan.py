"""Decides how a checkpoint is packed, before anything is written: a value made by pure functions.

Knows no stores and no content, but for which tensors turned out to be equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ... import __version__
from ..format.checkpoint import Checkpoint
from ..format.encoding import Encoding, Tier
from ..format.grouping import EMBED, HEAD, group_tensors
from ..format.layout import DtypeAndShape, Stretch, arrange_tensors, cut_parts, fine_part_elements
from ..format.manifest import (
    MAX_PART_ELEMENTS,
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
from .quantize_plan import Piece, QuantizePlan, is_scale
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
    checkpoint: Checkpoint,
    aliases: Mapping[str, str],
    options: TierOptions | None = None,
    quantize: QuantizePlan | None = None,
) -> PackPlan:
    """The plan for all tensors but the aliases, which share the storage of others. Where some are quantised, it has
    what stands in their places, and everything is exact from the beginning.

    Raises `ManifestError` now, and not after hours of packing, when the format cannot hold such a model.
    """
    options = options or TierOptions()
    groups, tensors = arrange_tensors(
        _stored_tensors(checkpoint, aliases, quantize),
        _encodings(checkpoint, aliases, options) if quantize is None else _exact_encodings(options),
    )
    jobs = tuple(
        job
        for group in groups
        for job in _cut_group(
            [tensors[index] for index in group.tensors],
            is_end=group in (groups[0], groups[-1]),
            alone=_scales_of_tables(quantize) if group is groups[0] else frozenset(),
        )
    )
    manifest = Manifest(
        generator=f"teneral {__version__}",
        blobs=(),
        files=(),
        groups=groups,
        tensors=tensors,
        parts=(),
        aliases=dict(aliases) if quantize is None else quantize.aliases(aliases),
        metadata=checkpoint.metadata,
    )
    dump_manifest(_uncompressed(manifest, jobs))
    return PackPlan(manifest, jobs)


def _stored_tensors(
    checkpoint: Checkpoint, aliases: Mapping[str, str], quantize: QuantizePlan | None
) -> dict[str, DtypeAndShape]:
    """Every tensor that the artifact has."""
    found: dict[str, DtypeAndShape] = {}
    for name, stored in checkpoint.tensors.items():
        if name in aliases:
            continue
        if quantize is not None and name in quantize.matrices:
            matrix = quantize.matrices[name]
            found |= {matrix.piece_name(piece): (dtype, shape) for piece, dtype, shape in matrix.pieces()}
        else:
            found[name] = (stored.entry.dtype, stored.entry.shape)
    return found


def _scales_of_tables(quantize: QuantizePlan | None) -> frozenset[str]:
    """What is needed whole, with whichever rows of a table: it had better not share a part with some of them."""
    pieces = quantize.pieces if quantize is not None else {}
    return frozenset(name for name, (_, piece) in pieces.items() if piece is not Piece.WEIGHT)


def _cut_group(tensors: list[Tensor], *, is_end: bool, alone: frozenset[str]) -> Iterator[Job]:
    """The jobs of one group: small ones at both ends of the model, as large as a part may be between. Those that are
    called in `alone` share none with the ones before them.
    """
    max_elements = fine_part_elements(tensors) if is_end else MAX_PART_ELEMENTS
    begins = [index for index, tensor in enumerate(tensors) if index == 0 or tensor.name in alone]
    for begin, end in zip(begins, [*begins[1:], len(tensors)], strict=True):
        yield from cut_parts(tensors[begin:end], max_elements=max_elements)


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
        if is_scale(name, checkpoint):
            return options.exact_encoding(dtype, shape)
        groups = used_in[name]
        return options.encoding(groups if has_head or EMBED not in groups else groups | {HEAD}, dtype, shape)

    return encoding_of


def _exact_encodings(options: TierOptions) -> Callable[[str, str, tuple[int, ...]], Encoding]:
    return lambda name, dtype, shape: options.exact_encoding(dtype, shape)


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
    return manifest._replace(blobs=tuple(blobs), parts=tuple(parts))


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
