"""A client that goes away gives its capacity back within a step; one that takes nothing is cut off within
bounds.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.support.http_server import Server

from teneral.handlers.http.limits import Limits

LONG = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}
# Log-probabilities make events large, so that the buffers on the way fill soon.
TALKATIVE = {**LONG, "logprobs": 20, "n": 2, "stream": True}


@asynccontextmanager
async def sent(
    server: Server, body: dict[str, Any], path: str = "/v1/completions"
) -> AsyncIterator[socket.socket]:
    """A request on a plain socket with the smallest receive buffer there is; leaving disconnects."""
    data = json.dumps(body).encode()
    with socket.socket() as sock:
        await connect_and_send(sock, server, path, data)
        yield sock


async def connect_and_send(sock: socket.socket, server: Server, path: str, data: bytes) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, server.address)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    await loop.sock_sendall(sock, head.encode() + data)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_ends_all_of_a_requests_sequences(start: Any, path: str, stream: bool) -> None:
    prompt = {"prompt": "x"} if "chat" not in path else {"messages": [{"role": "user", "content": "x"}]}
    async with start() as server:
        server.instance.model.step_s = 0.01
        body = {**prompt, "n": 3, "max_tokens": 400, "ignore_eos": True, "stream": stream}
        async with sent(server, body, path):
            await server.eventually(lambda: server.running() == 3)
        await server.eventually(lambda: server.running() == 0)
        assert server.queued() == 0
        statistics = server.instance.engine.result().statistics()
        assert statistics.free_blocks == statistics.num_blocks
        await server.eventually(lambda: len(server.service.in_flight) == 0)
        server.instance.engine.result().check_integrity()


async def test_a_disconnect_frees_its_place_even_while_the_model_waits_for_weights(start: Any) -> None:
    async with start() as server:
        server.instance.model.hold()
        async with sent(server, {**LONG, "stream": True}):
            await server.eventually(lambda: server.running() == 1)
        await server.eventually(lambda: len(server.service.in_flight) == 0)
        answer = asyncio.create_task(server.post("/v1/completions", {**LONG, "max_tokens": 1}))
        server.instance.model.release()
        assert (await answer).status == 200


async def test_a_disconnect_is_counted_as_such(start: Any) -> None:
    async with start() as server:
        server.instance.model.hold()
        async with sent(server, LONG):
            await server.eventually(lambda: server.running() == 1)
        await server.eventually(lambda: len(server.service.in_flight) == 0)
        text = (await server.get("/metrics")).body.decode()
        assert 'teneral_requests_total{route="/v1/completions",status="499"} 1.0' in text


async def test_a_client_that_takes_nothing_is_cut_off_by_what_piles_up(start: Any) -> None:
    limits = Limits(max_pending_events=50, write_stall_s=600)
    async with start(limits=limits, send_buffer_bytes=4096) as server, sent(server, TALKATIVE):
        ended = server.instance.engine.result().statistics
        await server.eventually(lambda: ended().ended_total.get("cancelled", 0) > 0)
        await server.eventually(lambda: len(server.service.in_flight) == 0)
        await server.eventually(lambda: server.running() == 0)
        assert server.queued() == 0


async def test_a_client_that_takes_nothing_for_too_long_is_cut_off(start: Any) -> None:
    limits = Limits(max_pending_events=100_000, write_stall_s=0.2)
    async with start(limits=limits, send_buffer_bytes=4096) as server, sent(server, TALKATIVE) as client:
        await server.eventually(lambda: server.running() > 0)
        await server.eventually(lambda: len(server.service.in_flight) == 0)
        await server.eventually(lambda: server.running() == 0)
        assert b"[DONE]" not in await received(client)


async def received(sock: socket.socket) -> bytes:
    """What is still to be read, until the other side's end or reset."""
    data = b""
    try:
        while chunk := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
            data += chunk
    except ConnectionError:
        pass
    return data
