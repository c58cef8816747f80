"""Addresses opened as sources and stores. Only the module of the address's own scheme is imported.

A new kind of store is a folder of its own here, and a row in `_STORES`.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from .base import Source, SourceOptions, Store

# Scheme: the module and the class that open it.
_STORES = {
    "": (".file.store", "FileStore"),
    "file": (".file.store", "FileStore"),
    "s3": (".s3.store", "S3Store"),
    "gs": (".gs.store", "GsStore"),
    "az": (".az.store", "AzStore"),
}
_BUCKETS = frozenset({"s3", "gs", "az"})
_READ_ONLY = {"http": (".http.source", "HttpSource"), "https": (".http.source", "HttpSource")}
# Most models are in such a store.
_LIKELY_SCHEME = "s3"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_KNOWN = (
    "a path, file:///folder, s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix, "
    "or (for reading) http://… and https://…"
)


def open_source(url: str, options: SourceOptions | None = None) -> Source:
    """A source on the folder at `url`. Does no I/O: a missing or forbidden folder shows at the
    first read.

    Raises `UsageError` for an invalid address. The caller closes the source.
    """
    scheme = scheme_of(url)
    if scheme in _READ_ONLY:
        source: Source = _class_of(*_READ_ONLY[scheme])(url, options)
        return source
    return open_store(url, options)


def open_store(url: str, options: SourceOptions | None = None) -> Store:
    """As `open_source`, for a place that can be written to."""
    scheme = scheme_of(url)
    if scheme in _READ_ONLY:
        raise UsageError(f"{url} can only be read from", hint=f"Write to {_KNOWN}.")
    if scheme not in _STORES:
        raise UsageError(f"{url}: {scheme}:// is not a known kind of store", hint=f"Give {_KNOWN}.")
    kind = _class_of(*_STORES[scheme])
    store: Store = kind(_path_of(url, scheme)) if scheme in ("", "file") else kind(url, options)
    return store


def check_bucket(url: str) -> None:
    """Raise `UsageError` where `url` does not name a bucket, or an account's container, as its kind of
    store has them. Reads no settings.
    """
    scheme = scheme_of(url)
    if scheme not in _BUCKETS:
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
    module, _ = _STORES[_LIKELY_SCHEME]
    return bool(import_module(module, __package__).uses_tls())


def import_all() -> None:
    """Import every kind of store, ahead of a process's fork."""
    for module, _ in {**_STORES, **_READ_ONLY}.values():
        import_module(module, __package__)


def _class_of(module: str, name: str) -> type:
    kind: type = getattr(import_module(module, __package__), name)
    return kind


def _path_of(url: str, scheme: str) -> str:
    path = _path_of_file_url(url) if scheme else url
    if not path or "\0" in path:
        raise UsageError(f"{path!r} is not a usable path", hint=f"Give {_KNOWN}.")
    return os.path.expanduser(path)


def _path_of_file_url(url: str) -> str:
    from urllib.parse import unquote, urlsplit  # most folders are named by their path

    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise UsageError(
            f"{url} is not a file address", hint="Write file:///absolute/path, or just the path."
        )
    return unquote(parts.path)
