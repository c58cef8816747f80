"""The plan of a packing, made before anything is written: tiers, tied tensors, and parts as values.

Tied tensors, which a checkpoint stores under both of their names, are one where dtype, shape and
every byte agree; no model architecture is known. The rest is pure: no stores and no content.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .... import __version__
from ...errors import UsageError
from ...format.checkpoint import Checkpoint, StoredTensor
from ...format.codec import DEFAULT_DRAFT_BITS, MIN_SPLIT_ELEMENTS, choose_encoding
from ...format.encoding import Encoding, Tier
from ...format.layout import (
    EMBED,
    HEAD,
    DtypeAndShape,
    Stretch,
    arrange_tensors,
    cut_group,
    fine_part_elements,
    group_tensors,
    is_expert,
)
from ...format.manifest import (
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
from ...format.manifest_json import dump_manifest
from ...sources.base import Source
from .quantize_plan import DECODER, Piece, QuantizePlan, is_scale

MAX_DRAFT_BITS = 7  # all that bf16 has
# The head and the values of a decoder have more bits than all others: few weights, whose errors count
# most (docs/draft-quality.md, "The choice of bits").
MORE_BITS = 2
_VALUES = re.compile(rf"{DECODER}layers\.[0-9]+\.(?:self_attn|mixer)\.v_proj\.weight")
_OF_DECODERS = re.compile(
    rf"{DECODER}(?:layers|h)\.[0-9]+\.(?:self_attn\.(?:v|qkv)_proj|mixer\.v_proj|attention\.query_key_value"
    r"|attn\.c_attn)\.weight"
)
_ALL_BITS = 64  # more than any float has


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Mantissa bits. None in `draft_bits` is what suits a tensor's dtype, in `embed_bits` the same
    as for all others, in `head_bits` `MORE_BITS` more in a decoder, in `sketch_bits` that there is no
    sketch. Raises `UsageError` for invalid values.
    """

    draft_bits: int | None = None
    embed_bits: int | None = None  # of matrices before the first layer
    head_bits: int | None = None  # of matrices behind the last one
    sketch_bits: int | None = None

    def __post_init__(self) -> None:
        for key, most in (
            ("draft_bits", MAX_DRAFT_BITS),
            ("embed_bits", MAX_DRAFT_BITS),
            ("head_bits", MAX_DRAFT_BITS),
            ("sketch_bits", MAX_DRAFT_BITS - 1),
        ):
            bits = getattr(self, key)
            if bits is not None and not 0 <= bits <= most:
                raise UsageError(
                    f"{_flag(key)} {bits}: a tier has 0 to {most} mantissa bits",
                    key=key,
                    hint="Default: see --help.",
                )
        if self.sketch_bits is not None:
            self._check_sketch(self.sketch_bits)

    def encoding(
        self, groups: Collection[str], dtype: str, shape: tuple[int, ...], *, more: Collection[str] = ()
    ) -> Encoding:
        """Of a tensor that a forward pass uses in these groups: where it is tied, the one that asks
        for more counts. It has `MORE_BITS` more in the groups `more`.
        """
        own = {EMBED: self.embed_bits, HEAD: self.head_bits}
        default = self.draft_bits if self.draft_bits is not None else DEFAULT_DRAFT_BITS.get(dtype, 0)

        def bits_in(group: str) -> int:
            wanted = own.get(group)
            if wanted is not None:
                return wanted
            return min(MAX_DRAFT_BITS, default + MORE_BITS) if group in more else default

        draft_bits = max(map(bits_in, groups), default=default)
        return choose_encoding(dtype, shape, draft_bits=draft_bits, sketch_bits=self.sketch_bits)

    def exact_encoding(self, dtype: str, shape: tuple[int, ...]) -> Encoding:
        """Of a tensor whose bits are not cut: it is exact as soon as it is there."""
        if dtype not in DEFAULT_DRAFT_BITS:
            return choose_encoding(dtype, shape, sketch_bits=self.sketch_bits)
        is_large = len(shape) >= 2 and math.prod(shape) >= MIN_SPLIT_ELEMENTS
        if self.sketch_bits is not None:
            return Encoding.BYTES_SKETCH if is_large else Encoding.WHOLE_SKETCH
        return Encoding.BYTES if is_large else Encoding.WHOLE

    def _check_sketch(self, sketch_bits: int) -> None:
        fewest = self.draft_bits if self.draft_bits is not None else min(DEFAULT_DRAFT_BITS.values())
        for key, bits in (
            ("draft_bits", fewest),
            ("embed_bits", self.embed_bits),
            ("head_bits", self.head_bits),
        ):
            if bits is not None and bits <= sketch_bits:
                raise UsageError(
                    f"--sketch-bits {sketch_bits} leaves a draft of {bits} mantissa bits nothing to add",
                    key="sketch_bits",
                    hint=f"Give fewer, or more {_flag(key)}.",
                )


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


