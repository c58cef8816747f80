"""A model directory as Hugging Face writes it: its tensors, where each lies in its files, and the
manifest of a load from there.

Any directory with safetensors files is a checkpoint, with or without a `config.json`; weights in
sub-folders are not looked for. Only headers are read here, never tensor content.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from typing import NamedTuple

from ..errors import CheckpointError, TeneralError
from ..process.cpu import parallel_map
from ..sources.base import ObjectInfo, Remote, Source
from .checkpoint_files import CONNECTIONS, SINGLE_NAME, choose_shards, find_objects, left_out, small_files
from .layout import Stretch, arrange_tensors, cut_group, fine_part_elements, group_tensors
from .manifest import (
    DTYPE_BITS,
    MAX_PART_ELEMENTS,
    Blob,
    Codec,
    Encoding,
    File,
    Group,
    Manifest,
    Part,
    Plane,
    Segment,
    StatedDigest,
    Tensor,
    Tier,
)
from .safetensors import FIRST_READ_BYTES, MAX_TENSORS, SafetensorsFile, TensorEntry, read_header

# A tensor of this size is read on its own, straight into its slab; smaller neighbours share a part
# and so a request.
MIN_DIRECT_BYTES = 4 * 1024 * 1024
MAX_SHARED_PART_BYTES = 16 * 1024 * 1024


_STACKED = re.compile(r"(.*\.(?:mlp|feed_forward|[0-9]+)\.experts\.)(gate_up|down)_proj")
_STACKED_LINEARS = re.compile(r"(.*\.block_sparse_moe\.)(input|output)_linear\.weight")  # Granite's
_FLOATS = ("BF16", "F16", "F32")


class StoredTensor(NamedTuple):
    """A tensor and the number of the shard whose bytes [entry.begin, entry.end) are its content."""

    entry: TensorEntry
    shard: int


class Checkpoint(NamedTuple):
    """A checked directory. `shards` and `files` carry the versions that were seen, so changes are
    noticed.
    """

    url: str
    shards: tuple[ObjectInfo, ...]
    tensors: dict[str, StoredTensor]
    files: tuple[ObjectInfo, ...]
    metadata: dict[str, str]  # of all shards; where two disagree the first in name order counts
    # Groups and their tensors in forward order, where something knows better than the tensors' names.
    groups: tuple[tuple[str, tuple[str, ...]], ...] | None = None
    left_out: tuple[str, ...] = ()  # names of files that look like settings, but are not known
    stated: tuple[StatedDigest | None, ...] = ()  # of each shard, where the store states any

    @property
    def weight_bytes(self) -> int:
        return sum(stored.entry.size_bytes for stored in self.tensors.values())


def open_checkpoint(source: Source) -> Checkpoint:
    """Find the weights and small files of a model directory and read all safetensors headers.

    Raises `CheckpointError` for a directory that is damaged, hostile, incomplete or of another
    format, `NotFoundError` for one that is empty or absent, and the source's own errors.
    """
    guess = _Guess(source) if isinstance(source, Remote) else None
    found = find_objects(source)
    shards = choose_shards(source, found)

    def read(info: ObjectInfo) -> SafetensorsFile:
        return read_header(source, info, start=b"" if guess is None else guess.start_of(info))

    headers = parallel_map(read, shards.infos, num_threads=CONNECTIONS)
    tensors = _merge(shards.infos, headers)
    _check_index(shards.weight_map, tensors, shards.infos)
    metadata: dict[str, str] = {}
    for header in reversed(headers):
        metadata.update(header.metadata)
    return Checkpoint(
        source.url,
        shards.infos,
        tensors,
        small_files(found),
        metadata,
        left_out=left_out(found),
        stated=tuple(map(_stated, shards.infos, headers)),
    )


def with_experts_apart(checkpoint: Checkpoint, *, takes_columns: bool) -> Checkpoint:
    """The checkpoint as one with a tensor for each expert's matrix, in place of those in rows that transformers and
    Granite have: (experts, 2 * size, hidden), gates before ups, and (experts, hidden, size). Granite's gates and ups
    stay together. The bytes lie where they did. With `takes_columns` those with the inputs first (Llama 4), too: gates
    and ups of an expert are one matrix then. Tensors in another order, as gpt-oss has them, stay.

    Raises `CheckpointError` where these were too many.
    """
    if checkpoint.groups is not None:
        return checkpoint
    tensors: dict[str, StoredTensor] = {}
    for name, stored in checkpoint.tensors.items():
        parts = _parts_of_stacked(checkpoint, name, takes_columns=takes_columns)
        if not parts:
            tensors[name] = stored
            continue
        entry = stored.entry
        num_experts, rows, columns = entry.shape
        if len(tensors) + num_experts * len(parts) > MAX_TENSORS:
            raise CheckpointError(f"{name} and others hold more than {MAX_TENSORS} matrices", where=name)
        size = entry.size_bytes // (num_experts * len(parts))
        for number in range(num_experts * len(parts)):
            before, after = parts[number % len(parts)]
            own = f"{before}{number // len(parts)}{after}"
            begin = entry.begin + number * size
            part = entry._replace(
                name=own, shape=(rows // len(parts), columns), begin=begin, end=begin + size
            )
            tensors[own] = StoredTensor(part, stored.shard)
    return checkpoint._replace(tensors=tensors)


def _parts_of_stacked(checkpoint: Checkpoint, name: str, *, takes_columns: bool) -> list[tuple[str, str]]:
    """The names of an expert's matrices that the tensor of this name has, before and after its number; none: it holds
    no experts that are taken apart.
    """
    if found := _STACKED.fullmatch(name):
        both = [f"{found[1]}{kind}_proj" for kind in ("gate_up", "down")]
        if _is_in_rows(checkpoint, both):
            parts: tuple[str, ...] = ("gate", "up") if name == both[0] else ("down",)
        elif takes_columns and _is_in_columns(checkpoint, both):
            parts = (found[2],)
        else:
            parts = ()
        return [(found[1], f".{part}_proj.weight") for part in parts]
    if found := _STACKED_LINEARS.fullmatch(name):
        both = [f"{found[1]}{kind}_linear.weight" for kind in ("input", "output")]
        own = f"{found[1]}experts.", f".{found[2]}_linear.weight"
        return [own] if _is_in_rows(checkpoint, both) else []
    return []


def _is_in_rows(checkpoint: Checkpoint, both: list[str]) -> bool:
    """True if both tensors of a layer's experts have floats, and shapes that fit each other."""
    shapes = _shapes_of_experts(checkpoint, both)
    return len(shapes) == 2 and shapes[0] == (shapes[1][0], 2 * shapes[1][2], shapes[1][1])


