"""Pack a model directory into an artifact: read, encode and write in a bounded pipeline, the manifest last.

Any directory with safetensors files packs, whether or not it has a `config.json`. The artifact exists whole
or not at all: everything is written under names of its own, the manifest is put last and only if nobody else
put one meanwhile, and on any failure, Ctrl-C included, what was written is removed.

Memory: `threads` + 1 parts are in work. Each takes its tensors' bytes (at most 64 MiB; 32 MiB of bf16), what
they become (not more), and while it is encoded up to three times its largest tensor's stretch. For bf16 on
two cores: under 400 MiB.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from .. import __version__
from .aliases import find_aliases
from .artifact import is_artifact
from .blob_writer import FOLDER, BlobWriter
from .checkpoint import Checkpoint, open_checkpoint
from .codec import choose_encoding
from .encoder import EncodedPart, Encoder, buffer_bytes
from .errors import AlreadyExistsError, FormatError, NotFoundError, SourceError, UsageError
from .grouping import group_tensors
from .layout import Stretch, arrange_tensors, cut_parts
from .manifest import MANIFEST_NAME, Group, Manifest, Part, Tensor
from .manifest_json import MAX_MANIFEST_BYTES, dump_manifest, parse_manifest
from .part_reader import num_cores
from .progress_bar import TransferProgress, format_bytes
from .sources.base import ObjectInfo, Source, Store

if TYPE_CHECKING:
    from .encoder import Bytes

_MAX_THREADS = 16  # beyond it reading and writing are the limit, and each thread holds parts in memory


@dataclass(frozen=True, slots=True)
class PackResult:
    """`leftover` names objects of the replaced artifact that could not be removed; they only cost space."""

    url: str
    manifest: Manifest
    weight_bytes: int  # of the checkpoint, tied tensors counted as often as they stood there
    stored_bytes: int
    leftover: tuple[str, ...] = ()

    def render(self) -> str:
        """A line or two for people."""
        assert self.manifest.digest is not None
        lines = [
            f"packed {format_bytes(self.weight_bytes)} into {format_bytes(self.stored_bytes)}: "
            f"{self.url}@b3:{self.manifest.digest.hex()}"
        ]
        if self.leftover:
            lines.append(f"  {len(self.leftover)} objects of the replaced artifact could not be removed.")
        return "\n".join(lines)


def pack(
    source: Source,
    store: Store,
    *,
    force: bool = False,
    progress: Callable[[TransferProgress], None] | None = None,
    threads: int | None = None,
) -> PackResult:
    """Pack the checkpoint in `source` into the folder `store`. Blocks; `progress` is called from this thread.

    `source` and `store` may be the same folder: the artifact then stands beside the safetensors files. An
    artifact that is there already is replaced only with `force`, in one step; its old objects are then
    removed, which interrupts a reader that is still loading it. Raises `UsageError` when the source is
    itself an artifact, `AlreadyExistsError` when the destination holds one or gets one meanwhile,
    `CheckpointError` for a damaged checkpoint, `NoSpaceError`, and the errors of both stores; nothing is
    left behind.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} threads cannot pack anything", key="threads", hint="Give at least 1.")
    if is_artifact(source):
        raise UsageError(
            f"{source.url} is an artifact already: it has a {MANIFEST_NAME}",
            hint="Serve it as it is, or give the folder of the original model.",
        )
    replaced = _find_replaced(store, force=force)
    checkpoint = open_checkpoint(source)
    writer = BlobWriter(store)
    try:
        manifest = _store_content(
            source, checkpoint, writer, progress, threads or min(_MAX_THREADS, num_cores())
        )
        data = dump_manifest(manifest)
    except BaseException as error:
        writer.discard(error)
        raise
    _publish(store, writer, data, replaced)
    return PackResult(
        url=store.url,
        manifest=replace(manifest, digest=blake3(data).digest()),
        weight_bytes=checkpoint.weight_bytes,
        stored_bytes=writer.stored_bytes + len(data),
        leftover=_remove_replaced(store, replaced) if replaced is not None else (),
    )


def _store_content(
    source: Source,
    checkpoint: Checkpoint,
    writer: BlobWriter,
    progress: Callable[[TransferProgress], None] | None,
    threads: int,
) -> Manifest:
    """Write everything but the manifest, and return that."""
    names = _forward_order(checkpoint)
    aliases = find_aliases(source, checkpoint, names)
    entries = {name: checkpoint.tensors[name].entry for name in names if name not in aliases}
    groups, tensors = arrange_tensors(
        {name: (entry.dtype, entry.shape) for name, entry in entries.items()}, choose_encoding
    )
    total_bytes = sum(tensor.size_bytes for tensor in tensors)
    read_bytes = 0
    parts: list[Part] = []
    encoder = Encoder(source, checkpoint)
    with closing(_encode_in_order(encoder, _jobs(groups, tensors), threads)) as results:
        for stretches, encoded in results:
            parts += [_store_part(writer, part) for part in encoded]
            read_bytes += sum(stretch.size_bytes for stretch in stretches)
            if progress is not None:
                progress(TransferProgress(read_bytes, total_bytes))
    files = tuple(writer.copy_file(source, info) for info in checkpoint.files)
    parts.sort(key=lambda part: part.tier)  # stable: within a tier they stay in forward order
    return Manifest(
        generator=f"teneral {__version__}",
        blobs=writer.finish(),
        files=files,
        groups=groups,
        tensors=tensors,
        parts=tuple(replace(part, index=index) for index, part in enumerate(parts)),
        aliases=aliases,
        metadata=checkpoint.metadata,
    )


