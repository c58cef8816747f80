"""The stores of responses and conversations, in memory and as objects: their bounds, and what several of them share."""

from __future__ import annotations

import asyncio
import gzip
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.ports import free_port

from teneral.handlers.http.errors import ApiError
from teneral.handlers.openai.response_objects import ResponseObjects
from teneral.handlers.openai.response_store import (
    ENTRY_BYTES,
    LEASE_S,
    Conversation,
    MemoryResponses,
    StoredItems,
)
from teneral.loader.errors import UsageError
from teneral.loader.sources.base import SourceOptions
from teneral.runtime.resolve import resolve


def turn(name: str, size: int = 0, previous: StoredItems | None = None) -> StoredItems:
    return StoredItems(name, b"[]", b"x" * size, previous)


def holding(num_bytes: int) -> Any:
    return lambda entry: (b"x" * num_bytes, b"{}")


async def test_the_store_is_bounded_in_bytes_and_the_longest_unused_goes_first() -> None:
    store = MemoryResponses(max_bytes=4 * (ENTRY_BYTES + 1002), max_idle_s=10, clock=lambda: 0.0)
    for name in "abcd":
        assert await store.put(b"k", turn(name, 1000))
    assert await store.get(b"k", "a") is not None
    assert await store.put(b"k", turn("e", 1000))
    assert await store.get(b"k", "b") is None
    assert [await store.get(b"k", name) is not None for name in "acde"] == 4 * [True]
    assert not await store.put(b"k", turn("f", 1 << 20))
    assert await store.put(b"other", turn("g", 1000))  # the key that uses most makes room
    assert await store.get(b"other", "g") is not None
    assert len(store) == 4
    store.check_integrity()


async def test_a_turn_is_kept_as_long_as_another_continues_it() -> None:
    store = MemoryResponses(max_bytes=1 << 20, max_idle_s=10, clock=lambda: 0.0)
    first = turn("a", 1000)
    second = turn("b", 1000, first)
    assert await store.put(b"k", first)
    assert await store.put(b"k", second)
    assert await store.remove(b"k", "a")
    store.check_integrity()
    assert store.num_bytes == first.size_bytes + second.size_bytes
    assert await store.remove(b"k", "b")
    assert store.num_bytes == 0
    assert not await store.remove(b"k", "b")


async def test_what_is_not_used_is_dropped_after_its_time() -> None:
    now = [0.0]
    store = MemoryResponses(max_bytes=1 << 20, max_idle_s=10, clock=lambda: now[0])
    await store.put(b"k", turn("a"))
    await store.put(b"k", turn("b"))
    now[0] = 9.0
    assert await store.get(b"k", "a") is not None
    now[0] = 11.0
    assert await store.get(b"k", "b") is None
    assert await store.get(b"k", "a") is not None
    now[0] = 30.0
    assert await store.get(b"k", "a") is None
    assert store.num_bytes == 0


async def test_a_conversation_that_grows_makes_room_or_stays_as_it_is() -> None:
    store = MemoryResponses(max_bytes=3 * ENTRY_BYTES, max_idle_s=10, clock=lambda: 0.0)
    conversation = Conversation("c", b"{}")
    assert await store.put(b"k", conversation)
    assert await store.put(b"k", turn("a", 100))
    assert await store.change(b"k", conversation, holding(2 * ENTRY_BYTES - 100))
    assert await store.get(b"k", "a") is None
    assert not await store.change(b"k", conversation, holding(3 * ENTRY_BYTES))
    assert len(conversation.items) == 2 * ENTRY_BYTES - 100
    store.check_integrity()


OWNER, OTHER = bytes(16), bytes([1] * 16)
DONE = b'{"status":"completed","output":[]}'


def stored(number: int, text: str = "", *, body: bytes = DONE) -> StoredItems:
    items = f'[{{"text":"{text}"}}]'.encode()
    return StoredItems(f"resp_{number:048x}", items, body, None)


