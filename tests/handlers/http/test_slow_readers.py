"""Clients that take slowly what they asked for, or not at all: what lies here for them is bounded, and they are cut."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from tests.support.http_server import Server, events
from tests.support.load import slowdown

from teneral.handlers.http.limits import MAX_UNSENT_BYTES, PIECE_BYTES, Limits
from teneral.handlers.http.listening import SEND_BUFFER_BYTES, listen

NUM_CLIENTS = 30
# Log-probabilities make events large, so that the buffers on the way fill soon.
TALKATIVE = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "logprobs": 20, "stream": True}


async def ask(stack: ExitStack, server: Server, path: str, body: Any) -> socket.socket:
    """A request on a socket with the smallest receive buffer there is, from which nothing is read."""
    sock = stack.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, server.address)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    await loop.sock_sendall(sock, head.encode() + data)
    return sock


async def largest_unsent(server: Server, until: Any) -> int:
    """The most that lay here for any one connection until the condition held."""
    largest = 0
    while not until():
        largest = max([largest, *server.service.connections.unsent_bytes()])
        await asyncio.sleep(0.001)
    return largest


def is_empty(server: Server) -> bool:
    service = server.service
    return not (server.running() or server.queued() or len(service.in_flight) or len(service.connections))


async def test_many_clients_that_take_nothing_hold_64_kib_each_and_are_cut(start: Any) -> None:
    limits = Limits(write_stall_s=0.5 * slowdown())
    with ExitStack() as stack:
        async with start(
            limits=limits, send_buffer_bytes=4096, max_running=NUM_CLIENTS, prefix_cache=True
        ) as server:
            for _ in range(NUM_CLIENTS):
                await ask(stack, server, "/v1/completions", TALKATIVE)
            await server.eventually(lambda: server.running() > NUM_CLIENTS // 2)
            largest = await largest_unsent(server, lambda: is_empty(server))
            assert PIECE_BYTES < largest <= MAX_UNSENT_BYTES
            assert server.service.admission.num_waiting == server.service.admission.body_bytes == 0
            server.instance.engine.result().check_integrity()
            answer = await server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
            assert answer.status == 200


async def test_a_value_larger_than_the_bound_is_sent_piece_by_piece(start: Any) -> None:
    values = ["x" * 1_000_000, "é" * 300_000]

    def give(event: Any, context: Any) -> Iterator[str]:
        yield from values

    limits = Limits(write_stall_s=1.0 * slowdown())  # the client that reads all must never seem to stall
    async with start(handler=give, send_buffer_bytes=4096, limits=limits) as server:
        whole = await server.post("/invoke", {}, headers={"Accept": "text/event-stream"})
        assert [json.loads(item) for item in events(whole.body)[:-1]] == values
        with ExitStack() as stack:
            await server.client.close()
            await ask(stack, server, "/invoke", {})
            await server.eventually(lambda: len(server.service.in_flight) == 1)
            largest = await largest_unsent(server, lambda: is_empty(server))
        assert PIECE_BYTES < largest <= MAX_UNSENT_BYTES


async def test_a_whole_answer_that_is_not_taken_is_cut_off_too(start: Any) -> None:
    async with start(
        handler=lambda event, context: "x" * 1_000_000,
        send_buffer_bytes=4096,
        limits=Limits(write_stall_s=0.2),
    ) as server:
        with ExitStack() as stack:
            await ask(stack, server, "/invoke", {})
            await server.eventually(
                lambda: max(server.service.connections.unsent_bytes(), default=0) > 100_000
            )
            await server.eventually(lambda: len(server.service.connections) == 0)


async def test_a_client_that_takes_a_whole_answer_slowly_but_steadily_gets_all_of_it(start: Any) -> None:
    factor = slowdown()  # where this process waits for a core, the client takes nothing
    async with start(
        handler=lambda event, context: "x" * 80_000,  # takes three times as long as a stall may
        send_buffer_bytes=4096,
        limits=Limits(write_stall_s=1.0 * factor),
    ) as server:
        with ExitStack() as stack:
            sock = await ask(stack, server, "/invoke", {})
            received, loop = b"", asyncio.get_running_loop()
            while not received.endswith(b'x"'):
                data = await loop.sock_recv(sock, 4096)
                assert data, "it was cut off"
                received += data
                await asyncio.sleep(0.02 * factor)
            assert received.count(b"x") >= 80_000


async def test_a_stream_whose_client_is_slow_waits_for_it_and_is_whole(start: Any) -> None:
    def give(event: Any, context: Any) -> Iterator[str]:
        for _ in range(150):
            yield "Q" * 5_000

    async with start(handler=give, send_buffer_bytes=4096) as server:
        with ExitStack() as stack:
            sock = await ask(stack, server, "/invoke", {})
            received, largest, loop = b"", 0, asyncio.get_running_loop()
            while not received.endswith(b"\r\n0\r\n\r\n"):
                data = await loop.sock_recv(sock, 2048)
                assert data, "it was cut off"
                received += data
                for _ in range(10):  # so that the function is always ahead
                    await asyncio.sleep(0)
                    largest = max([largest, *server.service.connections.unsent_bytes()])
                await asyncio.sleep(0.001)
            assert PIECE_BYTES < largest <= MAX_UNSENT_BYTES
            assert received.count(b"Q") == 150 * 5_000


async def test_the_kernel_buffers_no_more_for_a_client_than_configured() -> None:
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        accepted.set_result(sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
        writer.close()

    async with await asyncio.start_server(on_connect, sock=listen("127.0.0.1", 0)) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        assert await accepted <= 2 * SEND_BUFFER_BYTES  # Linux counts what it needs itself, too
        writer.close()
        await writer.wait_closed()
