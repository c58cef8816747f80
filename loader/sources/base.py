"""The protocols `Source` and `Store`, the base of all object writers, and the checks and errors
that all kinds of sources share.

A source is opened on one folder (an artifact, or a model directory); names are relative to it, with
'/' between their components, and were validated by `check_name`. A source knows nothing of
manifests, parts or tensors.

Amazon S3 answers 403 instead of 404 to a reader without s3:ListBucket, and some web servers do so
to everyone. A denial alone is therefore no proof that an object is absent; `is_listed` and
`denies_absent` look for one.

Every implementation passes the one contract suite in `tests/loader/test_source_contract.py`.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, runtime_checkable

from ..errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ChangedError,
    FormatError,
    NotFoundError,
    SourceClosedError,
    UsageError,
)

if TYPE_CHECKING:
    import hashlib

MAX_NAME_BYTES = 1024  # S3's own limit for a key
MAX_SHOWN_CHARS = 500  # of a store's own words in a message

# Names end up in terminals and logs. Control characters of both sets (U+0080 to U+009F are escape
# sequences as well), line separators, invisible marks and whatever turns the direction of what
# follows would let a name write elsewhere than in its place.
_HOSTILE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


class ObjectInfo(NamedTuple):
    """One stored object. `version` changes whenever its bytes do (an ETag; size and mtime_ns for
    files). `modified_unix_s` is when it was last written, where a listing says so; `sha256` the digest
    of its content, where the store states it, or that of the file it is made of (`Converted`).
    """

    name: str
    size_bytes: int
    version: str
    modified_unix_s: float | None = None
    sha256: bytes | None = None


class SourceOptions(NamedTuple):
    """The options for reaching a store. Only the fields that a source's kind knows are used; times are in
    seconds.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing_style: str = "auto"  # auto | path | virtual
    anonymous: bool = False
    requester_pays: bool = False
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 10.0  # a connection that brings nothing for so long has failed
    min_rate_bytes_s: int = 4096  # … or less than this over such a time; 0: any rate will do
    # A range that is so long behind the others is asked for twice; 0: never.
    hedge_after_s: float = 0.25
    max_attempts: int = 6  # … that fail without getting on
    # A store that gives nothing to any reader is waited for so long, however many attempts.
    outage_s: float = 30.0
    max_connections: int = 8
    base: str | None = None  # of a fine-tune that is stored as differences: its base's address
    # Of a folder: links that lead out of it are followed, which packing does not want.
    outside_links: bool = True
    gguf_blocks: bool = True  # of a GGUF file: blocks stay as they are, which the native core alone reads
    headers: tuple[tuple[str, str], ...] = ()  # may hold secrets, and are not shown

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in self._asdict().items() if name != "headers")
        return f"SourceOptions({', '.join(shown)})"


class Source(Protocol):
    """A readable folder of objects. All methods block, may be called from any thread, and hold no
    lock while they wait.

    Errors: `NotFoundError`, `AccessDeniedError`, `UnavailableError` (after the source's own
    retries), `ChangedError`, `SourceClosedError`, each with the object's name and a hint.
    """

    @property
    def url(self) -> str:
        """The folder's address for people, without secrets."""

    def stat(self, name: str) -> ObjectInfo:
        """The object's size and version."""

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        """A whole small object in one request. Raises `FormatError` when it is larger than
        `max_bytes`, unread.
        """

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        """Fill `buffer` with bytes [start, start + len(buffer)) of the object.

        Returns only when the buffer is full: the version that all of these bytes are of, None where
        that was not looked at. The buffer stays the caller's; on an error its content is undefined.
        With `version`, raises `ChangedError` when the object is another one by now. Waits without
        the GIL.
        """

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Objects whose names start with `prefix`, in name order. HTTP sources cannot: they raise
        `UsageError`.
        """

    def close(self) -> None:
        """Give up all reads in flight (they raise `SourceClosedError`) and free every connection.
        Idempotent.
        """


@runtime_checkable
class Remote(Protocol):
    """A source that keeps connections. Those that are on this machine have nothing of the kind."""

    def quiesce(self) -> None:
        """Nothing will be read for a while, during which the process may stand still or be copied:
        close connections that are idle, and forget credentials and addresses. All of it is made
        anew when it is needed. Does not block.
        """


@runtime_checkable
class Mappable(Source, Protocol):
    """A source whose objects are files of this machine."""

    def map(self, name: str, *, version: str | None = None) -> memoryview:
        """The object's content where the system keeps it: (size_bytes,) uint8, writable, without a
        copy and without being read yet. Writing changes this process's own view. The view owns the
        mapping and outlives the source.

        Raises `ChangedError` when the object is not of `version`, and `UnavailableError` where
        files cannot be mapped.
        """

    def check_version(self, name: str, version: str | None) -> None:
        """Raise `ChangedError` when the object is not of `version` by now."""


@runtime_checkable
class Converted(Protocol):
    """A source that makes its weights of another file. The `sha256` of their `ObjectInfo` is that file's,
    where `original` can be compared with it.
    """

    def stored_file(self) -> tuple[Source, ObjectInfo]:
        """That file, and the source that has it, which is not the caller's to close. Raises as a `Source` does."""

    def original(
        self, values: Callable[[int, int], Iterator[memoryview]]
    ) -> tuple[hashlib._Hash, Iterator[memoryview]]:
        """The SHA-256 of the file's beginning, and the bytes behind that, made again from the weights:
        `values(begin, end)` gives bytes [begin, end) of those, and may block. Raises its errors, and those of
        a `Source`.
        """


