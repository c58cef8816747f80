"""Addresses: pinned ones (`s3://bucket/model@b3:<64 hex digits>`), addresses opened as sources and stores,
and a folder of a source as a source. Only the module of the address's own scheme is imported.

A pin's digits are the BLAKE3-256 of the manifest, which holds the digests of everything else.

A new kind of store is a folder of its own here, and a row in `KINDS`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from ..errors import UsageError
from .base import ObjectInfo, Source, closed

if TYPE_CHECKING:
    from .base import SourceOptions, Store


class StoreKind(NamedTuple):
    """A kind of store. `module` has the class or function `name`, which makes a source from an address
    and `SourceOptions`.
    """

    module: str
    name: str
    form: str  # of its addresses, for messages; "": that of another row
    is_store: bool = True  # can be written to; False: its class is a `Source` only
    # Its folder has an `address.parse_url`, which checks the name of a bucket or an account's
    # container.
    has_buckets: bool = False


# By scheme, "" for a plain path.
KINDS = {
    "": StoreKind(".file.store", "FileStore", "a path"),
    "file": StoreKind(".file.store", "FileStore", "file:///folder"),
    "s3": StoreKind(".s3.store", "S3Store", "s3://bucket/prefix", has_buckets=True),
    "gs": StoreKind(".gs.store", "GsStore", "gs://bucket/prefix", has_buckets=True),
    "az": StoreKind(".az.store", "AzStore", "az://account/container/prefix", has_buckets=True),
    "hf": StoreKind(".hub.store", "open_hub", "hf://org/name", is_store=False),
    "http": StoreKind(".http.source", "HttpSource", "", is_store=False),
    "https": StoreKind(".http.source", "HttpSource", "http(s)://host/folder", is_store=False),
}
# Most models are in such a store.
_LIKELY_SCHEME = "s3"

PIN_MARK = "@b3:"
_PIN = re.compile(r"[0-9a-f]{64}\Z", re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# A model of the Hub, its revision, and the quantisation of its GGUF file.
_HUB_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}(?:@[A-Za-z0-9._/-]+)?(?::[A-Za-z0-9_-]+)?"
)


def split_pin(url: str) -> tuple[str, bytes | None]:
    """The address and the pinned digest (32 bytes), or None. Raises `UsageError` for half a pin."""
    address, mark, digits = url.rpartition(PIN_MARK)
    if not mark:
        return url, None
    if not address or not _PIN.match(digits):
        raise UsageError(
            f"{url!r} does not end in a whole pin",
            hint=f"A pin is {PIN_MARK} and the 64 hexadecimal digits that `teneral inspect` shows.",
        )
    return address, bytes.fromhex(digits)


def open_source(url: str, options: SourceOptions | None = None) -> Source:
    """A source on the folder at `url`. Does no I/O: a missing or forbidden folder shows at the
    first read.

    Raises `UsageError` for an invalid address. The caller closes the source.
    """
    scheme = scheme_of(url)
    kind = KINDS.get(scheme)
    if kind is None:
        raise UsageError(f"{url}: {scheme}:// is not a known kind of store", hint=f"Give {forms()}.")
    opened = getattr(import_module(kind.module, __package__), kind.name)
    if scheme in ("", "file"):
        follows = options is None or options.outside_links
        source: Source = opened(_path_of(url, scheme), outside_links=follows)
    else:
        source = opened(url, options)
    return source


def open_store(url: str, options: SourceOptions | None = None) -> Store:
    """Open a place to write to. Raises as `open_source` does, and `UsageError` where a file has the path, or that of a
    folder above it.
    """
    scheme = scheme_of(url)
    hint = f"Write to {forms(stores=True)}."
    if scheme not in KINDS:
        raise UsageError(f"{url}: {scheme}:// is not a known kind of store", hint=hint)
    if is_read_only(url):
        raise UsageError(f"{url} can only be read from", hint=hint)
    if not url:
        raise UsageError("'' is not a usable path", hint=hint)
    if (path := local_path(url)) is not None:
        _refuse_file(os.path.abspath(path))
    store: Store = open_source(url, options)  # type: ignore[assignment] # a writable kind's class is a `Store`
    return store


def _refuse_file(path: str) -> None:
    """Raise `UsageError` if a file has this path, or that of a folder above it."""
    found = path
    while not os.path.lexists(found) and found != os.path.dirname(found):
        found = os.path.dirname(found)
    if not os.path.isdir(found):
        what = "is a file" if os.path.isfile(found) else "is no folder"
        hint = "Name a folder to write to: it is made where it does not exist, and so are those above it."
        raise UsageError(f"cannot write to {path}: {found} {what}", hint=hint)


def is_read_only(url: str) -> bool:
    """True if addresses of this kind can neither be written to nor listed."""
    kind = KINDS.get(scheme_of(url))
    return kind is not None and not kind.is_store


def forms(*, stores: bool = False) -> str:
    """The forms of the addresses of all kinds, or of those that can be written to: for messages."""
    *others, last = (kind.form for kind in KINDS.values() if kind.form and (kind.is_store or not stores))
    return f"{', '.join(others)} or {last}"


def model_address(address: str) -> str:
    """A model's address with its scheme: hf:// goes in front of a name of the Hub, such as `org/name`,
    `org/name@revision` and `org/name:Q4_K_M`. A local path always wins over such a name.

    Raises `UsageError` for half a pin.
    """
    plain, _ = split_pin(address)
    if not _HUB_NAME.fullmatch(plain) or os.path.lexists(plain):
        return address
    return f"hf://{address}"


def model_name(address: str) -> str:
    """A model's name by its address: `org/name` of one on the Hub, else the last part without its pin."""
    plain = address.partition(PIN_MARK)[0].partition("?")[0].rstrip("/")
    if scheme_of(plain) == "hf":
        from .hub.address import parse_url  # most models are elsewhere

        return parse_url(plain).repo
    return plain.rpartition("/")[2] or "model"


