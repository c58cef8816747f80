"""From an address to a source or a store. Imports only the module of the scheme that is asked for."""

from __future__ import annotations

import os
import re

from ..errors import UsageError
from .base import Source, SourceOptions, Store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_KNOWN = (
    "a path, file:///folder, s3://bucket/prefix, gs://bucket/prefix, or (for reading) http://… and https://…"
)


def open_source(url: str, options: SourceOptions | None = None) -> Source:
    """A source on the folder at `url`. Does no I/O: what is missing or forbidden shows at the first read.

    Raises `UsageError` for an address that cannot be meant. The caller closes the source.
    """
    match scheme_of(url):
        case "http" | "https":
            from .http import HttpSource

            return HttpSource(url, options)
        case _:
            return open_store(url, options)


def open_store(url: str, options: SourceOptions | None = None) -> Store:
    """As `open_source`, for a place that can be written to."""
    match scheme_of(url):
        case "":
            return _open_folder(url)
        case "file":
            return _open_folder(_path_of_file_url(url))
        case "s3":
            from .s3 import S3Store

            return S3Store(url, options)
        case "gs":
            from .gs.store import GsStore

            return GsStore(url, options)
        case "az":
            from .az.store import AzStore

            return AzStore(url, options)
        case "http" | "https":
            raise UsageError(f"{url} can only be read from", hint=f"Write to {_KNOWN}.")
        case scheme:
            raise UsageError(f"{url}: {scheme}:// is not a known kind of store", hint=f"Give {_KNOWN}.")


def scheme_of(url: str) -> str:
    """The address's scheme in lower case, '' for a plain path."""
    found = _SCHEME.match(url)
    return found.group(1).lower() if found else ""


def _open_folder(path: str) -> Store:
    from .file import FileStore

    if not path or "\0" in path:
        raise UsageError(f"{path!r} is not a usable path", hint=f"Give {_KNOWN}.")
    return FileStore(os.path.expanduser(path))


def _path_of_file_url(url: str) -> str:
    from urllib.parse import unquote, urlsplit  # most folders are named by their path

    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise UsageError(
            f"{url} is not a file address", hint="Write file:///absolute/path, or just the path."
        )
    return unquote(parts.path)
