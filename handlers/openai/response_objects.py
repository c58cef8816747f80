"""Answers and conversations as objects of a store, which other instances and later ones find there.

An object, OWNER/ID.json.gz, is an entry with all the items that it continues: it is read in one
request, and nothing else is needed for it. Objects are written whole. A conversation is replaced on
the condition that it is still the one that was read. Objects that are older than the bound in time,
and the oldest of the key that has most above the bound in bytes, are deleted by any instance that
writes: at its start, every `SWEEP_S`, and before it would exceed the bound.

What the folder holds is as confidential as the conversations themselves. It has no API keys, but
their digests, by which one who can list it can check a guessed key.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import msgspec

from ...loader.errors import AlreadyExistsError, FormatError, NotFoundError, SourceError
from ...loader.sources.base import ObjectInfo, SourceOptions, Store
from ...loader.sources.open import open_store
from ..http.errors import SERVER_ERROR, ApiError
from ..http.json_bodies import encode
from .response_store import ENTRY_BYTES, LEASE_S, Conversation, Edit, Json, StoredItems

logger = logging.getLogger("teneral.http")

T = TypeVar("T")
MAX_THREADS = 4
MAX_OBJECT_BYTES = 32 << 20  # of an entry's JSON
MAX_OBJECTS = 50_000  # of all keys
SWEEP_S = 300.0
MAX_ATTEMPTS = 8  # at changing a conversation that other requests change, too
_ENTRY_ID = re.compile(r"(?:resp|conv)_[0-9a-f]{48}")
_NAME = re.compile(r"[0-9a-f]{32}/(?:resp|conv)_[0-9a-f]{48}\.json\.gz")
_GZIP = zlib.MAX_WBITS + 16


class StoredRecord(msgspec.Struct, forbid_unknown_fields=True):
    """The content of an object."""

    version: Literal[1]
    written_unix_s: float
    items: msgspec.Raw  # of the request and of those that it continues
    body: msgspec.Raw


class ResponseObjects:
    """A `ResponseStore` on a folder of a store. Its requests run in threads of its own."""

    def __init__(
        self,
        address: str,
        options: SourceOptions,
        *,
        max_bytes: int,
        max_idle_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` gives the time in seconds since 1970. Raises `UsageError` for an unusable address."""
        self.max_bytes = max_bytes
        self.max_idle_s = max_idle_s
        # A request waits for it, which a model's load need not fear.
        options = options._replace(base=None, max_attempts=3, outage_s=2.0)
        self._store: Store = open_store(address, options)
        self.place = "a store"  # its address is not the clients' business
        self._clock = clock
        self._threads = ThreadPoolExecutor(MAX_THREADS, "teneral-responses")
        self._lock = threading.Lock()  # of the figures
        self._sweeping = threading.Lock()
        self._num_entries = self._num_bytes = 0
        self._figures = {f"{name}_total": 0 for name in ("reads", "writes", "expired", "evicted", "failures")}
        self._swept_s = -SWEEP_S
        if max_bytes:
            self._threads.submit(self._sweep_quietly)

    async def get(self, owner: bytes, entry_id: str) -> StoredItems | None:
        found = await self._run(self._read, owner, entry_id)
        return None if found is None else found[0]

    async def put(self, owner: bytes, entry: StoredItems) -> bool:
        return await self._run(self._put, owner, entry)

    async def change(self, owner: bytes, entry: StoredItems, edit: Edit) -> bool:
        return await self._run(self._change, owner, entry, edit)

    async def remove(self, owner: bytes, entry_id: str) -> bool:
        return await self._run(self._remove, owner, entry_id)

    def statistics(self) -> dict[str, float]:
        """`entries` and `bytes` are as of the last sweep, with what this instance wrote since."""
        with self._lock:
            return {
                "entries": self._num_entries,
                "bytes": self._num_bytes,
                "limit_bytes": self.max_bytes,
                **self._figures,
            }

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every object is one of this module's, and readable."""
        for info in self._objects():
            owner, _, rest = info.name.partition("/")
            assert self._read(bytes.fromhex(owner), rest.partition(".")[0]) is not None or self._is_old(info)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)
        except SourceError as error:
            self._count("failures")
            logger.warning("the store of responses: %s", error)
            raise ApiError(
                503,
                "the store of responses cannot be used now; send the conversation's items as input, with store false",
                kind=SERVER_ERROR,
                code="response_store_unavailable",
            ) from error

    # -- in a thread

    def _read(self, owner: bytes, entry_id: str) -> tuple[StoredItems, str] | None:
        """The entry, and the version of its object."""
        if not _ENTRY_ID.fullmatch(entry_id):
            return None
        self._count("reads")
        try:
            data, info = self._store.read(_name(owner, entry_id), max_bytes=MAX_OBJECT_BYTES)
            record = _unpacked(data, info.name)
        except NotFoundError:
            return None
        except FormatError as error:
            self._count("failures")
            logger.warning("the store of responses: %s", error)
            return None
        age_s = self._clock() - record.written_unix_s
        if age_s > self.max_idle_s:
            return None
        items, body = bytes(record.items), bytes(record.body)
        if entry_id.startswith("conv_"):
            entry: StoredItems = Conversation(entry_id, body)
            entry.items = items
        else:
            entry = StoredItems(entry_id, items, body, None)
            if age_s > LEASE_S and not entry.is_complete:
                entry.body = _abandoned(body)
        return entry, info.version

    def _put(self, owner: bytes, entry: StoredItems) -> bool:
        turns = entry.turns()
        items = entry.items
        if len(turns) > 1:
            before = [item for turn in turns[:-1] for item in turn.own_items()]
            items = encode([*before, *msgspec.json.decode(items, type=list[Json])])
        if not self._write(owner, entry.id, items, entry.body, None):
            return False
        entry.items, entry.previous = items, None
        return True

    def _change(self, owner: bytes, entry: StoredItems, edit: Edit) -> bool:
        for _ in range(MAX_ATTEMPTS):
            found = self._read(owner, entry.id)
            if found is None:
                return False
            current, version = found
            items, body = edit(current)
            try:
                if not self._write(owner, entry.id, items, body, version):
                    return False
            except AlreadyExistsError:  # another request has changed it
                continue
            entry.items, entry.body = items, body
            return True
        raise ApiError(409, "too many requests change this conversation", code="conflict")

    def _write(self, owner: bytes, entry_id: str, items: bytes, body: bytes, version: str | None) -> bool:
        if len(items) + len(body) > MAX_OBJECT_BYTES:
            return False
        data = _packed(StoredRecord(1, self._clock(), msgspec.Raw(items), msgspec.Raw(body)))
        if max(len(data), ENTRY_BYTES) > self.max_bytes:
            return False
        self._make_room(max(len(data), ENTRY_BYTES))
        self._store.put(_name(owner, entry_id), data, if_version=version)
        self._count("writes")
        with self._lock:
            self._num_entries += version is None
            self._num_bytes += max(len(data), ENTRY_BYTES)
        return True

    def _remove(self, owner: bytes, entry_id: str) -> bool:
        if self._read(owner, entry_id) is None:
            return False
        self._store.delete(_name(owner, entry_id))
        return True

    # -- bounds

    def _make_room(self, num_bytes: int) -> None:
        with self._lock:
            is_full = self._num_bytes + num_bytes > self.max_bytes or self._num_entries >= MAX_OBJECTS
            is_due = time.monotonic() - self._swept_s > SWEEP_S
        if is_full:
            self._sweep(num_bytes)
        elif is_due:
            self._threads.submit(self._sweep_quietly)

    def _sweep_quietly(self) -> None:
        try:
            self._sweep(0)
        except SourceError as error:
            self._count("failures")
            logger.warning("the store of responses could not be tidied: %s", error)

    def _sweep(self, room_bytes: int) -> None:
        """Delete what is too old, and then the oldest of the key that has most, until there is this much room."""
        with self._sweeping:
            self._swept_s = time.monotonic()
            shelves: dict[str, list[ObjectInfo]] = {}
            for info in self._objects():
                if self._is_old(info):
                    self._store.delete(info.name)
                    self._count("expired")
                else:
                    shelves.setdefault(info.name.partition("/")[0], []).append(info)
            sizes = {owner: sum(map(_size, each)) for owner, each in shelves.items()}
            num_entries = sum(map(len, shelves.values()))
            for each in shelves.values():
                each.sort(key=lambda info: info.modified_unix_s or 0.0, reverse=True)
            max_bytes, max_entries = self.max_bytes, MAX_OBJECTS
            if sum(sizes.values()) + room_bytes > max_bytes or num_entries >= max_entries:
                # A tenth more: the next write should not have to list the store again.
                max_bytes, max_entries = int(0.9 * max_bytes), int(0.9 * max_entries)
            while sizes and (sum(sizes.values()) + room_bytes > max_bytes or num_entries >= max_entries):
                owner = max(sizes, key=lambda each: sizes[each])
                info = shelves[owner].pop()
                self._store.delete(info.name)
                self._count("evicted")
                sizes[owner] -= _size(info)
                num_entries -= 1
                if not shelves[owner]:
                    del sizes[owner]
            with self._lock:
                self._num_entries, self._num_bytes = num_entries, sum(sizes.values())

    def _objects(self) -> list[ObjectInfo]:
        try:
            return [info for info in self._store.list() if _NAME.fullmatch(info.name)]
        except NotFoundError:  # a folder that nothing was written to
            return []

    def _is_old(self, info: ObjectInfo) -> bool:
        return info.modified_unix_s is not None and self._clock() - info.modified_unix_s > self.max_idle_s

    def _count(self, name: str) -> None:
        with self._lock:
            self._figures[f"{name}_total"] += 1


def _name(owner: bytes, entry_id: str) -> str:
    return f"{owner.hex()}/{entry_id}.json.gz"


def _size(info: ObjectInfo) -> int:
    return max(info.size_bytes, ENTRY_BYTES)


def _packed(record: StoredRecord) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, _GZIP)
    return packer.compress(encode(record)) + packer.flush()


def _unpacked(data: bytes, name: str) -> StoredRecord:
    """Raises `FormatError` for what is not an object of this module."""
    unpacker = zlib.decompressobj(_GZIP)
    try:
        text = unpacker.decompress(data, MAX_OBJECT_BYTES + 4096)
        if not unpacker.eof:
            raise FormatError(f"{name} is cut off, or larger than {MAX_OBJECT_BYTES:,} bytes", where=name)
        return msgspec.json.decode(text, type=StoredRecord)
    except (zlib.error, msgspec.DecodeError) as error:
        raise FormatError(f"{name} is not a stored response: {error}", where=name) from error


def _abandoned(body: bytes) -> bytes:
    """The body of a response whose server has stopped before it was complete."""
    error = {"code": "server_error", "message": "the server that made this response has stopped"}
    return encode({**msgspec.json.decode(body, type=Json), "status": "failed", "error": error})
