"""Read everything that an artifact stores, and say of every bad part and file which it is.

Digests, sizes, and that every plane decodes to exactly what the manifest declares. What it finds is
a value; only a manifest that cannot be used at all, and a store that does not answer, are errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from ..artifact import open_artifact, read_file
from ..errors import ChangedError, FormatError, NotFoundError
from ..format.manifest import Manifest, Part
from ..format.tensor_digests import FILE_NAME as TENSOR_DIGESTS_NAME
from ..format.tensor_digests import parse_tensor_digests
from ..load.accounting import describe_part
from ..sources.base import Source
from .inspect import manifest_notes
from .part_reader import PartReader, map_in_order
from .progress_bar import TransferProgress, format_bytes, format_duration
from .stated_files import compare_file, stated_files

# Errors that say something about the artifact. Others (no network, no permission) say something
# about this attempt.
_FINDINGS = (FormatError, NotFoundError, ChangedError)


@dataclass(frozen=True, slots=True)
class Problem:
    """`where` is for people; `part` is the bad part itself, None when it is about a file or a whole
    blob.
    """

    where: str
    message: str
    part: Part | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.message.removeprefix(self.where).lstrip()}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The parts that were read, and what was wrong with them. `digest` is the manifest's, None for
    plain weights, whose files were compared with the SHA-256 that their store states if `is_stated`. `notes`
    say what no digest vouches for, and what no reader uses.
    """

    url: str
    digest: bytes | None
    num_parts: int
    num_files: int
    read_bytes: int
    elapsed_s: float
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()
    is_stated: bool = False

    @property
    def ok(self) -> bool:
        return not self.problems

    def render(self) -> str:
        """A few lines for people, one a problem."""
        what = f"{self.num_parts} parts and {self.num_files} files, {format_bytes(self.read_bytes)}"
        took = format_duration(self.elapsed_s)
        if self.problems:
            lines = [f"  {problem}" for problem in self.problems]
            return "\n".join([f"damaged: {self.url}, {what}; problems: {len(self.problems)}", *lines])
        if self.is_stated:
            return f"intact: {what}, in {took}\n  {self.url}: the weights have the SHA-256 that their store states."
        if self.digest is None:
            return (
                f"readable: {what}, in {took}\n"
                "  Plain safetensors carry no digests, so nothing says whether these are the right bytes."
            )
        notes = "".join(f"\n  {note}" for note in self.notes)
        return f"intact: {what}, in {took}\n  {self.url}@b3:{self.digest.hex()}{notes}"


def verify(
    source: Source,
    *,
    digest: bytes | None = None,
    threads: int | None = None,
    progress: Callable[[TransferProgress], None] | None = None,
) -> VerifyReport:
    """Read and check every blob, part and file, and that `tensors.b3` has a digest for each tensor.
    Plain files whose store states their SHA-256 are compared with that instead. Blocks; `progress` is called
    from this thread.

    With `digest`, the manifest must have that one. Raises `ManifestError`, `IntegrityError` for
    another manifest than the pinned one, `CheckpointError`, `NotFoundError` where there is no
    artifact, and errors of a store that does not answer. Memory: a part and a decoded part a
    thread, at most 130 MiB each; of bf16, 46 MiB.
    """
    started_s = time.monotonic()
    manifest = open_artifact(source, digest=digest, without_base=True)
    reader = PartReader(source, manifest)
    problems = _check_blobs(source, manifest)
    stated = stated_files(source, manifest)
    parts = () if stated else manifest.parts
    total_bytes = sum(file.info.size_bytes for file in stated) + sum(part.size_bytes for part in parts)
    total_bytes += sum(file.size_bytes for file in manifest.files)
    done_bytes = 0

    def done(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        if progress is not None:
            progress(TransferProgress(done_bytes, total_bytes))

    def check(part: Part) -> Problem | None:
        return _check_part(reader, manifest, part)

    for stored in stated:
        try:
            compare_file(stored, threads=threads, done=done)
        except _FINDINGS as error:
            problems.append(Problem(f"{stored.info.name} in {stored.source.url}", error.message))
    with closing(map_in_order(check, parts, threads)) as results:
        for part, problem in zip(parts, results, strict=True):
            problems += [problem] if problem is not None else []
            done(part.size_bytes)
    for file in manifest.files:
        try:
            data = read_file(source, manifest, file.name)
            if file.name == TENSOR_DIGESTS_NAME:
                parse_tensor_digests(data, manifest)
        except _FINDINGS as error:
            problems.append(Problem(f"file {file.name} ({file.path})", error.message))
        done(file.size_bytes)
    return VerifyReport(
        url=source.url,
        digest=manifest.digest,
        num_parts=len(manifest.parts),
        num_files=len(manifest.files),
        read_bytes=total_bytes,
        elapsed_s=time.monotonic() - started_s,
        problems=tuple(problems),
        notes=manifest_notes(manifest, is_pinned=digest is not None),
        is_stated=bool(stated),
    )


def _check_blobs(source: Source, manifest: Manifest) -> list[Problem]:
    """Blobs of another size than they should have. Absent ones show with each of their parts."""
    problems: list[Problem] = []
    for blob in manifest.blobs:
        try:
            size_bytes = source.stat(blob.name).size_bytes
        except NotFoundError:
            continue
        if size_bytes != blob.size_bytes:
            problems.append(
                Problem(f"blob {blob.name}", f"it has {size_bytes} bytes, and should have {blob.size_bytes}")
            )
    return problems


def _check_part(reader: PartReader, manifest: Manifest, part: Part) -> Problem | None:
    try:
        stored = reader.read(part)
        for segment in part.segments:
            reader.decode_alone(part, segment, stored)
    except _FINDINGS as error:
        return Problem(describe_part(manifest, part), error.message, part)
    return None