def _forward_order(checkpoint: Checkpoint) -> list[str]:
    shapes = {name: stored.entry.shape for name, stored in checkpoint.tensors.items()}
    return [name for _, names in group_tensors(shapes) for name in names]


def _jobs(groups: tuple[Group, ...], tensors: tuple[Tensor, ...]) -> list[tuple[Stretch, ...]]:
    return [
        stretches for group in groups for stretches in cut_parts(tensors[index] for index in group.tensors)
    ]


def _encode_in_order(
    encoder: Encoder, jobs: list[tuple[Stretch, ...]], threads: int
) -> Generator[tuple[tuple[Stretch, ...], list[EncodedPart]], None, None]:
    """Encode jobs in threads; yields each with its parts, which are valid until the next is asked for.

    At most `threads` + 1 jobs are in work, the one yielded included. Closing the iterator stops the threads.
    """
    size_bytes = max(map(buffer_bytes, jobs), default=0)
    buffers = [np.empty(0, np.uint8) for _ in range(threads + 1)]  # made at first use, then reused
    pending: deque[tuple[tuple[Stretch, ...], Bytes, Future[list[EncodedPart]]]] = deque()
    waiting = deque(jobs)
    with ThreadPoolExecutor(threads, thread_name_prefix="teneral-pack") as pool:
        try:
            while waiting or pending:
                while waiting and buffers:
                    buffer = buffers.pop()
                    buffer = buffer if buffer.size else np.empty(size_bytes, np.uint8)
                    job = waiting.popleft()
                    pending.append((job, buffer, pool.submit(encoder.encode, job, buffer)))
                job, buffer, future = pending.popleft()
                yield job, future.result()
                buffers.append(buffer)
        finally:
            encoder.stop()
            for _, _, future in pending:
                future.cancel()


def _store_part(writer: BlobWriter, encoded: EncodedPart) -> Part:
    """Its index is set when all parts are known."""
    blob, offset_bytes = writer.append(encoded.tier, encoded.pieces, encoded.size_bytes)
    return Part(
        index=-1,
        tier=encoded.tier,
        group=encoded.group,
        blob=blob,
        offset_bytes=offset_bytes,
        size_bytes=encoded.size_bytes,
        digest=encoded.digest,
        segments=encoded.segments,
    )


@dataclass(frozen=True, slots=True)
class _Replaced:
    """The manifest that is to be replaced, and what it refers to."""

    info: ObjectInfo
    names: tuple[str, ...]


def _find_replaced(store: Store, *, force: bool) -> _Replaced | None:
    """What stands in the destination, None when it is free. Raises `AlreadyExistsError` without `force`."""
    try:
        info = store.stat(MANIFEST_NAME)
    except NotFoundError:
        return None
    if not force:
        raise AlreadyExistsError(
            f"there is an artifact at {store.url} already",
            source=store.url,
            name=MANIFEST_NAME,
            hint="Give another place, or replace it with --force.",
        )
    try:
        data, info = store.read(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)
        old = parse_manifest(data)
    except FormatError:
        return _Replaced(info, ())  # it can be replaced, but nobody knows which objects it used
    names = (*(blob.name for blob in old.blobs), *(file.path for file in old.files))
    # A manifest of unknown origin must not make us remove anything but blobs.
    return _Replaced(info, tuple(name for name in names if name.startswith(FOLDER)))


def _publish(store: Store, writer: BlobWriter, data: bytes, replaced: _Replaced | None) -> None:
    """Put the manifest, which makes the artifact exist. On failure nothing of it is left."""
    try:
        if replaced is None:
            store.put(MANIFEST_NAME, data, if_absent=True)
        else:
            store.put(MANIFEST_NAME, data, if_version=replaced.info.version)
    except BaseException as error:
        # The store may have taken it although its answer was lost: then a retry finds our own manifest in
        # the way, and removing the blobs would leave an artifact without content.
        if _is_published(store, data, error):
            if isinstance(error, SourceError):
                return
            raise
        writer.discard(error)
        if isinstance(error, AlreadyExistsError):
            raise AlreadyExistsError(
                f"somebody else wrote an artifact to {store.url} while this one was packed",
                source=store.url,
                name=MANIFEST_NAME,
                hint="Nothing of theirs was changed. Look at it, or replace it with --force.",
            ) from error
        raise


def _is_published(store: Store, data: bytes, error: BaseException) -> bool:
    """Whether our manifest is there. Where nobody can tell, raises `error` and leaves the blobs alone."""
    try:
        return store.read(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)[0] == data
    except (NotFoundError, FormatError):
        return False
    except SourceError:
        error.add_note(f"It is unknown whether {MANIFEST_NAME} was written, so the blobs were not removed.")
        raise error from None


def _remove_replaced(store: Store, replaced: _Replaced) -> tuple[str, ...]:
    """Remove the old artifact's objects; returns those that are still there."""
    left: list[str] = []
    for name in replaced.names:
        try:
            store.delete(name)
        except SourceError:
            left.append(name)
    return tuple(left)
