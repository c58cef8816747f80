"""A model directory as Hugging Face writes it: which files hold its weights, and where in them each
tensor lies.

Works on any source, also on one that cannot list its objects: the usual names are tried there. Any
directory with safetensors files is a checkpoint, with or without a `config.json`; weights in
sub-folders are not looked for. Everything read is distrusted. Only headers are read here, never
tensor content, and never a pickle.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from ..errors import AccessDeniedError, CheckpointError, NotFoundError, TeneralError, UsageError
from ..process.cpu import parallel_map
from ..sources.base import ObjectInfo, Remote, Source, check_name
from .layout import Stretch, arrange_tensors, cut_group, fine_part_elements, group_tensors
from .limits import MAX_SMALL_FILE_BYTES
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
    Tensor,
    Tier,
)
from .safetensors import FIRST_READ_BYTES, MAX_TENSORS, Entry, SafetensorsFile, decode_object, read_header

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

# What goes along with the weights. A list of known names, so that sources that cannot list behave
# like those that can, and that no code, no pickle and no second copy of the weights is ever
# carried.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "NOTICE.txt",
)
# Of models with a modules.json, which sentence-transformers writes: layers behind the pooling, with their weights.
DENSE_FILES = tuple(
    f"{folder}/{name}" for folder in ("2_Dense", "3_Dense") for name in ("config.json", SINGLE_NAME)
)
MAX_INDEX_BYTES = 64 * 1024 * 1024
MAX_SHARDS = 4096
MAX_LISTED = 10_000

# A tensor of this size is read on its own, straight into its slab; smaller neighbours share a part
# and so a request.
MIN_DIRECT_BYTES = 4 * 1024 * 1024
MAX_SHARED_PART_BYTES = 16 * 1024 * 1024

_OTHER_FORMATS = {
    ".bin": "pickled weights",
    ".pt": "pickled weights",
    ".pth": "pickled weights",
    ".ckpt": "pickled weights",
    ".gguf": "a GGUF file",
    ".h5": "TensorFlow weights",
    ".msgpack": "Flax weights",
    ".onnx": "an ONNX model",
}
_CONVERT_HINT = (
    "Only safetensors are read, which cannot run code. Convert the model once, with transformers: "
    "AutoModel.from_pretrained(DIR).save_pretrained(NEW_DIR, safe_serialization=True)."
)
_PACK_ONNX_HINT = "Pack it, and serve what that makes: teneral pack FOLDER/model.onnx ARTIFACT"
_CONNECTIONS = 8


class StoredTensor(NamedTuple):
    """A tensor and the number of the shard whose bytes [entry.begin, entry.end) are its content."""

    entry: Entry
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

    @property
    def weight_bytes(self) -> int:
        return sum(stored.entry.size_bytes for stored in self.tensors.values())


def open_checkpoint(source: Source) -> Checkpoint:
    """Find the weights and small files of a model directory and read all safetensors headers.

    Raises `CheckpointError` for a directory that is damaged, hostile, incomplete or of another
    format, `NotFoundError` for one that is empty or absent, and the source's own errors.
    """
    guess = _Guess(source) if isinstance(source, Remote) else None
    found = _find_objects(source)
    shards = _choose_shards(source, found)

    def read(info: ObjectInfo) -> SafetensorsFile:
        return read_header(source, info, start=b"" if guess is None else guess.start_of(info))

    headers = parallel_map(read, shards.infos, num_threads=_CONNECTIONS)
    tensors = _merge(shards.infos, headers)
    _check_index(shards.weight_map, tensors, shards.infos)
    metadata: dict[str, str] = {}
    for header in reversed(headers):
        metadata.update(header.metadata)
    return Checkpoint(source.url, shards.infos, tensors, _small_files(found), metadata)


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
        blobs=tuple(Blob(shard.name, shard.size_bytes, shard.version) for shard in checkpoint.shards),
        files=tuple(File(info.name, info.name, info.size_bytes, None) for info in checkpoint.files),
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


def _find_objects(source: Source) -> dict[str, ObjectInfo]:
    """The directory's objects by name; where it cannot be listed, those of the usual names that
    exist.
    """
    try:
        listed = list(itertools.islice(source.list(), MAX_LISTED + 1))
    except UsageError:
        return _try_usual_names(source)
    except AccessDeniedError as error:
        if not error.may_be_absent:  # the credentials are refused, and not the right to list
            raise
        return _try_usual_names(source)
    if len(listed) > MAX_LISTED:
        raise CheckpointError(
            f"{source.url} holds more than {MAX_LISTED} objects",
            where=source.url,
            hint="Give the folder of one model.",
        )
    if not listed:
        raise NotFoundError(
            f"there is nothing at {source.url}",
            source=source.url,
            hint="Check the address; for S3 it is s3://BUCKET/FOLDER, for Cloud Storage gs://BUCKET/FOLDER.",
        )
    return {info.name: info for info in listed}


def _try_usual_names(source: Source) -> dict[str, ObjectInfo]:
    """Raises `AccessDeniedError` for an object that is denied, unless the store denies absent
    objects as well and the weights are among those that it gives.
    """
    denied: list[AccessDeniedError] = []

    def look(name: str) -> ObjectInfo | None:
        try:
            return source.stat(name)
        except NotFoundError:
            return None
        except AccessDeniedError as error:
            denied.append(error)
            return None

    names = (SINGLE_NAME, INDEX_NAME, *SMALL_FILES, "pytorch_model.bin", "pytorch_model.bin.index.json")
    found = [info for info in parallel_map(look, names, num_threads=_CONNECTIONS) if info is not None]
    names_found = {info.name: info for info in found}
    if "modules.json" in names_found:
        more = parallel_map(look, DENSE_FILES, num_threads=_CONNECTIONS)
        names_found |= {info.name: info for info in more if info is not None}
    if denied:
        _check_denied(source, denied, names_found)
    return names_found


def _check_denied(source: Source, denied: list[AccessDeniedError], found: Mapping[str, ObjectInfo]) -> None:
    from ..sources.base import denies_absent, undecided  # only after a denial

    refused = next((error for error in denied if not error.may_be_absent), None)
    if refused is not None:
        raise refused
    if not found or not denies_absent(source):
        raise denied[0]
    weights = (SINGLE_NAME, INDEX_NAME)
    if not any(name in found for name in weights) and any(error.name in weights for error in denied):
        raise undecided(source, " or ".join(weights))


class _Shards(NamedTuple):
    infos: tuple[ObjectInfo, ...]
    weight_map: Mapping[str, str]  # tensor → shard name, as the index says; empty without one


def _choose_shards(source: Source, found: Mapping[str, ObjectInfo]) -> _Shards:
    """The files that hold the weights: one of the usual name, else those of the index, else all
    there are.
    """
    if SINGLE_NAME in found:
        return _Shards((found[SINGLE_NAME],), {})
    here = sorted(name for name in found if "/" not in name)
    indices = [name for name in here if name.endswith(INDEX_SUFFIX)]
    if indices:
        index = INDEX_NAME if INDEX_NAME in indices else indices[0]
        if len(indices) > 1 and index != INDEX_NAME:
            raise CheckpointError(
                f"{source.url} holds several models: {', '.join(indices)[:200]}",
                where=source.url,
                hint="Move each into a folder of its own.",
            )
        data, _ = source.read(index, max_bytes=MAX_INDEX_BYTES)
        weight_map = parse_index(data, where=index)
        return _Shards(_find_shards(source, found, sorted(set(weight_map.values())), index), weight_map)
    names = [name for name in here if name.endswith(SUFFIX)]
    if not names:
        raise _no_weights(source, found)
    return _Shards(tuple(found[name] for name in names), {})


def parse_index(data: bytes, *, where: str) -> dict[str, str]:
    """The weight map of an index file: tensor name → shard next to the index. Raises
    `CheckpointError`.
    """
    weight_map = decode_object(data, where=where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where} has no weight_map", where=where)
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_shard_name(shard):
            raise CheckpointError(
                f"{where}: tensor {tensor[:100]!r} is listed in {str(shard)[:100]!r}, "
                "which is not a safetensors file of this folder",
                where=where,
            )
    if len(set(weight_map.values())) > MAX_SHARDS:
        raise CheckpointError(f"{where} names more than {MAX_SHARDS} shards", where=where)
    return weight_map


def _is_shard_name(name: str) -> bool:
    try:
        return check_name(name).endswith(SUFFIX) and "/" not in name
    except UsageError:
        return False


def _find_shards(
    source: Source, found: Mapping[str, ObjectInfo], names: list[str], index: str
) -> tuple[ObjectInfo, ...]:
    infos: list[ObjectInfo] = []
    missing: list[str] = []
    for name in names:
        try:
            infos.append(found[name] if name in found else source.stat(name))
        except NotFoundError:
            missing.append(name)
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(names)} files named in {index} are missing: {', '.join(missing)[:300]}",
            where=index,
            hint="The download is incomplete: fetch the missing files.",
        )
    return tuple(infos)


def _no_weights(source: Source, found: Mapping[str, ObjectInfo]) -> CheckpointError:
    for name in sorted(found):
        suffix = name[name.rfind(".") :] if "." in name else ""
        if suffix in _OTHER_FORMATS:
            return CheckpointError(
                f"{source.url} holds {_OTHER_FORMATS[suffix]} ({name}) and no safetensors",
                where=source.url,
                hint=_PACK_ONNX_HINT if suffix == ".onnx" else _CONVERT_HINT,
            )
    return CheckpointError(
        f"{source.url} holds neither manifest.json nor safetensors files",
        where=source.url,
        hint=f"Give the folder of an artifact, or of a model with {SINGLE_NAME} or {INDEX_NAME}.",
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


def _small_files(found: Mapping[str, ObjectInfo]) -> tuple[ObjectInfo, ...]:
    files = tuple(found[name] for name in (*SMALL_FILES, *DENSE_FILES) if name in found)
    for info in files:
        if info.size_bytes > MAX_SMALL_FILE_BYTES:
            raise CheckpointError(
                f"{info.name} has {info.size_bytes} bytes, of {MAX_SMALL_FILE_BYTES} allowed",
                where=info.name,
            )
    return files