def check_bucket(url: str) -> None:
    """Raise `UsageError` where `url` does not name a bucket, or an account's container, as its kind of
    store has them. Reads no settings.
    """
    scheme = scheme_of(url)
    if scheme not in KINDS or not KINDS[scheme].has_buckets:
        raise UsageError(f"{url}: {scheme}:// is not a kind of store that has buckets")
    import_module(f".{scheme}.address", __package__).parse_url(url)


def scheme_of(url: str) -> str:
    """The address's scheme in lower case, '' for a plain path."""
    found = _SCHEME.match(url)
    return found.group(1).lower() if found else ""


def import_likely_store() -> bool:
    """Import the most common kind of store ahead of its address; returns whether it will be reached
    over TLS.
    """
    return bool(import_module(KINDS[_LIKELY_SCHEME].module, __package__).uses_tls())


def import_all() -> None:
    """Import every kind of store, ahead of a process's fork."""
    for kind in KINDS.values():
        import_module(kind.module, __package__)


def local_path(url: str) -> str | None:
    """The path of an address on this machine; None for one of a store. Raises `UsageError` for an unusable one."""
    scheme = scheme_of(url)
    return _path_of(url, scheme) if scheme in ("", "file") else None


def _path_of(url: str, scheme: str) -> str:
    path = _path_of_file_url(url) if scheme else url
    if not path or "\0" in path:
        raise UsageError(f"{path!r} is not a usable path", hint=f"Give {forms()}.")
    return os.path.expanduser(path)


def _path_of_file_url(url: str) -> str:
    from urllib.parse import unquote, urlsplit  # most folders are named by their path

    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise UsageError(
            f"{url} is not a file address", hint="Write file:///absolute/path, or just the path."
        )
    return unquote(parts.path)


class Subfolder:
    """Objects below `folder/`, by their names there. Closing it leaves the source open, which is
    others', too: reads in flight go on, and new ones raise `SourceClosedError`.
    """

    def __init__(self, source: Source, folder: str) -> None:
        """`folder`: '' for the source itself."""
        self._source = source
        self._closed = False
        self._prefix = f"{folder}/" if folder else ""

    @property
    def url(self) -> str:
        return f"{self._source.url.rstrip('/')}/{self._prefix}".rstrip("/")

    def stat(self, name: str) -> ObjectInfo:
        return self._without_prefix(self._source.stat(self._place(name)))

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        data, info = self._source.read(self._place(name), max_bytes=max_bytes)
        return data, self._without_prefix(info)

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        return self._source.read_into(self._place(name), start, buffer, version=version)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return map(self._without_prefix, self._source.list(self._place(prefix)))

    def close(self) -> None:
        self._closed = True

    def _place(self, name: str) -> str:
        if self._closed:
            raise closed(self.url, name)
        return self._prefix + name

    def _without_prefix(self, info: ObjectInfo) -> ObjectInfo:
        return info._replace(name=info.name.removeprefix(self._prefix))
