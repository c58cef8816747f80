"""The opening of a job: an existing index is read, or a new one is written.

The first worker scans the input, in parallel to the load of the model, and writes `job.json` by a
conditional put; all others find it. An output that belongs to another job is refused by name. This
module does not know how parts are processed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...loader.errors import AlreadyExistsError, NotFoundError, UsageError
from ...loader.pin import split_pin
from ...runtime.config import ServeConfig
from ..function.lifetime import Lifetime
from .errors import JobMismatchError
from .finish import MANIFEST_NAME
from .index import (
    INDEX_NAME,
    MAX_INDEX_BYTES,
    Identity,
    JobIndex,
    check_same_job,
    dump_index,
    index_options,
    make_index,
    parse_index,
)
from .parts import list_parts, read_input
from .places import Places
from .scan import Scanned, Scanner
from .spec import JobSpec

MIN_PART_LINES = 64
COMPRESSED = (
    b"\x1f\x8b",
    b"\x28\xb5\x2f\xfd",
    b"BZh",
    b"\xfd7zXZ",
)  # gzip, zstd, bzip2, xz: each line would fail


@dataclass(frozen=True, slots=True)
class Opened:
    """An open job. `version` is the version of the input for reads from the store."""

    index: JobIndex
    version: str
    is_new: bool  # no worker has started it before


def identity_of(
    spec: JobSpec, config: ServeConfig, input_address: str, input_version: str, model: str
) -> Identity:
    """The identity of the answers: from the settings, those that a user chooses and that affect a
    model's answers.
    """
    options = {
        "max_line_bytes": spec.max_line_bytes,
        "name": config.served_name,
        "max_context": config.max_context,
        "first_token": config.first_token,
        "kv_dtype": config.kv_dtype,
        "compute_dtype": config.compute_dtype,
    }
    return Identity(input_address, input_version, model, index_options(options))


def model_of(digest: bytes | None, config: ServeConfig) -> str:
    """The identity of the model. Plain safetensors have only their address."""
    return split_pin(config.model)[0] if digest is None else digest.hex()


def read_index(places: Places) -> JobIndex | None:
    """The existing index. Blocks. Raises `JobFormatError`."""
    try:
        data, _ = places.work.read(INDEX_NAME, max_bytes=MAX_INDEX_BYTES)
    except NotFoundError:
        return None
    return parse_index(data)


def find_index(places: Places) -> JobIndex | None:
    """The existing index; None only if nothing looks like a job's output. Blocks. Raises
    `JobMismatchError`.
    """
    index = read_index(places)
    if index is not None:
        return index
    found = _what_is_there(places)
    if not found:
        return None
    index = read_index(places)  # another worker of this job may have just started
    if index is not None:
        return index
    raise JobMismatchError(
        f"{found} exists, but without the {INDEX_NAME} of its job",
        source=places.work.url,
        name=INDEX_NAME,
        hint="Move it away, or choose another output.",
    )


def _what_is_there(places: Places) -> str:
    """The address of an object that only a job writes; '' without one."""
    if _is_final_there(places):
        return places.output
    return places.work.url if list_parts(places.work) or _is_manifest_there(places) else ""


def _is_final_there(places: Places) -> bool:
    if places.final is None:
        return False
    try:
        places.final.stat(places.final_name)
    except NotFoundError:
        return False
    return True


def _is_manifest_there(places: Places) -> bool:
    try:
        places.work.stat(MANIFEST_NAME)
    except NotFoundError:
        return False
    return True


def scan_input(
    places: Places, spec: JobSpec, *, version: str, size_bytes: int, part_lines: int, lifetime: Lifetime
) -> Scanned:
    """Read the whole input once. Blocks.

    Raises `CancelledError` once the lifetime has ended, `ChangedError`, and `UsageError` for an
    input that is compressed or has too many lines.
    """
    scanner = Scanner(max_line_bytes=spec.max_line_bytes, max_lines=spec.max_lines, part_lines=part_lines)
    for number, chunk in enumerate(read_input(places.input, version, 0, size_bytes)):
        lifetime.check()
        if number == 0 and chunk.startswith(COMPRESSED):
            raise UsageError(
                f"{places.input.address} is compressed", key="input", hint="Decompress it to plain JSONL."
            )
        scanner.feed(chunk)
    return scanner.finish()


def publish_index(
    places: Places, identity: Identity, scanned: Scanned, *, size_bytes: int, max_line_bytes: int
) -> tuple[JobIndex, bool]:
    """Publish the index of the job, and return whether it is new. Blocks. Raises `JobMismatchError`
    if another job was first.
    """
    index = make_index(identity, scanned, size_bytes=size_bytes, max_line_bytes=max_line_bytes)
    data = dump_index(index)
    # An index that readers would refuse is not published.
    parse_index(data)
    try:
        places.work.put(INDEX_NAME, data, if_absent=True)
    except AlreadyExistsError:
        found = read_index(places)
        if found is None:
            raise
        check_same_job(found, identity, place=places.output)
        return found, False
    return index, True
