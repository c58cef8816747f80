"""A store in this process's memory, for tests and experiments. Thread-safe; holds whole objects as
bytes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from teneral.loader.errors import AlreadyExistsError, NotFoundError
from teneral.loader.sources import base
from teneral.loader.sources.base import ObjectInfo, Writer, check_name


@dataclass
class _Objects:
    """The objects themselves, shared by all stores that were opened on them."""

    objects: dict[str, tuple[bytes, str]] = field(default_factory=dict)  # name → (content, version)
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.Lock = field(default_factory=threading.Lock)


class MemoryStore:
    """A `Store`. Its objects outlive `close`: `reopen` gives another store on the same ones."""

    def __init__(self, objects: dict[str, bytes] | None = None, *, label: str = "objects") -> None:
        self._url = f"memory://{label}"
        self._objects = _Objects()
        self._closed = False
        for name, data in (objects or {}).items():
            self.put(name, data)

    def reopen(self) -> MemoryStore:
        """A new, open store on the same objects."""
        other = MemoryStore()
        other._url, other._objects = self._url, self._objects
        return other

    @property
    def url(self) -> str:
        return self._url

    def stat(self, name: str) -> ObjectInfo:
        return self._find(name)[1]

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        data, info = self._find(name)
        if info.size_bytes > max_bytes:
            raise base.too_large(self._url, name, info.size_bytes, max_bytes)
        return data, info

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        view = base.byte_view(buffer)
        data, info = self._find(name)
        if version is not None and info.version != version:
            raise base.changed(self._url, name, f"version {version} was expected, {info.version} is there")
        end = start + len(view)
        if end > len(data):
            raise base.ended_early(self._url, name, start, end, len(data))
        view[:] = data[start:end]
        return info.version

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._check_open("")
        with self._objects.lock:
            found = [
                ObjectInfo(name, len(data), version)
                for name, (data, version) in self._objects.objects.items()
                if name.startswith(prefix)
            ]
        return iter(sorted(found, key=lambda info: info.name))

    def close(self) -> None:
        self._closed = True

    def create(self, name: str, *, if_absent: bool = False) -> MemoryWriter:
        self._check_open(check_name(name))
        return MemoryWriter(self, name, if_absent=if_absent)

    def put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        self._check_open(check_name(name))
        with self._objects.lock:
            _, present = self._objects.objects.get(name, (b"", None))
            if (if_absent and present is not None) or (if_version is not None and present != if_version):
                raise AlreadyExistsError(
                    f"{name} in {self._url} was not written: version {present} is there",
                    source=self._url,
                    name=name,
                )
            version = f"v{next(self._objects.versions)}"
            self._objects.objects[name] = (bytes(data), version)
        return ObjectInfo(name, len(data), version)

    def delete(self, name: str) -> None:
        self._check_open(check_name(name))
        with self._objects.lock:
            self._objects.objects.pop(name, None)

    def _find(self, name: str) -> tuple[bytes, ObjectInfo]:
        self._check_open(check_name(name))
        with self._objects.lock:
            found = self._objects.objects.get(name)
        if found is None:
            raise NotFoundError(f"there is no {name} in {self._url}", source=self._url, name=name)
        data, version = found
        return data, ObjectInfo(name, len(data), version)

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise base.closed(self._url, name)


class MemoryWriter(Writer):
    """Collects an object's bytes; the store gets them on `commit`."""

    def __init__(self, store: MemoryStore, name: str, *, if_absent: bool = False) -> None:
        super().__init__()
        self._if_absent = if_absent
        self._store = store
        self._name = name
        self._data = bytearray()

    def _append(self, data: bytes | bytearray | memoryview) -> None:
        self._data += data

    def _finish(self) -> ObjectInfo:
        return self._store.put(self._name, bytes(self._data), if_absent=self._if_absent)

    def _discard(self) -> None:
        self._data = bytearray()
