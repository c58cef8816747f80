"""Items cross from any thread into the loop in order, with few wake-ups, within bounds."""

from __future__ import annotations

import asyncio
import threading

from teneral.handlers.http.mailbox import Bridge


async def test_items_of_several_threads_all_arrive_each_in_its_order() -> None:
    mailbox, post = Bridge().open(None, lambda: None)

    def send(sender: int) -> None:
        for number in range(500):
            post((sender, number))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    got: list[tuple[int, int]] = []
    while len(got) < 2000:
        got += await mailbox.take()
    for thread in threads:
        thread.join()
    for sender in range(4):
        assert [number for who, number in got if who == sender] == list(range(500))


async def test_what_is_posted_together_is_taken_together_with_one_wake_up() -> None:
    loop = asyncio.get_running_loop()
    bridge = Bridge()
    mailboxes = [bridge.open(None, lambda: None) for _ in range(3)]
    wake_ups = 0
    call = loop.call_soon_threadsafe

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal wake_ups
        wake_ups += 1
        return call(*args, **kwargs)  # type: ignore[arg-type]

    loop.call_soon_threadsafe = counting  # type: ignore[method-assign, assignment]
    for number in range(10):
        for _, post in mailboxes:
            post(number)
    assert [await mailbox.take() for mailbox, _ in mailboxes] == [list(range(10))] * 3
    assert wake_ups == 1


async def test_beyond_the_bound_items_are_dropped_and_logged_once() -> None:
    overflows = []
    mailbox, post = Bridge().open(3, lambda: overflows.append(True))
    for number in range(10):
        post(number)
    assert await mailbox.take() == [0, 1, 2]
    assert overflows == [True]


def test_after_the_loop_is_gone_items_are_dropped_quietly() -> None:
    async def open_one() -> object:
        return Bridge().open(None, lambda: None)[1]

    post = asyncio.run(open_one())
    assert post("late") is None  # type: ignore[operator]
