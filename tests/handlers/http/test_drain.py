"""SIGTERM ends a server in good order: it takes nothing new, finishes what runs, and tells clients that it must cut
off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from tests.support.http_server import events
from tests.support.load import patience_s

from teneral.handlers.http.limits import Limits

JSON = {"Content-Type": "application/json"}
BODY = {"prompt": "Once", "max_tokens": 20, "ignore_eos": True}


async def test_what_runs_is_finished_while_what_comes_is_sent_elsewhere(start: Any) -> None:
    async with start(limits=Limits(keepalive_s=0.02)) as server:
        server.instance.model.hold()
        async with server.stream("/v1/completions", BODY) as running:
            await server.eventually(lambda: server.running() == 1)
            server.stop.set()
            await server.eventually(lambda: server.service.in_flight.draining)

            ready = await server.get("/readyz")
            assert (ready.status, ready.json["state"]) == (503, "draining")
            assert "Retry-After" in ready.headers
            assert ready.headers["Connection"] == "close"
            assert (await server.get("/livez")).status == 200
            refused = await server.post("/v1/completions", BODY)
            assert (refused.status, refused.error["code"]) == (503, "draining")
            assert "Retry-After" in refused.headers

            server.instance.model.release()
            assert events(await running.read())[-1] == "[DONE]"
        assert await server.task is None


async def test_a_stream_that_takes_too_long_ends_with_an_error_event(start: Any) -> None:
    async with start(drain_timeout_s=0.05) as server:
        server.instance.model.step_s = 0.02
        async with server.stream("/v1/completions", {**BODY, "max_tokens": 400}) as running:
            await running.content.readuntil(b"\n\n")
            server.stop.set()
            last = events(await running.read())[-1]
        assert json.loads(last)["error"]["code"] == "draining"
        await server.task
        assert 'teneral_requests_total{route="/v1/completions",status="503"} 1.0' in server.metrics_text()
        await server.eventually(lambda: server.running() == 0)


async def test_an_answer_that_takes_too_long_is_a_503(start: Any) -> None:
    async with start(drain_timeout_s=0.05) as server:
        server.instance.model.hold()
        waiting = asyncio.create_task(server.post("/v1/completions", BODY))
        await server.eventually(lambda: server.running() == 1)
        server.stop.set()
        answer = await waiting
        assert (answer.status, answer.error["code"]) == (503, "draining")


async def test_requests_that_wait_for_weights_get_the_error_as_well(start: Any) -> None:
    async with start(loaded=False, drain_timeout_s=0.05) as server:
        waiting = asyncio.create_task(server.post("/v1/completions", BODY))
        await server.eventually(lambda: server.service.admission.num_waiting == 1)
        server.stop.set()
        assert (await waiting).status == 503


async def test_a_function_that_takes_too_long_is_ended(start: Any) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def forever(event: Any, context: Any) -> Iterator[str]:
        try:
            while True:
                yield "more"
        finally:
            loop.call_soon_threadsafe(ended.set)

    async with start(handler=forever, drain_timeout_s=0.05) as server:
        async with server.client.post("/invoke", json={}) as response:
            await response.content.readline()
            server.stop.set()
            *_, last = (await response.read()).splitlines()
        assert json.loads(last)["error"]["code"] == "draining"
        await ended.wait()


def forever(event: Any, context: Any) -> Iterator[Any]:
    yield 1
    yield from context.model.stream("Once", max_tokens=400, ignore_eos=True)


CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "ignore_eos": True, "stream": True}
LONG = {**BODY, "max_tokens": 400, "stream": True}
STREAMS = {
    "a completion": ("/v1/completions", LONG, {}),
    "several choices": ("/v1/completions", {**LONG, "n": 3}, {}),
    "a chat": ("/v1/chat/completions", CHAT, {}),
    "lines of a function": ("/invoke", None, {}),
    "events of a function": ("/invoke", None, {"Accept": "text/event-stream"}),
}


@pytest.mark.parametrize("moment", ["computed", "held", "queued", "loading"])
@pytest.mark.parametrize("kind", sorted(STREAMS))
async def test_every_stream_that_is_cut_ends_with_an_error_and_nothing_behind_it(
    start: Any, kind: str, moment: str
) -> None:
    path, body, headers = STREAMS[kind]
    async with start(
        loaded=moment != "loading",
        handler=forever,
        drain_timeout_s=0.05,
        max_running=3,
        limits=Limits(keepalive_s=0.01),
    ) as server:
        if moment in ("held", "queued"):
            server.instance.model.hold()
        server.instance.model.step_s = 0.01
        others = [
            asyncio.create_task(server.post("/v1/completions", BODY))
            for _ in range(3 if moment == "queued" else 0)
        ]
        if others:
            await server.eventually(lambda: server.running() + server.queued() == 3)
        async with server.client.post(path, json=body, headers=headers) as response:
            assert response.status == 200
            await response.content.readany()
            server.stop.set()
            rest = await response.read()  # to its end: it was not just cut off
        is_lines = "ndjson" in response.headers["Content-Type"]
        items = rest.decode().splitlines() if is_lines else events(rest)
        assert json.loads(items[-1])["error"]["code"] == "draining"
        assert "[DONE]" not in items
        await server.task
        server.instance.model.release()
        assert {answer.status for answer in await asyncio.gather(*others)} <= {503}


async def test_a_client_that_takes_nothing_does_not_hold_up_the_end(start: Any) -> None:
    talkative = {**LONG, "logprobs": 20, "n": 2}
    async with start(drain_timeout_s=0.05, send_buffer_bytes=4096) as server:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            sock.setblocking(False)
            data = json.dumps(talkative).encode()
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\n\r\n"
            )
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, server.address)
            await loop.sock_sendall(sock, head.encode() + data)
            await server.eventually(
                lambda: max(server.service.connections.unsent_bytes(), default=0) > 30_000
            )
            server.stop.set()
            await server.task
        await server.eventually(lambda: server.running() == 0)


# A process of its own, since a signal is the process's. No model is needed: a function does the work.
PROGRAM = """
import asyncio, socket, sys, time
from teneral.handlers.function.handler import Handler
from teneral.handlers.app import create_app, serve
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.instance import Instance