# A shape that many tensors share is that of a layer's weights, which are not tied: reading those
# would be in vain. Encoder-decoder models tie four: a shared embedding, the two stacks' own, and
# the head.
_MAX_SHARING = 4
_FIRST_PIECE_BYTES = 64 * 1024  # tensors that differ do so almost always at once
_PIECE_BYTES = 4 * 1024 * 1024


def find_aliases(source: Source, checkpoint: Checkpoint, order: Sequence[str]) -> dict[str, str]:
    """Name → the name, earlier in `order`, of the tensor that it equals.

    Reads tied tensors whole, 8 MiB at a time, and little of others. Raises the source's errors.
    """
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name in order:
        entry = checkpoint.tensors[name].entry
        if len(entry.shape) == 2 and entry.size_bytes:
            alike.setdefault((entry.dtype, entry.shape), []).append(name)
    aliases: dict[str, str] = {}
    for names in alike.values():
        if len(names) > _MAX_SHARING:
            continue
        distinct: list[str] = []
        for name in names:
            twin = next((other for other in distinct if _are_equal(source, checkpoint, name, other)), None)
            if twin is None:
                distinct.append(name)
            else:
                aliases[name] = twin
    return aliases


def _are_equal(source: Source, checkpoint: Checkpoint, name: str, other: str) -> bool:
    one, two = checkpoint.tensors[name], checkpoint.tensors[other]
    for start, end in _pieces(one.entry.size_bytes):
        if _read(source, checkpoint, one, start, end) != _read(source, checkpoint, two, start, end):
            return False
    return True


def _pieces(size_bytes: int) -> Iterator[tuple[int, int]]:
    start, end = 0, min(size_bytes, _FIRST_PIECE_BYTES)
    while start < size_bytes:
        yield start, end
        start, end = end, min(size_bytes, end + _PIECE_BYTES)


def _read(source: Source, checkpoint: Checkpoint, stored: StoredTensor, start: int, end: int) -> bytearray:
    piece = bytearray(end - start)
    shard = checkpoint.shards[stored.shard]
    source.read_into(shard.name, stored.entry.begin + start, memoryview(piece), version=shard.version)
    return piece


Job = tuple[Stretch, ...]  # what becomes one part of each tier that it has


@dataclass(frozen=True, slots=True)
class PackPlan:
    """A manifest that lacks blobs, parts and files yet, and the jobs whose results they will be, in
    order.
    """

    manifest: Manifest
    jobs: tuple[Job, ...]

    @property
    def read_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.manifest.tensors)

    def uncompressed(self) -> Manifest:
        """The manifest as it would become if no plane could be compressed."""
        return _uncompressed(self.manifest, self.jobs)

    def with_metadata(self, key: str, value: str) -> PackPlan:
        """The same with one more entry in the manifest's metadata."""
        metadata = {**self.manifest.metadata, key: value}
        return PackPlan(self.manifest._replace(metadata=metadata), self.jobs)