def _is_in_columns(checkpoint: Checkpoint, both: list[str]) -> bool:
    """The same of those with the inputs first. gpt-oss's, in which gates and ups alternate, have biases."""
    shapes = _shapes_of_experts(checkpoint, both)
    has_biases = f"{both[0]}_bias" in checkpoint.tensors
    return len(shapes) == 2 and not has_biases and shapes[0] == (shapes[1][0], shapes[1][2], 2 * shapes[1][1])


def _shapes_of_experts(checkpoint: Checkpoint, both: list[str]) -> list[tuple[int, ...]]:
    """Of both tensors of a layer's experts, where these are floats; else of none."""
    found = [checkpoint.tensors.get(name) for name in both]
    entries = [stored.entry for stored in found if stored is not None]
    if any(entry.dtype not in _FLOATS or len(entry.shape) != 3 or 0 in entry.shape for entry in entries):
        return []
    return [entry.shape for entry in entries]


def _stated(info: ObjectInfo, header: SafetensorsFile) -> StatedDigest | None:
    if info.sha256 is None or header.head_sha256 is None:
        return None
    return StatedDigest(info.sha256, header.data_start, header.head_sha256)


class _Guess:
    """The beginning of the file that most models have their weights in, asked for while it is being
    found out which files there are: a request in vain for those that have others.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._start = bytearray(FIRST_READ_BYTES)
        self._version: str | None = None  # of what was read
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def start_of(self, info: ObjectInfo) -> bytes:
        """The file's first bytes, if they are what was read. Waits for that if they may be."""
        if info.name != SINGLE_NAME:
            return b""
        self._thread.join()
        return bytes(self._start) if self._version == info.version else b""

    def _read(self) -> None:
        # There is no such file, or it is shorter, or the store is ill: a later read will report
        # that.
        with suppress(TeneralError):
            self._version = self._source.read_into(SINGLE_NAME, 0, memoryview(self._start))


def manifest_of(checkpoint: Checkpoint) -> Manifest:
    """The manifest of plain safetensors: nothing has a digest, everything is exact as soon as it is
    there.

    Its blobs are the shard files. A part is a stretch of one; large tensors have parts of their
    own, which can be read straight into the slab, and small ones share parts with their neighbours
    in the file.
    """
    groups, tensors = arrange_tensors(
        {name: (stored.entry.dtype, stored.entry.shape) for name, stored in checkpoint.tensors.items()},
        lambda name, dtype, shape: Encoding.WHOLE,
    )
    return _manifest(checkpoint, groups, tensors)


def manifest_in_place(checkpoint: Checkpoint) -> Manifest | None:
    """The manifest of the same weights where they lie in their files: every slab is a stretch of
    one of them, and so has a group of its own (`layers.3`, `layers.3-2`, …) where a layer's tensors
    lie apart.

    None where a tensor does not begin at a multiple of its elements' size, so that it cannot be
    computed with there.
    """
    stored = checkpoint.tensors
    if any(each.entry.begin % (DTYPE_BITS[each.entry.dtype] + 7 >> 3) for each in stored.values()):
        return None
    groups: list[Group] = []
    tensors: list[Tensor] = []
    for label, names in group_tensors({name: each.entry.shape for name, each in stored.items()}):
        for number, run in enumerate(_stretches(names, stored), 1):
            begin, first = stored[run[0]].entry.begin, len(tensors)
            for name in run:
                entry = stored[name].entry
                offset = entry.begin - begin
                tensors.append(
                    Tensor(len(tensors), name, entry.dtype, entry.shape, len(groups), Encoding.WHOLE, offset)
                )
            members = tuple(range(first, len(tensors)))
            name = label if number == 1 else f"{label}-{number}"
            groups.append(Group(len(groups), name, members, stored[run[-1]].entry.end - begin))
    return _manifest(checkpoint, tuple(groups), tuple(tensors))


