"""A thousand clients that go away at any moment leave nothing behind: no block, no place, no connection, no task."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import threading
from typing import Any

from tests.support.http_server import Server
from tests.support.load import slowdown

from teneral.handlers.http.limits import Limits

NUM_CLIENTS = 1000
NUM_AT_ONCE = 60
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


def generate(event: Any, context: Any) -> Any:
    yield from context.model.stream(event, max_tokens=40, ignore_eos=True)


def a_request(chance: random.Random) -> bytes:
    """Of any route, as a stream or whole, long or short, with a beginning that others have or none has."""
    beginning = "Once upon a time " * chance.randrange(8)
    prompt = beginning + "".join(chance.choices("abcdefgh ", k=chance.randrange(1, 60)))
    body: Any = {
        "max_tokens": chance.choice((1, 8, 200)),
        "ignore_eos": True,
        "stream": chance.random() < 0.6,
        "n": chance.choice((1, 1, 2)),
        "teneral": {"session": f"s{chance.randrange(20)}"} if chance.random() < 0.2 else None,
    }
    path = chance.choice(("/v1/completions", "/v1/completions", "/v1/chat/completions", "/invoke"))
    if path == "/invoke":
        body = prompt
    elif "chat" in path:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    data = json.dumps(body).encode()
    deadline = f"Deadline-Ms: {chance.randrange(1, 200)}\r\n" if chance.random() < 0.1 else ""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"{deadline}Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def come_and_go(server: Server, chance: random.Random) -> None:
    """One client: part of a request or all of it, part of the answer or none, and it is gone."""
    loop = asyncio.get_running_loop()
    request = a_request(chance)
    sent = chance.choice((0, chance.randrange(len(request)), len(request), len(request), len(request)))
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, server.address)
        await loop.sock_sendall(sock, request[:sent])
        # Times are not waited for but drawn: some of these clients go while they are let in, queued, or computed for.
        await asyncio.sleep(chance.choice((0, 0.001, 0.02)) * chance.random())
        if sent == len(request):
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(chance.choice((0.001, 0.05, 0.3)) * slowdown()):
                    for _ in range(chance.randrange(4)):
                        if not await loop.sock_recv(sock, 1 << 12):
                            break
        if chance.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


async def test_a_thousand_disconnects_leak_nothing(start: Any) -> None:
    chance = random.Random(7)
    of_others = handler_threads()  # of other tests' functions, which end when they have been idle
    limits = Limits(max_taken=40, max_in_flight=48, max_sequences=8)
    async with start(handler=generate, limits=limits, max_running=4, max_queued=36) as server:
        engine, service = server.instance.engine.result(), server.service
        assert (await server.post("/invoke", "Once")).status == 200  # what is made once, is there
        await server.client.close()
        await server.eventually(lambda: len(service.connections) == 0)
        tasks_before = len(asyncio.all_tasks())

        for _ in range(NUM_CLIENTS // NUM_AT_ONCE + 1):
            await asyncio.gather(*(come_and_go(server, chance) for _ in range(NUM_AT_ONCE)))

        await server.eventually(lambda: len(service.connections) == 0)
        await server.eventually(lambda: len(service.in_flight) == 0)
        await server.eventually(lambda: server.running() + server.queued() == 0)
        assert service.admission.num_waiting == service.admission.body_bytes == 0
        assert service.connections.unsent_bytes() == []
        await server.eventually(lambda: len(asyncio.all_tasks()) <= tasks_before)
        engine.check_integrity()
        statistics = engine.statistics()
        view = engine.kv_view()
        assert view.num_in_use == 0
        assert view.num_free + view.num_idle + view.num_pinned == view.num_blocks
        # It was as mixed as it was meant to be.
        assert statistics.ended_total["cancelled"] > 10
        assert statistics.ended_total["length"] > 10
        metrics = server.metrics_text()
        for status in ("200", "429", "499"):
            assert f'status="{status}"' in metrics, status
    await server.eventually(
        lambda: handler_threads() <= of_others
    )  # the function's were closed with the server


def handler_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("teneral-handler-")}


async def test_a_client_that_goes_away_costs_no_step_more_than_the_one_under_way(start: Any) -> None:
    async with start() as server:
        server.instance.model.hold()
        body = json.dumps({"prompt": "Once", "max_tokens": 200, "ignore_eos": True}).encode()
        with socket.socket() as sock:
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, server.address)
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            await loop.sock_sendall(sock, head.encode() + body)
            await server.eventually(lambda: server.running() == 1)
        await server.eventually(lambda: len(server.service.in_flight) == 0)
        server.instance.model.release()
        await server.eventually(lambda: server.running() == 0)
        statistics = server.instance.engine.result().statistics()
        assert statistics.steps_total == 1
        assert statistics.free_blocks == statistics.num_blocks
