"""A toy kind of store: objects in one SQLite file. All that a kind of store needs is this file and its row.

    toy:///folder/objects.db/prefix

Run as a program, it is `teneral` with the row: `python -m tests.support.toy_store pack MODEL toy:///…`.
"""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

from teneral.loader.errors import AlreadyExistsError, NotFoundError, UsageError
from teneral.loader.sources import base, open
from teneral.loader.sources.base import ObjectInfo, SourceOptions, Writer, check_name
from teneral.loader.sources.open import StoreKind

ROW = {"toy": StoreKind(__name__, "ToyStore", "toy:///folder/objects.db/prefix")}
_TABLE = "CREATE TABLE IF NOT EXISTS objects (name TEXT PRIMARY KEY, data BLOB, version INTEGER)"
_NEXT = "SELECT coalesce(max(version), 0) + 1 FROM objects"


class ToyStore:
    """A `Store`. A connection an operation: SQLite's own locks do the rest."""

    def __init__(self, url: str, options: SourceOptions | None = None) -> None:
        path, mark, prefix = url.removeprefix("toy://").partition(".db")
        if not mark:
            raise UsageError(f"{url} names no .db file", hint="Write toy:///folder/objects.db/prefix.")
        self._url = url
        self._path = path + mark
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._closed = threading.Event()

    @property
    def url(self) -> str:
        return self._url

    def stat(self, name: str) -> ObjectInfo:
        return self._select(name, "NULL")[1]

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        info = self.stat(name)
        if info.size_bytes > max_bytes:
            raise base.too_large(self._url, name, info.size_bytes, max_bytes)
        return self._select(name, "data")

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        view = base.byte_view(buffer)
        data, info = self._select(name, f"substr(data, {start + 1}, {len(view)})")
        if version is not None and info.version != version:
            raise base.changed(self._url, name, f"version {version} was expected, {info.version} is there")
        if len(data) < len(view):
            raise base.ended_early(self._url, name, start, start + len(view), info.size_bytes)
        view[:] = data
        return info.version

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._check_open(prefix)
        with closing(self._connect()) as connection:
            rows = connection.execute("SELECT name, length(data), version FROM objects").fetchall()
        begin = self._prefix + prefix
        found = [(name, size, version) for name, size, version in rows if name.startswith(begin)]
        return (
            ObjectInfo(name.removeprefix(self._prefix), size, str(version))
            for name, size, version in sorted(found)
        )

    def close(self) -> None:
        self._closed.set()

    def create(self, name: str, *, if_absent: bool = False) -> ToyWriter:
        self._check_open(check_name(name))
        return ToyWriter(self, name, if_absent=if_absent)

    def put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        self._check_open(check_name(name))
        with closing(self._connect()) as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            key = (self._prefix + name,)
            row = connection.execute("SELECT version FROM objects WHERE name = ?", key).fetchone()
            present = None if row is None else str(row[0])
            if (if_absent and present is not None) or (if_version is not None and present != if_version):
                raise AlreadyExistsError(
                    f"{name} in {self._url} was not written: version {present} is there",
                    source=self._url,
                    name=name,
                )
            (version,) = connection.execute(_NEXT).fetchone()
            connection.execute("REPLACE INTO objects VALUES (?, ?, ?)", (*key, data, version))
        return ObjectInfo(name, len(data), str(version))

    def delete(self, name: str) -> None:
        self._check_open(check_name(name))
        with closing(self._connect()) as connection, connection:
            connection.execute("DELETE FROM objects WHERE name = ?", (self._prefix + name,))

    def _select(self, name: str, column: str) -> tuple[bytes, ObjectInfo]:
        self._check_open(check_name(name))
        query = f"SELECT {column}, length(data), version FROM objects WHERE name = ?"
        with closing(self._connect()) as connection:
            row = connection.execute(query, (self._prefix + name,)).fetchone()
        if row is None:
            raise NotFoundError(f"there is no {name} in {self._url}", source=self._url, name=name)
        self._check_open(name)
        return row[0], ObjectInfo(name, row[1], str(row[2]))

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=60)
        connection.execute(_TABLE)
        return connection

    def _check_open(self, name: str) -> None:
        if self._closed.is_set():
            raise base.closed(self._url, name)


class ToyWriter(Writer):
    """Collects an object's bytes; the store gets them on `commit`."""

    def __init__(self, store: ToyStore, name: str, *, if_absent: bool) -> None:
        super().__init__()
        self._store, self._name, self._if_absent = store, name, if_absent
        self._data = bytearray()

    def _append(self, data: bytes | bytearray | memoryview) -> None:
        self._data += data

    def _finish(self) -> ObjectInfo:
        return self._store.put(self._name, bytes(self._data), if_absent=self._if_absent)

    def _discard(self) -> None:
        self._data.clear()


if __name__ == "__main__":
    from teneral import cli

    open.KINDS.update({"toy": StoreKind("tests.support.toy_store", "ToyStore", ROW["toy"].form)})
    sys.exit(cli.run(sys.argv[1:]))