class ObjectWriter(Protocol):
    """One object being written. It appears whole on `commit`, and not at all on `abort` or a crash.

    A context manager: leaving it with an error aborts, leaving it without one commits.
    """

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. The data may be reused as soon as this returns. Raises `NoSpaceError`, having
        removed all.
        """

    def commit(self) -> ObjectInfo: ...

    def abort(self) -> None:
        """Remove what was written. Idempotent; does nothing after `commit`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Source, Protocol):
    """A source that can be written to."""

    def create(self, name: str, *, if_absent: bool = False) -> ObjectWriter:
        """Begin an object of unknown length. Replaces an object of that name on commit; with
        `if_absent`, commit raises `AlreadyExistsError` instead, having removed what was written.
        """

    def put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        """Write a small object at once, atomically.

        Raises `AlreadyExistsError` when `if_absent` and there is one, or when its version is not
        `if_version`.
        """

    def delete(self, name: str) -> None:
        """Remove the object; fine when there is none."""


def is_showable(text: str) -> bool:
    """The one rule for names of objects, tensors and groups: whether a terminal shows the text and
    nothing else.
    """
    return (text.isascii() and text.isprintable()) or _HOSTILE.search(text) is None


def shown_text(text: str) -> str:
    """A store's own words for a message: a space in place of each mark that could change other text
    of a terminal or a log, and of half a surrogate pair; at most `MAX_SHOWN_CHARS`.
    """
    text = text[: 4 * MAX_SHOWN_CHARS]
    return "".join(mark if mark.isprintable() else " " for mark in text)[:MAX_SHOWN_CHARS].strip()


def check_name(name: str) -> str:
    """The name itself when it is a safe relative object name; raises `UsageError` otherwise."""
    parts = name.split("/")
    if (
        not name
        or len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES
        or any(part in ("", ".", "..") for part in parts)
        or "\\" in name
        or not is_showable(name)
    ):
        raise UsageError(
            f"{name!r} is not a usable object name",
            hint="Names are relative, with '/' between their components, none of which is empty, '.' or '..'.",
        )
    return name


def byte_view(buffer: memoryview) -> memoryview:
    """The buffer as plain bytes, without a copy. Raises `ValueError` for a read-only one (a
    caller's bug).
    """
    view = memoryview(buffer).cast("B")
    if view.readonly:
        raise ValueError("a read-only buffer cannot be read into")
    return view


def is_name(name: str) -> bool:
    """True if a listed name is one that the loader could ask for again."""
    try:
        check_name(name)
    except UsageError:
        return False
    return True


def too_large(source: str, name: str, size_bytes: int | None, max_bytes: int) -> FormatError:
    """`size_bytes` is None where only so much is known that it is more than `max_bytes`."""
    size = "larger" if size_bytes is None else f"{size_bytes:,} bytes, more"
    return FormatError(
        f"{name} in {source} is {size} than the {max_bytes:,} bytes allowed for it", where=name
    )


def changed(source: str, name: str, detail: str) -> ChangedError:
    return ChangedError(
        f"{name} in {source} was replaced or truncated while it was being read: {detail}",
        source=source,
        name=name,
        hint="Start again. If that does not help, the copy is incomplete: `teneral verify` names what is damaged.",
    )


def lost(source: str, name: str) -> AlreadyExistsError:
    """The error of a write whose condition did not hold."""
    detail = "it exists already, or is another version by now"
    return AlreadyExistsError(f"{name} in {source} was not written: {detail}", source=source, name=name)


def ended_early(source: str, name: str, start: int, end: int, size_bytes: int | None) -> ChangedError:
    """Bytes [start, end) were asked for and the object does not reach that far."""
    size = "it is shorter" if size_bytes is None else f"it has only {size_bytes:,} bytes"
    return changed(source, name, f"bytes {start:,} to {end:,} were expected, but {size}")


