"""Checks and errors that every kind of source words the same way. Knows no kind of source."""

from __future__ import annotations

from ..errors import ChangedError, FormatError, SourceClosedError, UsageError
from .base import check_name


def byte_view(buffer: memoryview) -> memoryview:
    """The buffer as plain bytes, without a copy. Raises `ValueError` for a read-only one (a caller's bug)."""
    view = memoryview(buffer).cast("B")
    if view.readonly:
        raise ValueError("a read-only buffer cannot be read into")
    return view


def is_name(name: str) -> bool:
    """Whether a listed name is one that the loader could ask for again."""
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
        hint="Start again; an artifact must not be written to while it is served.",
    )


def ended_early(source: str, name: str, start: int, end: int, size_bytes: int | None) -> ChangedError:
    """Bytes [start, end) were asked for and the object does not reach that far."""
    size = "it is shorter" if size_bytes is None else f"it has only {size_bytes:,} bytes"
    return changed(source, name, f"bytes {start:,} to {end:,} were expected, but {size}")


def closed(source: str, name: str) -> SourceClosedError:
    return SourceClosedError(
        f"reading {name or source} was given up: its source is closed", source=source, name=name
    )