def noise(num_bytes: int) -> str:
    """A text that does not become smaller."""
    return os.urandom(num_bytes * 3 // 4).hex()


async def test_a_store_that_cannot_be_reached_is_a_clear_error() -> None:
    options = SourceOptions(endpoint_url=f"http://127.0.0.1:{free_port()}", anonymous=True)
    store = ResponseObjects("s3://bucket/responses", options, max_bytes=1 << 20, max_idle_s=100)
    with pytest.raises(ApiError) as caught:
        await store.get(OWNER, stored(1).id)
    assert (caught.value.status, caught.value.code) == (503, "response_store_unavailable")
    assert store.statistics()["failures_total"] > 0


async def test_objects_are_bounded_in_bytes_of_all_keys_and_in_time(tmp_path: Path) -> None:
    now = [time.time()]
    options: Any = {"max_bytes": 100_000, "max_idle_s": 10, "clock": lambda: now[0]}
    store = ResponseObjects(str(tmp_path), SourceOptions(), **options)
    assert await store.put(OTHER, stored(100))
    for number in range(10):
        assert await store.put(OWNER, stored(number, noise(20_000)))
        os.utime(next(tmp_path.glob(f"*/resp_{number:048x}*")), (now[0] - 9 + number, now[0] - 9 + number))
    assert await store.get(OTHER, stored(100).id) is not None
    assert await store.get(OWNER, stored(0).id) is None
    assert await store.get(OWNER, stored(9).id) is not None
    sizes = [path.stat().st_size for path in tmp_path.glob("*/*.gz")]
    assert sum(sizes) <= 100_000
    assert not await store.put(OWNER, stored(11, noise(200_000)))
    figures = store.statistics()
    assert figures["evicted_total"] > 0
    store.check_integrity()
    now[0] += 20
    assert await store.get(OWNER, stored(9).id) is None
    ResponseObjects(str(tmp_path), SourceOptions(), **options)  # tidies at its start
    while list(tmp_path.glob("*/*.gz")):
        await asyncio.sleep(0.01)


async def test_a_conversation_that_two_instances_change_loses_nothing(tmp_path: Path) -> None:
    options: Any = {"max_bytes": 1 << 20, "max_idle_s": 100}
    stores = [ResponseObjects(str(tmp_path), SourceOptions(), **options) for _ in range(2)]
    conversation = Conversation(f"conv_{0:048x}", b"{}")
    assert await stores[0].put(OWNER, conversation)

    async def add(number: int) -> None:
        def edit(entry: StoredItems) -> tuple[bytes, bytes]:
            return msgspec.json.encode([*entry.own_items(), {"id": number}]), entry.body

        while True:
            try:
                assert await stores[number % 2].change(OWNER, conversation, edit)
                return
            except ApiError:  # too many others: the client tries again
                continue

    await asyncio.gather(*(add(number) for number in range(8)))
    found = await stores[0].get(OWNER, conversation.id)
    assert found is not None
    assert sorted(item["id"] for item in found.own_items()) == list(range(8))


async def test_a_response_whose_server_stopped_is_found_failed(tmp_path: Path) -> None:
    now = [time.time()]
    store = ResponseObjects(
        str(tmp_path), SourceOptions(), max_bytes=1 << 20, max_idle_s=1000, clock=lambda: now[0]
    )
    entry = stored(1, body=b'{"status":"in_progress"}')
    await store.put(OWNER, entry)
    now[0] += LEASE_S - 1
    found = await store.get(OWNER, entry.id)
    assert found is not None
    assert not found.is_complete
    now[0] += 2
    found = await store.get(OWNER, entry.id)
    assert found is not None
    assert msgspec.json.decode(found.body)["status"] == "failed"


DAMAGED: dict[
    str, Callable[[], bytes]
] = {  # made in the test: gzip writes the time, and names of tests must not have it
    "nothing": lambda: b"",
    "no gzip": lambda: b"no gzip",
    "no fields": lambda: gzip.compress(b"{}"),
    "too large": lambda: gzip.compress(bytes(40 << 20)),
}


@pytest.mark.parametrize("what", DAMAGED)
async def test_a_damaged_object_is_not_found(tmp_path: Path, what: str) -> None:
    store = ResponseObjects(str(tmp_path), SourceOptions(), max_bytes=1 << 20, max_idle_s=100)
    await store.put(OWNER, stored(1))
    next(tmp_path.glob("*/*.gz")).write_bytes(DAMAGED[what]())
    assert await store.get(OWNER, stored(1).id) is None
    assert store.statistics()["failures_total"] == 1
    assert await store.get(OWNER, "resp_../../etc/passwd") is None


def test_an_address_that_cannot_be_written_to_is_refused_at_once() -> None:
    for address in ("https://example.com/x", "ftp://x/y", "hf://a/b"):
        with pytest.raises(UsageError, match="responses"):
            resolve({"model": "m", "responses_store": address}, environment={})
