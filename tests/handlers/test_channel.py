"""Items cross from any thread into the loop in order, with few wake-ups, within bounds."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.support.load import patience_s

from teneral.handlers.function.channel import ChannelClosedError, LoopCalls, ThreadToLoopChannel


async def test_items_of_several_threads_all_arrive_each_in_its_order() -> None:
    channel: ThreadToLoopChannel[tuple[int, int]] = ThreadToLoopChannel()

    def send(sender: int) -> None:
        for number in range(500):
            channel.post((sender, number))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    got: list[tuple[int, int]] = []
    while len(got) < 2000:
        got += await channel.take()
    for thread in threads:
        thread.join()
    for sender in range(4):
        assert [number for who, number in got if who == sender] == list(range(500))


async def test_what_is_posted_together_is_taken_together_with_one_wake_up() -> None:
    loop = asyncio.get_running_loop()
    calls = LoopCalls()
    channels: list[ThreadToLoopChannel[int]] = [ThreadToLoopChannel(calls) for _ in range(3)]
    wake_ups = 0
    call = loop.call_soon_threadsafe

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal wake_ups
        wake_ups += 1
        return call(*args, **kwargs)  # type: ignore[arg-type]

    loop.call_soon_threadsafe = counting  # type: ignore[method-assign, assignment]
    for number in range(10):
        for channel in channels:
            channel.post(number)
    assert [await channel.take() for channel in channels] == [list(range(10))] * 3
    assert wake_ups == 1


async def test_beyond_the_bound_items_are_dropped_and_logged_once() -> None:
    overflows = []
    channel: ThreadToLoopChannel[int] = ThreadToLoopChannel(
        max_items=3, on_overflow=lambda: overflows.append(True)
    )
    for number in range(10):
        channel.post(number)
    assert await channel.take() == [0, 1, 2]
    assert overflows == [True]


def test_after_the_loop_is_gone_items_are_dropped_quietly() -> None:
    async def open_one() -> ThreadToLoopChannel[str]:
        return ThreadToLoopChannel()

    asyncio.run(open_one()).post("late")


async def test_a_producer_waits_for_room_and_hears_that_the_consumer_has_left() -> None:
    channel: ThreadToLoopChannel[int] = ThreadToLoopChannel(max_items=2)
    sent: list[int] = []
    ended = threading.Event()

    def produce() -> None:
        try:
            for number in range(10):
                channel.put(number)
                sent.append(number)
        except ChannelClosedError:
            ended.set()

    thread = threading.Thread(target=produce)
    thread.start()
    assert [await anext(channel) for _ in range(3)] == [0, 1, 2]
    channel.close()
    assert await asyncio.to_thread(ended.wait, patience_s(10))
    thread.join()
    assert len(sent) <= 5  # those taken, and the bound


async def test_after_the_last_item_comes_the_producers_error() -> None:
    channel: ThreadToLoopChannel[int] = ThreadToLoopChannel()
    channel.post(1)
    channel.end(KeyError("why"))
    assert await anext(channel) == 1
    with pytest.raises(KeyError, match="why"):
        await anext(channel)
