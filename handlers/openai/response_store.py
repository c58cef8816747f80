"""Answers and conversations kept for later requests, in this process's memory.

An answer refers to the one that it continues, so a turn is kept once, however long its conversation
becomes, and as long as any later turn needs it. The store is bounded in bytes, of all keys together,
and in time since the last use. Over its bound, the key that uses most loses what it used longest ago.
For the event loop's thread only; what it gives out is immutable. It knows no shapes but ids.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from ..http.errors import ApiError
from ..http.keys import given_key
from ..http.service import Service

Json = dict[str, Any]
ENTRY_BYTES = 2048  # of an entry besides its JSON
_SALT = secrets.token_bytes(16)


class StoredItems:
    """One turn: what a request brought, and the response to it."""

    def __init__(self, entry_id: str, items: bytes, body: bytes, previous: StoredItems | None) -> None:
        """`items` is a JSON array of what the request brought; `body` the response, with its output."""
        self.id = entry_id
        self.items = items
        self.body = body
        self.previous = previous
        self.used_s = 0.0
        self.num_users = 0  # the index, and turns that continue it
        self.task: asyncio.Task[None] | None = None  # of one that is made in the background
        self.is_background = False

    @property
    def size_bytes(self) -> int:
        return len(self.items) + len(self.body) + ENTRY_BYTES

    def turns(self) -> list[StoredItems]:
        """This turn and those before it, oldest first."""
        turns: list[StoredItems] = []
        turn: StoredItems | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return turns[::-1]

    def own_items(self) -> Iterator[Json]:
        """The items of the request, and the output."""
        yield from msgspec.json.decode(self.items, type=list[Json])
        yield from msgspec.json.decode(self.body, type=Json).get("output", [])


class Conversation(StoredItems):
    """Items that requests add to. Its body is the conversation's object."""

    def __init__(self, entry_id: str, body: bytes) -> None:
        super().__init__(entry_id, b"[]", body, None)


