"""Makes an artifact exist in one step, and takes the place of another one only where that was wanted.

The manifest is put on the condition that the destination is as it was found. Knows nothing of what a
manifest refers to, but for the objects that are of no use once it is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import AlreadyExistsError, FormatError, NotFoundError, SourceError
from ..format.limits import MANIFEST_NAME, MAX_MANIFEST_BYTES
from ..format.manifest_json import BLOB_FOLDER, parse_manifest
from ..sources.base import ObjectInfo, Store
from .blob_writer import BlobWriter


@dataclass(frozen=True, slots=True)
class Replaced:
    """The manifest that is to be replaced, and what it refers to."""

    info: ObjectInfo
    names: tuple[str, ...]


def find_replaced(store: Store, *, force: bool) -> Replaced | None:
    """What stands in the destination, None when it is free. Raises `AlreadyExistsError` without `force`."""
    try:
        info = store.stat(MANIFEST_NAME)
        if not force:
            raise AlreadyExistsError(
                f"there is an artifact at {store.url} already",
                source=store.url,
                name=MANIFEST_NAME,
                hint="Give another place, or replace it with --force.",
            )
        data, info = store.read(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)
        old = parse_manifest(data)
    except NotFoundError:
        return None
    except FormatError:
        return Replaced(info, ())  # it can be replaced, but nobody knows which objects it used
    names = (*(blob.name for blob in old.blobs), *(file.path for file in old.files))
    # A manifest of unknown origin must not make us remove anything but blobs.
    return Replaced(info, tuple(name for name in names if name.startswith(BLOB_FOLDER)))


def publish(store: Store, writer: BlobWriter, data: bytes, replaced: Replaced | None) -> None:
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


def remove_replaced(store: Store, replaced: Replaced) -> tuple[str, ...]:
    """Remove the old artifact's objects; returns those that are still there."""
    left: list[str] = []
    for name in replaced.names:
        try:
            store.delete(name)
        except SourceError:
            left.append(name)
    return tuple(left)