def count(event, context):
    for number in range(event):
        time.sleep(0.01)
        yield number

instance = Instance(ServeConfig(model="unused"))
handler = Handler(count)
with socket.socket() as sock:
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    print(sock.getsockname()[1], flush=True)
    asyncio.run(serve(create_app(instance, handler=handler), sock, drain_timeout_s=float(sys.argv[1])))
print("drained", flush=True)
"""


@contextlib.contextmanager
def process(drain_timeout_s: float, program: str = PROGRAM) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen(
        [sys.executable, "-c", program, str(drain_timeout_s)], stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout is not None
            yield running, f"http://127.0.0.1:{int(running.stdout.readline())}"
        finally:
            running.kill()


def invoke(url: str, count: int) -> Any:
    return urlopen(
        Request(f"{url}/invoke", data=str(count).encode(), headers=JSON, method="POST"),
        timeout=patience_s(60),
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_finish_and_then_ends_the_process(number: int) -> None:
    with process(drain_timeout_s=60) as (server, url), invoke(url, 30) as response:
        assert response.readline() == b"0\n"
        server.send_signal(number)
        assert response.read().splitlines()[-1] == b"29"
        assert server.wait(timeout=patience_s(60)) == 0
        assert server.stdout is not None
        assert server.stdout.read() == "drained\n"


def readiness(url: str) -> str:
    with pytest.raises(HTTPError) as caught:
        urlopen(f"{url}/readyz", timeout=patience_s(60))
    with caught.value as response:
        return response.read().decode()


def test_a_second_signal_ends_the_process_at_once() -> None:
    with process(drain_timeout_s=600) as (server, url), invoke(url, 1_000_000) as response:
        response.readline()
        server.send_signal(signal.SIGTERM)
        while "draining" not in readiness(url):  # two signals that come together would be one
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=patience_s(60)) == -signal.SIGTERM


FAILING = """
import asyncio, socket, threading, time
from teneral.handlers.function.handler import Handler
from teneral.handlers.app import create_app, serve
from teneral.loader.errors import IntegrityError
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.instance import Instance

def count(event, context):
    instance._fail(IntegrityError("a part is damaged"))
    for number in range(event):
        time.sleep(0.01)
        yield number

instance = Instance(ServeConfig(model="unused"))
handler = Handler(count)
with socket.socket() as sock:
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    print(sock.getsockname()[1], flush=True)
    failure = asyncio.run(serve(create_app(instance, handler=handler), sock, drain_timeout_s=600))
print(failure.message, flush=True)
"""


def test_the_first_signal_after_a_failure_is_not_the_second() -> None:
    """The failure's exit code stands; the second signal ends the process as ever."""
    with process(600, FAILING) as (server, url), invoke(url, 100) as response:
        response.readline()
        server.send_signal(signal.SIGTERM)
        response.read()
        assert server.wait(timeout=patience_s(60)) == 0
        assert server.stdout is not None
        assert server.stdout.read() == "a part is damaged\n"


def is_pending(process_id: int, number: int) -> bool:
    """True if the process was sent this signal, and has not taken it yet."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return bool(int(status.partition("ShdPnd:")[2].split()[0], 16) >> number - 1 & 1)


def test_the_second_signal_after_a_failure_ends_the_process_at_once() -> None:
    with process(600, FAILING) as (server, url), invoke(url, 1_000_000) as response:
        response.readline()
        server.send_signal(signal.SIGTERM)
        while is_pending(server.pid, signal.SIGTERM):  # two signals that come together would be one
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=patience_s(60)) == -signal.SIGTERM


@pytest.mark.parametrize("accept", ["application/x-ndjson", "text/event-stream"])
def test_a_signal_ends_streams_that_take_too_long_with_an_error_each(accept: str) -> None:
    with process(drain_timeout_s=0.2) as (server, url):
        request = Request(f"{url}/invoke", data=b"1000000", method="POST", headers={**JSON, "Accept": accept})
        with (
            urlopen(request, timeout=patience_s(60)) as first,
            urlopen(request, timeout=patience_s(60)) as second,
        ):
            for response in (first, second):
                assert response.readline() in (b"0\n", b"data: 0\n")
            server.send_signal(signal.SIGTERM)
            for response in (first, second):
                last = response.read().strip().splitlines()[-1].removeprefix(b"data: ")
                assert json.loads(last)["error"]["code"] == "draining"
        assert server.wait(timeout=patience_s(60)) == 0
