"""A function that goes on after its client has left counts until it has ended."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.http_server import Server
from tests.support.load import patience_s, slowdown

from teneral.handlers.function import calls as calls_module
from teneral.handlers.function import handler as handler_module
from teneral.handlers.function.calls import FunctionCalls
from teneral.handlers.function.handler import Handler
from teneral.handlers.http.limits import Limits
from teneral.runtime.errors import HandlerBusyError


class Hanging:
    """Functions that hang until they are released, whatever becomes of their callers."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self.num_running = 0
        self._lock = threading.Lock()

    def __call__(self, event: Any, context: Any) -> Any:
        if event == "quick":
            return event
        with self._lock:
            self.num_running += 1
        self._released.wait(patience_s(60))
        with self._lock:
            self.num_running -= 1
        return event

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    function = Hanging()
    yield function
    function.release()


async def leave(server: Server, hanging: Hanging, count: int) -> None:
    """Clients that call the function and disconnect while it hangs."""
    before = hanging.num_running
    clients = [asyncio.create_task(server.post("/invoke", "hang")) for _ in range(count)]
    await server.eventually(lambda: hanging.num_running == before + count)
    for client in clients:
        client.cancel()
    await server.eventually(lambda: len(server.service.in_flight) == 0)


@pytest.mark.parametrize("time_is_short", [False, True])
async def test_functions_that_hang_take_places_until_they_end(
    start: Any, hanging: Hanging, time_is_short: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # The quick call at the end has no more time than the others.
    limits = Limits(request_timeout_s=0.2 * slowdown()) if time_is_short else Limits()
    async with start(handler=hanging, max_calls=3, limits=limits) as server:
        if time_is_short:
            statuses = [(await server.post("/invoke", "hang")).status for _ in range(3)]
            assert statuses == [504] * 3
        else:
            await leave(server, hanging, 3)
        refused = await server.post("/invoke", "quick")
        assert (refused.status, refused.error["code"]) == (503, "handler_busy")
        assert int(refused.headers["Retry-After"]) >= 1
        metrics = (await server.get("/metrics")).body.decode()
        assert "teneral_function_calls 3.0" in metrics
        assert "teneral_function_abandoned_calls 3.0" in metrics
        assert "teneral_function_refused_calls_total 1.0" in metrics
        assert "3 go on although their readers left: req_" in caplog.text
        hanging.release()
        calls = server.handler.calls
        await server.eventually(lambda: calls.statistics().calls == 0)
        assert (await server.post("/invoke", "quick")).json == "quick"


async def test_the_log_names_a_call_that_goes_on_and_its_end(
    start: Any, hanging: Hanging, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(calls_module, "LOG_AFTER_S", 0.01)
    async with start(handler=hanging) as server:
        await leave(server, hanging, 1)
        await server.eventually(lambda: "goes on although its reader left" in caplog.text)
        hanging.release()
        await server.eventually(lambda: "has ended" in caplog.text)


async def test_a_coroutine_that_swallows_its_cancellation_counts_too(start: Any) -> None:
    release = threading.Event()

    async def stubborn(event: Any, context: Any) -> None:
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    async with start(handler=stubborn, max_calls=1, limits=Limits(request_timeout_s=0.05)) as server:
        try:
            assert (await server.post("/invoke", {})).status == 504
            assert (await server.post("/invoke", {})).status == 503
        finally:
            release.set()
        await server.eventually(lambda: server.handler.calls.statistics().calls == 0)


async def test_calls_that_end_leave_nothing_behind(start: Any) -> None:
    async def gives(event: Any, context: Any) -> Any:
        yield event
        yield event

    for function in (lambda event, context: event, gives):
        async with start(handler=function, max_calls=2) as server:
            for _ in range(5):
                assert (await server.post("/invoke", 1)).status == 200
            await server.eventually(lambda: server.handler.calls.statistics().calls == 0)


@pytest.mark.parametrize("kind", ["function", "error", "generator", "coroutine", "async generator"])
async def test_a_call_has_ended_before_its_client_knows(
    start: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Else the next call of a client that sends one after another could be refused."""

    def gives(event: Any, context: Any) -> Any:
        yield event

    def fails(event: Any, context: Any) -> Any:
        raise ValueError(event)

    async def answers(event: Any, context: Any) -> Any:
        return event

    async def gives_later(event: Any, context: Any) -> Any:
        yield event

    function = {
        "function": lambda event, context: event,
        "error": fails,
        "generator": gives,
        "coroutine": answers,
        "async generator": gives_later,
    }[kind]
    running: list[int] = []

    class Watched(handler_module.ThreadToLoopChannel[Any]):
        def finish(self, value: Any) -> None:
            running.append(server.handler.calls.statistics().calls)
            super().finish(value)

        def end(self, error: Any = None) -> None:
            running.append(server.handler.calls.statistics().calls)
            super().end(error)

    monkeypatch.setattr(handler_module, "ThreadToLoopChannel", Watched)
    async with start(handler=function, max_calls=1) as server:
        for _ in range(3):
            assert (await server.post("/invoke", 1)).status == (500 if kind == "error" else 200)
    assert set(running) == {0}


def test_a_coroutine_that_is_cancelled_before_its_first_step_has_ended() -> None:
    handler = Handler(_never)
    ended = threading.Event()
    stop = handler.loop_thread.submit(_never(None, None), ended.set)
    stop()
    assert ended.wait(patience_s(10))
    handler.close()


async def _never(event: Any, context: Any) -> None:
    await asyncio.Event().wait()


def test_beyond_the_bound_a_call_is_refused() -> None:
    calls = FunctionCalls("f", max_calls=1)
    call = calls.begin("one")
    with pytest.raises(HandlerBusyError):
        calls.begin("two")
    calls.end(call)
    calls.end(calls.begin("three"))
    assert calls.statistics() == (0, 0, 1, 1)