class _Shelf:
    """The entries of one key, the longest unused first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, StoredItems] = OrderedDict()
        self.num_bytes = 0


class ResponseStore:
    def __init__(
        self, *, max_bytes: int, max_idle_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes = max_bytes
        self.max_idle_s = max_idle_s
        self._clock = clock
        self._shelves: dict[bytes, _Shelf] = {}

    @classmethod
    def of(cls, service: Service) -> ResponseStore:
        config = service.instance.config
        return cls(max_bytes=config.responses_bytes, max_idle_s=config.responses_idle_s)

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def __len__(self) -> int:
        return sum(len(shelf.entries) for shelf in self._shelves.values())

    def put(self, owner: bytes, entry: StoredItems) -> bool:
        """Keep an entry. False if it is larger than the store, with what it continues."""
        self._drop_idle()
        if sum(turn.size_bytes for turn in entry.turns()) > self.max_bytes:
            return False
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.entries[entry.id] = entry
        entry.used_s = self._clock()
        self._retain(shelf, entry)
        self._make_room(entry)
        return True

    def change(self, owner: bytes, entry: StoredItems, *, items: bytes | None = None, body: bytes) -> bool:
        """Replace what an entry holds. False if that is larger than the store: it is unchanged then."""
        size_bytes = len(entry.items if items is None else items) + len(body) + ENTRY_BYTES
        others = sum(turn.size_bytes for turn in entry.turns()) - entry.size_bytes
        if others + size_bytes > self.max_bytes:
            return False
        shelf = self._shelves.get(owner)
        if entry.num_users and shelf is not None:
            shelf.num_bytes += size_bytes - entry.size_bytes
        entry.items = entry.items if items is None else items
        entry.body = body
        self._make_room(entry)
        return True

    def get(self, owner: bytes, entry_id: str) -> StoredItems | None:
        self._drop_idle()
        shelf = self._shelves.get(owner)
        entry = None if shelf is None else shelf.entries.get(entry_id)
        if shelf is None or entry is None:
            return None
        entry.used_s = self._clock()
        shelf.entries.move_to_end(entry_id)
        return entry

    def remove(self, owner: bytes, entry_id: str) -> bool:
        shelf = self._shelves.get(owner)
        if shelf is None or entry_id not in shelf.entries:
            return False
        self._drop(owner, entry_id)
        return True

    def find_item(self, owner: bytes, item_id: str) -> Json | None:
        """The item of this id in any of the owner's entries, the last used first."""
        shelf = self._shelves.get(owner)
        needle = msgspec.json.encode(item_id)
        for entry in reversed(shelf.entries.values()) if shelf else ():
            if needle in entry.items or needle in entry.body:
                for item in entry.own_items():
                    if item.get("id") == item_id:
                        return item
        return None

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the counts are those of the entries. For tests."""
        for shelf in self._shelves.values():
            reachable = {id(turn): turn for entry in shelf.entries.values() for turn in entry.turns()}
            assert shelf.num_bytes == sum(turn.size_bytes for turn in reachable.values())
        assert self.num_bytes <= self.max_bytes
        assert all(shelf.entries for shelf in self._shelves.values())

    def _retain(self, shelf: _Shelf, entry: StoredItems) -> None:
        each: StoredItems | None = entry
        while each is not None:
            each.num_users += 1
            if each.num_users > 1:
                return
            shelf.num_bytes += each.size_bytes
            each = each.previous

    def _drop(self, owner: bytes, entry_id: str) -> None:
        shelf = self._shelves[owner]
        each: StoredItems | None = shelf.entries.pop(entry_id)
        if each is not None and each.task is not None:
            each.task.cancel()
        while each is not None:
            each.num_users -= 1
            if each.num_users:
                break
            shelf.num_bytes -= each.size_bytes
            each = each.previous
        if not shelf.entries:
            del self._shelves[owner]

    def _drop_idle(self) -> None:
        limit_s = self._clock() - self.max_idle_s
        for owner, shelf in list(self._shelves.items()):
            while shelf.entries and next(iter(shelf.entries.values())).used_s < limit_s:
                self._drop(owner, next(iter(shelf.entries)))

    def _make_room(self, kept: StoredItems) -> None:
        """Drop other entries until the rest is within the bound."""
        while self.num_bytes > self.max_bytes:
            owners = sorted(self._shelves, key=lambda each: self._shelves[each].num_bytes, reverse=True)
            victims = (
                (owner, name)
                for owner in owners
                for name, entry in self._shelves[owner].entries.items()
                if entry is not kept
            )
            self._drop(*next(victims))


def owner_of(request: web.Request) -> bytes:
    """The digest of the request's API key: entries are found with the key that made them."""
    return hashlib.blake2b(given_key(request.headers), key=_SALT, digest_size=16).digest()


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def not_found(kind: str, entry_id: str, store: ResponseStore, *, param: str | None = None) -> ApiError:
    return ApiError(
        404,
        f"the {kind} {entry_id[:100]!r} is not here: this server keeps them in its memory, for "
        f"{store.max_idle_s:g} s after their last use, within {store.max_bytes} bytes, and for the API key that made "
        "them; send the conversation's items as input",
        param=param,
        code="not_found",
    )


def listed(items: Sequence[Json], query: Mapping[str, str]) -> Json:
    """A page of items by the parameters `after`, `limit` and `order` (`desc` unless given). Raises `ApiError`."""
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order must be asc or desc", param="order")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= 100:
        raise ApiError(400, "limit must be a number from 1 to 100", param="limit")
    ordered = list(items) if order == "asc" else list(items)[::-1]
    if after := query.get("after"):
        places = [place for place, item in enumerate(ordered) if item.get("id") == after]
        if not places:
            raise ApiError(400, f"after is {after[:100]!r}, which is no item here", param="after")
        ordered = ordered[places[0] + 1 :]
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }
