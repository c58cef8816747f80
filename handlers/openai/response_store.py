"""Answers and conversations kept for later requests: the protocol of their stores, and the store in
this process's memory; `response_objects.py` has the other one.

Entries belong to an API key, and are found by their ids. A store is bounded in bytes, of all keys
together, and in time. Over its bound, the key that uses most loses what it used longest ago. For the
event loop's thread only. It knows no shapes but ids and a response's status.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from ..http.errors import ApiError
from ..http.keys import given_key

Json = dict[str, Any]
ENTRY_BYTES = 2048  # of an entry besides its JSON
QUEUED, IN_PROGRESS = "queued", "in_progress"
LEASE_S = 60.0  # one that is made in the background is written again before it is this old
_ID_DIGITS = 48  # of an entry's id, which begin the ids of its items


class _StatusOnly(msgspec.Struct):
    status: str = ""


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

    @property
    def size_bytes(self) -> int:
        return len(self.items) + len(self.body) + ENTRY_BYTES

    @property
    def is_complete(self) -> bool:
        """False while a response is made in the background."""
        return msgspec.json.decode(self.body, type=_StatusOnly).status not in (QUEUED, IN_PROGRESS)

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


Edit = Callable[[StoredItems], tuple[bytes, bytes]]  # the new items and body of an entry


class ResponseStore(Protocol):
    """Entries by their API key and id. The methods raise `ApiError` 503 where a store cannot be reached."""

    max_bytes: int  # 0: nothing is kept
    max_idle_s: float
    place: str  # of the entries, for messages

    async def get(self, owner: bytes, entry_id: str) -> StoredItems | None: ...

    async def put(self, owner: bytes, entry: StoredItems) -> bool:
        """Keep an entry. False if it is larger than the store, with what it continues."""

    async def change(self, owner: bytes, entry: StoredItems, edit: Edit) -> bool:
        """Replace what an entry holds by what `edit` makes of it, which may be called again where another
        request has changed it. False if it is gone, or larger than the store: it is unchanged then.
        """

    async def remove(self, owner: bytes, entry_id: str) -> bool:
        """False if it is not there."""

    def statistics(self) -> dict[str, float]:
        """Its figures, for metrics."""

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the counts are those of the entries. For tests."""


class _Shelf:
    """The entries of one key, the longest unused first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, StoredItems] = OrderedDict()
        self.num_bytes = 0


class MemoryResponses:
    """The entries of one process. An answer refers to the one that it continues, so a turn is kept once, however
    long its conversation becomes, and as long as any later turn needs it.
    """

    def __init__(
        self, *, max_bytes: int, max_idle_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes = max_bytes
        self.max_idle_s = max_idle_s
        self.place = "its memory"
        self._clock = clock
        self._shelves: dict[bytes, _Shelf] = {}
        self._num_expired = self._num_evicted = 0

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def __len__(self) -> int:
        return sum(len(shelf.entries) for shelf in self._shelves.values())

    async def put(self, owner: bytes, entry: StoredItems) -> bool:
        self._drop_idle()
        if sum(turn.size_bytes for turn in entry.turns()) > self.max_bytes:
            return False
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.entries[entry.id] = entry
        entry.used_s = self._clock()
        self._retain(shelf, entry)
        self._make_room(entry)
        return True

    async def change(self, owner: bytes, entry: StoredItems, edit: Edit) -> bool:
        shelf = self._shelves.get(owner)
        if shelf is None or shelf.entries.get(entry.id) is not entry:
            return False
        items, body = edit(entry)
        size_bytes = len(items) + len(body) + ENTRY_BYTES
        others = sum(turn.size_bytes for turn in entry.turns()) - entry.size_bytes
        if others + size_bytes > self.max_bytes:
            return False
        shelf.num_bytes += size_bytes - entry.size_bytes
        entry.items, entry.body = items, body
        self._make_room(entry)
        return True

    async def get(self, owner: bytes, entry_id: str) -> StoredItems | None:
        self._drop_idle()
        shelf = self._shelves.get(owner)
        entry = None if shelf is None else shelf.entries.get(entry_id)
        if shelf is None or entry is None:
            return None
        entry.used_s = self._clock()
        shelf.entries.move_to_end(entry_id)
        return entry

    async def remove(self, owner: bytes, entry_id: str) -> bool:
        shelf = self._shelves.get(owner)
        if shelf is None or entry_id not in shelf.entries:
            return False
        self._drop(owner, entry_id)
        return True

    def statistics(self) -> dict[str, float]:
        return {
            "entries": len(self),
            "bytes": self.num_bytes,
            "limit_bytes": self.max_bytes,
            "expired_total": self._num_expired,
            "evicted_total": self._num_evicted,
        }

    def check_integrity(self) -> None:
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
                self._num_expired += 1

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
            self._num_evicted += 1


def owner_of(request: web.Request) -> bytes:
    """The digest of the request's API key: entries are found with the key that made them, on every server."""
    return hashlib.blake2b(given_key(request.headers), person=b"teneral-response", digest_size=16).digest()


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(_ID_DIGITS // 2)}"


def new_item_id(prefix: str, entry_id: str) -> str:
    """The id of an item of this entry, which is found by it."""
    return f"{prefix}_{entry_id.partition('_')[2]}{secrets.token_hex(4)}"


async def find_item(store: ResponseStore, owner: bytes, item_id: str) -> Json | None:
    """The item of this id in the entry that gave it the id."""
    digits = item_id.partition("_")[2][:_ID_DIGITS]
    for kind in ("resp", "conv"):
        entry = await store.get(owner, f"{kind}_{digits}")
        if entry is not None:
            return next((item for item in entry.own_items() if item.get("id") == item_id), None)
    return None


def not_found(kind: str, entry_id: str, store: ResponseStore, *, param: str | None = None) -> ApiError:
    return ApiError(
        404,
        f"the {kind} {entry_id[:100]!r} is not here: this server keeps them in {store.place}, for "
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
