"""Works in flight: bounded, waited for, ended with a reason."""

from __future__ import annotations

import asyncio

import pytest

from teneral.handlers.http.errors import ApiError
from teneral.handlers.http.inflight import InFlight, RequestWork
from teneral.runtime.errors import CapacityError, DrainingError


async def test_a_drain_waits_for_what_runs() -> None:
    works = InFlight(8)
    go_on = asyncio.Event()

    async def task() -> str:
        async with works.work():
            await go_on.wait()
            return "done"

    running = asyncio.create_task(task())
    await asyncio.sleep(0)
    draining = asyncio.create_task(works.drain(60))
    await asyncio.sleep(0)
    with pytest.raises(DrainingError):
        async with works.work():
            pass
    go_on.set()
    assert await draining is True
    assert await running == "done"


async def test_what_outlasts_the_drain_is_ended_with_that_reason() -> None:
    works = InFlight(8)

    async def task() -> None:
        async with works.work():
            await asyncio.sleep(60)

    running = asyncio.create_task(task())
    await asyncio.sleep(0)
    assert await works.drain(0.01) is False
    with pytest.raises(DrainingError):
        await running


async def test_inside_the_work_an_ending_differs_from_a_cancellation() -> None:
    works = InFlight(8)
    seen: list[object] = []

    async def task(started: asyncio.Future[RequestWork]) -> None:
        async with works.work() as work:
            started.set_result(work)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append(work.ended_by)
                raise

    reason = ApiError(418, "tea")
    for end in (True, False):
        started: asyncio.Future[RequestWork] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(task(started))
        work = await started
        if end:
            work.end(reason)
        else:
            running.cancel()
        with pytest.raises(ApiError if end else asyncio.CancelledError):
            await running
    assert seen == [reason, None]
    assert len(works) == 0


async def test_a_limit_ends_the_work_when_it_is_over() -> None:
    works = InFlight(8)

    async def task() -> None:
        async with works.work() as work:
            work.limit(0.01)
            await asyncio.sleep(60)

    with pytest.raises(ApiError) as caught:
        await task()
    assert caught.value.status == 504


async def test_a_timeout_of_the_works_own_stays_what_it_is() -> None:
    works = InFlight(8)
    with pytest.raises(TimeoutError):
        async with works.work():
            raise TimeoutError("of the work's own")


async def test_more_than_allowed_is_refused() -> None:
    works = InFlight(1)
    async with works.work() as first, works.work() as second:  # neither body is there yet
        works.take_place(first)
        works.take_place(first)
        with pytest.raises(CapacityError):
            works.take_place(second)
        with pytest.raises(CapacityError):
            async with works.work():
                pass
    assert works.num_places_taken == 0
    async with works.work():
        assert len(works) == 1
