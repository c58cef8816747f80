"""`teneral unpack`: an artifact back into a directory of safetensors and small files, each tensor and file bit for bit.

The safetensors files themselves may differ from those that were packed: tensors are in the order of the forward pass,
and in as many files as `max_shard_bytes` asks.

Tensors get their original names, tied ones included, which are written out as often as they have
names. A model of more than `max_shard_bytes` becomes several files with an index. Everything is
written into a hidden folder inside the target and renamed at the end, so the target holds all of it
or nothing.

Parts are decoded into the files in any order and from several threads: room for all tensors is
reserved first, then every part's segments go to their places. What one tier says of a split tensor
is written, and read back when the next one's part comes, so that memory holds no more than the
parts in work.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..artifact import open_artifact, read_file
from ..errors import AlreadyExistsError, LoadCancelledError, ManifestError
from ..format.checkpoint_files import INDEX_NAME, INDEX_SUFFIX, SINGLE_NAME, SUFFIX
from ..format.manifest import Manifest, Part, Segment, Tensor, Tier
from ..format.safetensors import TensorSpec, make_header
from ..format.tensor_digests import FILE_NAME as DIGESTS_NAME
from ..sources.base import Source
from ..sources.file.writer import Folder
from .part_reader import PartReader, map_in_order
from .progress_bar import TransferProgress, format_bytes, format_duration

if TYPE_CHECKING:
    from .part_reader import Bytes

MAX_SHARD_BYTES = 5_000_000_000  # what Hugging Face's own tools write


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file to be written, with its tensors in the order of their bytes."""

    file_name: str
    names: tuple[str, ...]


def plan_shards(manifest: Manifest, max_shard_bytes: int = MAX_SHARD_BYTES) -> tuple[Shard, ...]:
    """The names that go into each file; aliases get copies of their own.

    Tensors with large elements come first, so that all are aligned in the file, and otherwise stay
    in forward order.
    """
    names = sorted(manifest.by_name, key=lambda name: -manifest.by_name[name].element_bytes)
    shards: list[list[str]] = [[]]
    filled_bytes = 0
    for name in names:
        size_bytes = manifest.by_name[name].size_bytes
        if shards[-1] and filled_bytes + size_bytes > max_shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(name)
        filled_bytes += size_bytes
    if len(shards) == 1:
        return (Shard(SINGLE_NAME, tuple(names)),)
    return tuple(
        Shard(f"model-{number:05}-of-{len(shards):05}{SUFFIX}", tuple(members))
        for number, members in enumerate(shards, start=1)
    )


def write_shards(
    source: Source,
    manifest: Manifest,
    shards: tuple[Shard, ...],
    folder: Path,
    *,
    threads: int | None,
    progress: Callable[[TransferProgress], None] | None,
) -> None:
    """Create the files, and their index if there are several, and decode all parts into them.

    Raises `OSError`, before anything is read, when there is no room; `IntegrityError` naming the
    bad part; and the source's errors. What it leaves behind on a failure is the caller's to remove.
    """
    with ExitStack() as opened:
        places = _create_files(shards, manifest, folder, opened)
        unpacker = _PartUnpacker(PartReader(source, manifest), manifest, places)
        ordered = sorted(manifest.parts, key=lambda part: (part.group, *_stage(part), part.index))
        total_bytes = sum(part.size_bytes for part in ordered)
        done_bytes = 0
        written = opened.enter_context(closing(map_in_order(unpacker.write, ordered, threads)))
        for part, _ in zip(ordered, written, strict=True):
            done_bytes += part.size_bytes
            if progress is not None:
                progress(TransferProgress(done_bytes, total_bytes))
    if len(shards) > 1:
        (folder / INDEX_NAME).write_bytes(_index_of(shards, manifest))


def _index_of(shards: tuple[Shard, ...], manifest: Manifest) -> bytes:
    weight_map = {name: shard.file_name for shard in shards for name in shard.names}
    total_bytes = sum(manifest.by_name[name].size_bytes for name in weight_map)
    document = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class _FileOffset:
    """The offset of a tensor's bytes in an open file."""

    fd: int
    offset_bytes: int


