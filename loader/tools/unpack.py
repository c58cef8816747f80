"""Turn an artifact back into a directory of safetensors and small files, every tensor equal bit for bit.

Tensors get their original names, tied ones included, which are written out as often as they have names. A
model of more than `max_shard_bytes` becomes several files with an index. Everything is written into a hidden
folder inside the target and renamed at the end, so the target holds all of it or nothing.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..artifact import open_artifact, read_file
from ..errors import AlreadyExistsError, ManifestError
from ..format.checkpoint import INDEX_SUFFIX, SUFFIX
from ..format.manifest import Manifest
from ..format.tensor_digests import FILE_NAME as DIGESTS_NAME
from ..sources.base import Source
from ..sources.file_folder import Folder
from .progress_bar import TransferProgress, format_bytes, format_duration
from .shard_writer import MAX_SHARD_BYTES, plan_shards, write_shards


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

    The directory must be empty; with `force`, a model that stands there is replaced, and other files stay.
    Every part is verified before it is decoded. Raises `AlreadyExistsError`, `IntegrityError` naming the bad
    part, `NoSpaceError`, and the source's errors; nothing is left behind. Memory: as `verify`.
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
    """A hidden folder inside the target, which is made where it is missing; both go again on a failure.

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
    """The small files, each verified. Raises `ManifestError` when one of them would stand for weights."""
    for file in manifest.files:
        if file.name == DIGESTS_NAME:
            continue  # about the tensors, not the model's own
        if _is_weights(file.name):
            raise ManifestError(
                f"the artifact carries {file.name} as a small file, where its weights would be written",
                where=file.name,
                hint="It was not written by `teneral pack`: get it from somebody you trust.",
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