def _stretches(names: Iterable[str], stored: Mapping[str, StoredTensor]) -> Iterator[list[str]]:
    """The names in file order, as runs that lie back to back in one file."""
    run: list[str] = []
    for name in sorted(names, key=lambda each: (stored[each].shard, stored[each].entry.begin)):
        before = stored[run[-1]] if run else None
        if before and (before.shard, before.entry.end) != (stored[name].shard, stored[name].entry.begin):
            yield run
            run = []
        run.append(name)
    if run:
        yield run


def _manifest(checkpoint: Checkpoint, groups: tuple[Group, ...], tensors: tuple[Tensor, ...]) -> Manifest:
    """Of plain files, whose stretches are its parts."""
    places = [checkpoint.tensors[tensor.name] for tensor in tensors]
    parts: list[Part] = []
    for group in groups:
        members = [tensors[index] for index in group.tensors]
        for run in _runs(members, places):
            # Rows of embeddings are asked for one by one.
            is_table = group is groups[0] and len(run) == 1 and len(run[0].shape) == 2
            most = fine_part_elements(members) if is_table else MAX_PART_ELEMENTS
            for stretches in cut_group(group.name, run, max_elements=most):
                parts.append(_stored_part(len(parts), stretches, places))
    return Manifest(
        generator="safetensors",
        blobs=tuple(
            Blob(shard.name, shard.size_bytes, shard.version, stated)
            for shard, stated in zip_longest(checkpoint.shards, checkpoint.stated)
        ),
        files=tuple(
            File(info.name, info.name, info.size_bytes, None, info.version) for info in checkpoint.files
        ),
        groups=groups,
        tensors=tensors,
        parts=tuple(parts),
        aliases={},
        metadata=checkpoint.metadata,
    )


def _runs(tensors: Iterable[Tensor], places: list[StoredTensor]) -> Iterator[list[Tensor]]:
    """A group's tensors in file order, as runs without gaps in one file: one large tensor, or small
    ones.
    """
    run: list[Tensor] = []
    for tensor in sorted(
        tensors, key=lambda each: (places[each.index].shard, places[each.index].entry.begin)
    ):
        if tensor.size_bytes == 0:
            continue
        if run and not (
            places[run[-1].index].shard == places[tensor.index].shard
            and places[run[-1].index].entry.end == places[tensor.index].entry.begin
            and max(run[-1].size_bytes, tensor.size_bytes) < MIN_DIRECT_BYTES
            and sum(each.size_bytes for each in run) + tensor.size_bytes <= MAX_SHARED_PART_BYTES
        ):
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _stored_part(index: int, stretches: tuple[Stretch, ...], places: list[StoredTensor]) -> Part:
    """A part whose segments lie back to back in the file as they do in `stretches`."""
    first = stretches[0]
    segments: list[Segment] = []
    size_bytes = 0
    for stretch in stretches:
        plane = Plane(Codec.RAW, size_bytes, stretch.size_bytes)
        segments.append(Segment(stretch.tensor.index, stretch.start, stretch.count, (plane,)))
        size_bytes += stretch.size_bytes
    place = places[first.tensor.index]
    return Part(
        index=index,
        tier=Tier.DRAFT,
        group=first.tensor.group,
        blob=place.shard,
        offset_bytes=place.entry.begin + first.offset_bytes,
        size_bytes=size_bytes,
        digest=None,
        segments=tuple(segments),
    )


def _merge(infos: tuple[ObjectInfo, ...], headers: list[SafetensorsFile]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for shard, header in enumerate(headers):
        for name, entry in header.entries.items():
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name} is both in {infos[tensors[name].shard].name} and in {infos[shard].name}",
                    where=name,
                    hint="Are these files of two models? Keep one model a folder.",
                )
            tensors[name] = StoredTensor(entry, shard)
        if len(tensors) > MAX_TENSORS:
            raise CheckpointError(f"the model has more than {MAX_TENSORS} tensors", where=infos[shard].name)
    return tensors


def _check_index(
    weight_map: Mapping[str, str], tensors: Mapping[str, StoredTensor], infos: tuple[ObjectInfo, ...]
) -> None:
    for name, shard_name in weight_map.items():
        stored = tensors.get(name)
        if stored is None or infos[stored.shard].name != shard_name:
            raise CheckpointError(
                f"the index says that tensor {name[:100]!r} is in {shard_name}, but it is not",
                where=shard_name,
                hint="Index and shards are of different downloads: fetch them again.",
            )