def closed(source: str, name: str) -> SourceClosedError:
    return SourceClosedError(
        f"reading {name or source} was given up: its source is closed", source=source, name=name
    )


LIST_HINT = (
    "Grant s3:ListBucket on the bucket, so that the store says which objects exist, and s3:GetObject on them."
)


def is_listed(source: Source, name: str) -> bool | None:
    """True if the folder's list has the object; None where the folder cannot be listed. Blocks for
    one request.

    Raises `AccessDeniedError` for credentials that are not valid, and the source's other errors.
    """
    try:
        first = next(iter(source.list(name)), None)  # in name order: no longer name comes before it
    except UsageError:
        return None
    except AccessDeniedError as error:
        if not error.may_be_absent:
            raise
        return None
    return first is not None and first.name == name


def denies_absent(source: Source) -> bool:
    """True if the source denies an object that surely does not exist. Blocks for one request.
    Raises as `is_listed`.
    """
    try:
        source.stat(f"absent-{os.urandom(8).hex()}.json")
    except NotFoundError:
        return False
    except AccessDeniedError as error:
        if not error.may_be_absent:
            raise
        return True
    return False


def undecided(source: Source, names: str) -> AccessDeniedError:
    """The error where no other object shows whether `names` exist."""
    return AccessDeniedError(
        f"access to {names} in {source.url} is denied, and the folder cannot be listed: "
        "it is unknown whether there is such an object",
        source=source.url,
        name=names,
        hint=LIST_HINT,
    )


class Writer(ABC):
    """The life of an `ObjectWriter`: open, then committed or aborted for good. Used by one thread.

    When a subclass fails in `_append` or `_finish`, what was written is discarded here, so that a
    failed write leaves nothing behind even where its caller does not clean up.
    """

    _is_open = False  # until it is made: Ctrl-C may leave one that never was

    def __init__(self) -> None:
        self._info: ObjectInfo | None = None
        self._is_open = True

    @abstractmethod
    def _append(self, data: bytes | bytearray | memoryview) -> None: ...

    @abstractmethod
    def _finish(self) -> ObjectInfo: ...

    @abstractmethod
    def _discard(self) -> None:
        """Remove what was written. Called at most once, and never after `_finish` returned."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. The data may be reused as soon as this returns."""
        self._check_open()
        try:
            self._append(data)
        except BaseException:
            self.abort()
            raise

    def commit(self) -> ObjectInfo:
        """Make the object appear. A second call returns the same value again."""
        if self._info is not None:
            return self._info
        self._check_open()
        try:
            self._info = self._finish()
        except BaseException:
            self.abort()
            raise
        self._is_open = False
        return self._info

    def abort(self) -> None:
        """Remove what was written. Idempotent; does nothing after `commit`."""
        if self._is_open:
            self._is_open = False
            self._discard()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError("this writer was committed or aborted already")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort()
        elif self._is_open:
            self.commit()


class PartWriter(Writer):
    """A writer that sends each full part at once, and the rest when it is committed. Holds one part."""

    def __init__(self, part_bytes: int) -> None:
        super().__init__()
        self._part_bytes = part_bytes
        self._pending = bytearray()
        self._num_bytes = 0  # written so far

    @abstractmethod
    def _send_part(self, data: bytes) -> None: ...

    def _append(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data).cast("B")
        self._num_bytes += len(rest)
        while rest:
            taken = rest[: self._part_bytes - len(self._pending)]
            self._pending += taken
            rest = rest[len(taken) :]
            if len(self._pending) == self._part_bytes:
                self._send_pending()

    def _send_pending(self) -> None:
        data, self._pending = bytes(self._pending), bytearray()
        self._send_part(data)


class BasedSource:
    """Owns both sources, and closes them."""

    def __init__(
        self, source: Source, base: Source, *, prefix: str, base_digest: bytes | None = None
    ) -> None:
        """`base_digest`: the one that the base's address was pinned to."""
        self._source = source
        self.base = base
        self.base_digest = base_digest
        self._prefix = prefix

    @property
    def url(self) -> str:
        return self._source.url

    def stat(self, name: str) -> ObjectInfo:
        source, name = self._find(name)
        return source.stat(name)

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        source, name = self._find(name)
        return source.read(name, max_bytes=max_bytes)

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        source, name = self._find(name)
        return source.read_into(name, start, buffer, version=version)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._source.list(prefix)

    def close(self) -> None:
        self._source.close()
        self.base.close()

    def quiesce(self) -> None:
        for source in (self._source, self.base):
            if isinstance(source, Remote):
                source.quiesce()

    def _find(self, name: str) -> tuple[Source, str]:
        if name.startswith(self._prefix):
            return self.base, name.removeprefix(self._prefix)
        return self._source, name