def _create_files(
    shards: tuple[Shard, ...], manifest: Manifest, folder: Path, opened: ExitStack
) -> dict[int, list[_FileOffset]]:
    """Files with headers and room for all tensors. Returns where each goes; a tied one has several
    places.
    """
    places: dict[int, list[_FileOffset]] = {}
    for shard in shards:
        tensors = [manifest.by_name[name] for name in shard.names]
        specs = [
            TensorSpec(name, tensor.dtype, tensor.shape)
            for name, tensor in zip(shard.names, tensors, strict=True)
        ]
        header, layout = make_header(specs, manifest.metadata, where=shard.file_name)
        fd = os.open(folder / shard.file_name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        opened.callback(os.close, fd)
        _reserve(fd, layout.size_bytes)
        _write_at(fd, memoryview(header), 0)
        for name, tensor in zip(shard.names, tensors, strict=True):
            places.setdefault(tensor.index, []).append(_FileOffset(fd, layout.entries[name].begin))
    return places


_Stage = tuple[Tier, bool]


def _stage(part: Part) -> _Stage:
    """When a part is written: tier by tier, and differences after all of their base."""
    return part.tier, part.has_delta


_STAGES = [(tier, has_delta) for tier in Tier for has_delta in (False, True)]


class _TiersBefore:
    """The groups of which all parts of a tier, or of a stage of it, are in the files."""

    def __init__(self, manifest: Manifest) -> None:
        self._left = Counter((part.group, _stage(part)) for part in manifest.parts)
        self._failed: set[tuple[int, _Stage]] = set()
        self._changed = threading.Condition()

    @contextmanager
    def counted(self, part: Part) -> Iterator[None]:
        """The block writes the part."""
        try:
            yield
        except BaseException:
            self._failed.add((part.group, _stage(part)))
            raise
        finally:
            with self._changed:
                self._left[part.group, _stage(part)] -= 1
                self._changed.notify_all()

    def wait(self, part: Part) -> None:
        """Until all parts of the tiers before are written that its group has; they must have been
        begun. Raises when one failed.
        """
        before = [(part.group, stage) for stage in _STAGES if stage < _stage(part)]
        with self._changed:
            self._changed.wait_for(lambda: not any(self._left[key] for key in before))
        if not self._failed.isdisjoint(before):  # of its own tier, or a later one, is no concern of this part
            raise LoadCancelledError(
                "a part of a tier before could not be written"
            )  # whose own error is reported


class _PartUnpacker:
    """Writes parts into the files. Thread-safe: parts of one tier never share elements."""

    def __init__(self, reader: PartReader, manifest: Manifest, places: dict[int, list[_FileOffset]]) -> None:
        self._reader = reader
        self._manifest = manifest
        self._places = places
        self._before = _TiersBefore(manifest)

    def write(self, part: Part) -> None:
        """Verify, decode and write one part. Of a group, each tier's parts must be begun before the
        next one's.
        """
        with self._before.counted(part):
            stored = self._reader.read(part)
            self._before.wait(part)
            for segment in part.segments:
                self._write(part, segment, stored)

    def _write(self, part: Part, segment: Segment, stored: memoryview) -> None:
        tensor = self._manifest.tensors[segment.tensor]
        offset_bytes = segment.start * tensor.element_bytes
        out = self._reader.workspace(segment)
        if segment.is_delta or part.tier is not tensor.encoding.tiers[0]:
            self._read_back(tensor, offset_bytes, out)
        self._reader.decode(part, segment, stored, out)
        for place in self._places[tensor.index]:
            _write_at(place.fd, out.data, place.offset_bytes + offset_bytes)

    def _read_back(self, tensor: Tensor, offset_bytes: int, out: Bytes) -> None:
        place = self._places[tensor.index][0]
        view, done = out.data, 0
        while done < len(view):
            count = os.preadv(place.fd, [view[done:]], place.offset_bytes + offset_bytes + done)
            if count == 0:
                raise OSError("another process has cut off a file that is being written")
            done += count


def _write_at(fd: int, data: memoryview, offset_bytes: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset_bytes + done)


def _reserve(fd: int, size_bytes: int) -> None:
    """Make the file so large, on the disk where the file system can promise that."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        os.ftruncate(fd, size_bytes)


@dataclass(frozen=True, slots=True)
class UnpackResult:
    """`files` are relative to `directory`, the safetensors first."""

    directory: Path
    files: tuple[str, ...]
    num_tensors: int
    size_bytes: int  # of the tensors, tied ones counted as often as they were written
    elapsed_s: float

    def render(self) -> str:
        """A line for people."""
        what = f"{self.num_tensors} tensors, {format_bytes(self.size_bytes)}"
        return f"unpacked {what}, into {self.directory} in {format_duration(self.elapsed_s)}"


def unpack(
    source: Source,
    directory: str | os.PathLike[str],
    *,
    digest: bytes | None = None,
    force: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    threads: int | None = None,
    progress: Callable[[TransferProgress], None] | None = None,
) -> UnpackResult:
    """Write the model in `source` to `directory`, which is made where it is missing. Blocks.

    The directory must be empty; with `force`, a model that stands there is replaced, and other
    files stay. Every part is verified before it is decoded. Raises `AlreadyExistsError`,
    `IntegrityError` naming the bad part, `NoSpaceError`, and the source's errors; nothing is left
    behind. Memory: as `verify`.
    """
    started_s = time.monotonic()
    manifest = open_artifact(source, digest=digest)
    target = Path(os.path.abspath(directory))
    shards = plan_shards(manifest, max_shard_bytes)
    with _staging_folder(target, force=force) as staging:
        write_shards(source, manifest, shards, staging, threads=threads, progress=progress)
        _write_files(source, manifest, staging)
        files = _publish(staging, target)
    names = [name for shard in shards for name in shard.names]
    return UnpackResult(
        directory=target,
        files=files,
        num_tensors=len(names),
        size_bytes=sum(manifest.by_name[name].size_bytes for name in names),
        elapsed_s=time.monotonic() - started_s,
    )


@contextmanager
def _staging_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """A hidden folder inside the target, which is made where it is missing; both go again on a
    failure.

    Errors of the operating system become the loader's own.
    """
    if target.exists() and (not target.is_dir() or (not force and any(target.iterdir()))):
        raise AlreadyExistsError(
            f"{target} is {'not empty' if target.is_dir() else 'a file'}",
            source=str(target),
            hint="Give another directory, or replace the model that stands there with --force.",
        )
    folder = Folder(target)
    with folder.translated(""):
        folder.make(folder.root)
        staging = target / f".unpacking-{secrets.token_hex(4)}"
        try:
            staging.mkdir()
            yield staging
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            folder.prune(folder.root)
            raise
        shutil.rmtree(staging, ignore_errors=True)


def _write_files(source: Source, manifest: Manifest, staging: Path) -> None:
    """The small files, each verified. Raises `ManifestError` when one of them would stand for
    weights.
    """
    for file in manifest.files:
        if file.name == DIGESTS_NAME:
            continue  # about the tensors, not the model's own
        if _is_weights(file.name):
            raise ManifestError(
                f"the artifact carries {file.name} as a small file, where its weights would be written",
                where=file.name,
                hint="It was not written by `teneral pack`: get it from a source you trust.",
            )
        path = staging / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read_file(source, manifest, file.name))


def _publish(staging: Path, target: Path) -> tuple[str, ...]:
    """Move what is complete to where it belongs.

    Weights of a model that stood there go first: the two must not be mixed.
    """
    names = sorted(
        (path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file()),
        key=lambda name: (not _is_weights(name), name),
    )
    for old in target.iterdir():
        if _is_weights(old.name):
            old.unlink()
    try:
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / name, target / name)
    except BaseException:
        for name in names:
            if not (staging / name).exists():
                (target / name).unlink(missing_ok=True)
        raise
    return tuple(names)


def _is_weights(name: str) -> bool:
    return name.endswith((SUFFIX, INDEX_SUFFIX))