def plan_pack(
    checkpoint: Checkpoint,
    aliases: Mapping[str, str],
    options: TierOptions | None = None,
    quantize: QuantizePlan | None = None,
) -> PackPlan:
    """The plan for all tensors but the aliases, which share the storage of others. Where some are
    quantised, it has their replacements, and everything is exact from the beginning. So it is of a
    mixture of experts, unless options ask for a draft: it would take all experts, most of them for
    no token, before the few that are chosen.

    Raises `ManifestError` now, and not after hours of packing, when the format cannot hold such a
    model.
    """
    options = options or TierOptions()
    groups, tensors = arrange_tensors(
        _stored_tensors(checkpoint, aliases, quantize),
        _encodings(checkpoint, aliases, options, quantize),
        checkpoint.groups,
    )
    jobs = tuple(
        job
        for group in groups
        for job in _jobs_of(
            group.name,
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
    """Groups that are needed whole, with any rows of a table: it had better not share a part with
    some of them.
    """
    pieces = quantize.pieces if quantize is not None else {}
    return frozenset(name for name, (_, piece) in pieces.items() if piece is not Piece.WEIGHT)


def _jobs_of(group: str, tensors: list[Tensor], *, is_end: bool, alone: frozenset[str]) -> Iterator[Job]:
    """The jobs of one group: small ones at both ends of the model, as large as a part may be
    between. Those that are called in `alone` share none with the ones before them.
    """
    max_elements = fine_part_elements(tensors) if is_end else MAX_PART_ELEMENTS
    begins = [index for index, tensor in enumerate(tensors) if index == 0 or tensor.name in alone]
    for begin, end in zip(begins, [*begins[1:], len(tensors)], strict=True):
        yield from cut_group(group, tensors[begin:end], max_elements=max_elements)


def forward_order(checkpoint: Checkpoint) -> list[str]:
    """All names, in the order in which a forward pass needs their tensors."""
    return [name for _, names in _groups(checkpoint) for name in names]


def _groups(checkpoint: Checkpoint) -> list[tuple[str, list[str]]]:
    """Of all names, those that are aliases too."""
    if checkpoint.groups is not None:
        return [(group, list(names)) for group, names in checkpoint.groups]
    return group_tensors({name: stored.entry.shape for name, stored in checkpoint.tensors.items()})


def _encodings(
    checkpoint: Checkpoint, aliases: Mapping[str, str], options: TierOptions, quantize: QuantizePlan | None
) -> Callable[[str, str, tuple[int, ...]], Encoding]:
    """The encoding of each tensor, by its name, dtype and shape."""
    if quantize is not None or checkpoint.groups is not None:
        return lambda name, dtype, shape: options.exact_encoding(dtype, shape)
    if options == TierOptions() and any(is_expert(group) for group, _ in _groups(checkpoint)):
        return lambda name, dtype, shape: choose_encoding(dtype, shape, draft_bits=_ALL_BITS)
    return _tiered_encodings(checkpoint, aliases, options)


def _tiered_encodings(
    checkpoint: Checkpoint, aliases: Mapping[str, str], options: TierOptions
) -> Callable[[str, str, tuple[int, ...]], Encoding]:
    """The encoding of each tensor, by its name, dtype and shape, according to the groups in which
    it is used.

    Embeddings may be used as the head without a name there: a model without a matrix in the head
    uses them so.
    """
    used_in: dict[str, set[str]] = defaultdict(set)
    has_head = False
    for group, names in _groups(checkpoint):
        for name in names:
            used_in[aliases.get(name, name)].add(group)
            has_head |= group == HEAD and len(checkpoint.tensors[name].entry.shape) >= 2
    is_decoder = any(map(_OF_DECODERS.fullmatch, checkpoint.tensors))

    def encoding_of(name: str, dtype: str, shape: tuple[int, ...]) -> Encoding:
        if is_scale(name, checkpoint):
            return options.exact_encoding(dtype, shape)
        groups = used_in[name]
        if not has_head and EMBED in groups:
            groups = groups | {HEAD}
        more = groups if _VALUES.fullmatch(name) else {HEAD} if is_decoder else ()
        return options.encoding(groups, dtype, shape, more=more)

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
