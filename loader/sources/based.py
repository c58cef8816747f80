"""A fine-tune's folder together with its base's: one source with the objects of both.

Names that begin with a prefix are the base's. Everything else, as the address, is the fine-tune's.
It does not know what the objects are.
"""

from __future__ import annotations

from collections.abc import Iterator

from .base import ObjectInfo, Remote, Source


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
