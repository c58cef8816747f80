"""A folder of a source, as a source of its own that others share."""

from __future__ import annotations

from collections.abc import Iterator

from .base import ObjectInfo, Source, closed


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
