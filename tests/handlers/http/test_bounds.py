"""Every input from outside has a bound, and a client that exceeds it gets an error."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import zlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import zstandard
from tests.support.load import patience_s

from teneral.handlers.http import connections
from teneral.handlers.http.compression import decompressor_of
from teneral.handlers.http.limits import MAX_HEADER_BYTES, MAX_HEADERS, MAX_REQUEST_LINE_BYTES, Limits
from teneral.handlers.openai.generation import LOGPROB_BYTES

BODY = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}


async def test_a_body_beyond_the_limit_is_refused_before_it_is_read(start: Any) -> None:
    async with start(limits=Limits(max_body_bytes=1000)) as server:
        answer = await server.request("POST", "/v1/completions", data=b"x" * 1001)
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert (await server.post("/v1/completions", BODY)).status == 200


async def test_a_body_that_does_not_tell_its_length_is_bounded_as_well(start: Any) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    async with start(limits=Limits(max_body_bytes=1000)) as server:
        answer = await server.request("POST", "/v1/completions", data=endless())
        assert answer.status == 413
        assert server.service.admission.body_bytes == 0


async def test_bodies_of_all_requests_together_are_bounded(start: Any) -> None:
    limits = Limits(max_body_bytes=1000, max_body_bytes_in_flight=1500)
    large = {**BODY, "user": "u" * 900}
    async with start(loaded=False, limits=limits) as server:
        first = asyncio.create_task(server.post("/v1/completions", large))
        await server.eventually(lambda: server.service.admission.body_bytes > 900)
        refused = await server.post("/v1/completions", large)
        assert refused.status == 429
        server.instance.let_in()
        assert (await first).status == 200
        await server.eventually(lambda: server.service.admission.body_bytes == 0)
        assert (await server.post("/v1/completions", large)).status == 200


async def test_a_body_that_does_not_arrive_is_not_waited_for_for_ever(start: Any) -> None:
    async def stalling() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    async with start(limits=Limits(body_timeout_s=0.05)) as server:
        assert (await server.request("POST", "/v1/completions", data=stalling())).status == 408


ENCODED = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": lambda data: zstandard.ZstdCompressor().compress(data),
}


@pytest.mark.parametrize("encoding", ENCODED)
async def test_a_compressed_body_is_what_it_decompresses_to(start: Any, encoding: str) -> None:
    body = b'{"prompt": "x", "max_tokens": 1, "temperature": 0}'
    whole = ENCODED[encoding](body)
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    async with start() as server:
        post = partial(server.request, "POST", "/v1/completions", headers=headers)
        plain = await server.request(
            "POST", "/v1/completions", data=body, headers=headers | {"Content-Encoding": ""}
        )
        answer = await post(data=whole)
        assert answer.status == 200, answer.text
        assert answer.json["choices"] == plain.json["choices"]
        for damaged in (whole[:-1], whole + b"x", whole + whole, b"x" * 100, b""):
            answer = await post(data=damaged)
            assert (answer.status, answer.error["code"]) == (400, "invalid_encoding"), damaged
        await server.eventually(lambda: server.service.admission.body_bytes == 0)


@pytest.mark.parametrize("encoding", ENCODED)
async def test_a_decompression_bomb_ends_at_the_limit_of_a_body(start: Any, encoding: str) -> None:
    bomb = ENCODED[encoding](bytes(256 << 20))
    decompress = decompressor_of([encoding])
    assert decompress is not None
    assert len(next(iter(decompress(bomb)))) <= 2 << 20
    async with start() as server:
        answer = await server.request(
            "POST", "/v1/completions", data=bomb, headers={"Content-Encoding": encoding}
        )
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert server.service.admission.body_bytes == 0


async def test_an_unknown_compression_is_refused_by_name(start: Any) -> None:
    async with start() as server:
        for encoding in ("br", "gzip, gzip"):
            answer = await server.request(
                "POST", "/v1/completions", data=b"x", headers={"Content-Encoding": encoding}
            )
            assert (answer.status, answer.error["code"]) == (415, "unsupported_encoding")
            assert answer.headers["Accept-Encoding"] == "gzip, deflate, zstd"


async def test_headers_are_bounded(start: Any) -> None:
    async with start() as server:
        assert (await server.get("/livez", headers={"x-large": "x" * (MAX_HEADER_BYTES + 1)})).status == 431


async def test_request_lines_are_bounded(start: Any) -> None:
    async with start() as server:
        assert (await server.get("/livez?" + "x" * MAX_REQUEST_LINE_BYTES)).status == 414
        assert (await server.get("/livez?" + "x" * (MAX_REQUEST_LINE_BYTES // 2))).status == 200


async def test_the_number_of_headers_is_bounded(start: Any) -> None:
    async with start() as server:
        few = {f"x-{number}": "y" for number in range(MAX_HEADERS // 2)}
        many = {f"x-{number}": "y" for number in range(MAX_HEADERS + 1)}
        assert (await server.get("/livez", headers=few)).status == 200
        assert (await server.get("/livez", headers=many)).status == 431


async def test_a_body_is_charged_for_what_it_may_become(start: Any) -> None:
    limits = Limits(max_body_bytes_in_flight=64 * 100)
    async with start(limits=limits) as server:
        values = {**BODY, "teneral_unknown": [[]] * 100}
        assert (await server.post("/v1/completions", values)).status == 429
        assert server.service.admission.body_bytes == 0
        assert (await server.post("/v1/completions", BODY)).status == 200


async def test_sequences_of_one_request_are_bounded_over_all_prompts(start: Any) -> None:
    async with start(limits=Limits(max_sequences=8)) as server:
        refused = await server.post("/v1/completions", {**BODY, "prompt": ["a", "b", "c"], "n": 3})
        assert (refused.status, refused.error["param"]) == (400, "n")
        refused = await server.post("/v1/completions", {**BODY, "prompt": ["a"] * 9})
        assert (refused.status, refused.error["param"]) == (400, "prompt")


async def test_requests_in_work_are_bounded(start: Any) -> None:
    async with start(loaded=False, limits=Limits(max_in_flight=2)) as server:
        waiting = [asyncio.create_task(server.post("/v1/completions", BODY)) for _ in range(2)]
        await server.eventually(lambda: len(server.service.in_flight) == 2)
        assert (await server.post("/v1/completions", BODY)).status == 429
        assert (await server.get("/livez")).status == 200  # probes are always let in
        server.instance.let_in()
        assert [answer.status for answer in await asyncio.gather(*waiting)] == [200, 200]


async def test_sequences_beyond_what_the_engine_takes_are_refused_at_once(start: Any) -> None:
    async with start(max_running=2, max_queued=2) as server:
        server.instance.model.hold()
        taken = [asyncio.create_task(server.post("/v1/completions", BODY)) for _ in range(4)]
        await server.eventually(lambda: server.running() + server.queued() == 4)
        refused = await server.post("/v1/completions", BODY)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["Retry-After"]) >= 1
        server.instance.model.release()
        assert [answer.status for answer in await asyncio.gather(*taken)] == [200] * 4
        assert (await server.post("/v1/completions", BODY)).status == 200


async def test_a_request_that_takes_too_long_is_ended(start: Any) -> None:
    async with start(limits=Limits(request_timeout_s=0.1)) as server:
        server.instance.model.step_s = 0.02
        answer = await server.post("/v1/completions", {**BODY, "max_tokens": 400})
        assert (answer.status, answer.error["code"]) == (504, "request_timeout")
        await server.eventually(lambda: server.running() == 0)


async def test_the_time_of_a_request_begins_when_the_engine_has_it(start: Any) -> None:
    async with start(loaded=False, limits=Limits(request_timeout_s=60.0)) as server:
        waiting = asyncio.create_task(server.post("/v1/completions", BODY))
        await server.eventually(lambda: server.service.admission.num_waiting == 1)
        (work,) = server.service.in_flight.works
        assert work.deadline_s is None  # it may wait for weights for as long as they take
        server.instance.model.hold()
        server.instance.let_in()
        await server.eventually(lambda: work.deadline_s is not None)
        server.instance.model.release()
        assert (await waiting).status == 200


async def test_log_probabilities_of_a_whole_answer_are_bounded(start: Any) -> None:
    body = {**BODY, "max_tokens": 20, "logprobs": 5}
    entries = 20 * (1 + 5)
    async with start(limits=Limits(max_answer_bytes=entries * LOGPROB_BYTES)) as server:
        assert (await server.post("/v1/completions", body)).status == 200
        assert server.service.admission.answer_bytes == 0
        for more in ({"n": 2}, {"max_tokens": 21}):
            refused = await server.post("/v1/completions", {**body, **more})
            assert (refused.status, refused.error["param"]) == (400, "logprobs")
        await server.eventually(lambda: server.running() == 0)
        assert (await server.post("/v1/completions", {**body, "n": 2, "stream": True})).status == 200
        assert server.service.admission.answer_bytes == 0


async def test_log_probabilities_of_all_answers_together_are_bounded(start: Any) -> None:
    async with start(limits=Limits(max_answer_bytes_in_flight=50 * LOGPROB_BYTES)) as server:
        refused = await server.post("/v1/completions", {**BODY, "max_tokens": 51, "logprobs": 0})
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert (await server.post("/v1/completions", {**BODY, "max_tokens": 50, "logprobs": 0})).status == 200


def unfinished(server: Any) -> socket.socket:
    """A connection whose request's body does not come to its end."""
    client = socket.create_connection(server.address, timeout=patience_s(60))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    client.sendall(head.encode())
    return client


REST = b'"prompt": "x"}' + b" " * 85  # of such a body


async def test_requests_whose_bodies_do_not_come_take_no_places(start: Any) -> None:
    async with start(limits=Limits(max_in_flight=2)) as server:
        clients = [unfinished(server) for _ in range(8)]
        await server.eventually(lambda: len(server.service.in_flight) == 8)
        answers = await asyncio.gather(*(server.post("/v1/completions", BODY) for _ in range(2)))
        assert [answer.status for answer in answers] == [200, 200]
        server.instance.model.hold()
        taken = [asyncio.create_task(server.post("/v1/completions", BODY)) for _ in range(2)]
        await server.eventually(lambda: server.service.in_flight.num_places_taken == 2)
        clients[0].sendall(REST)  # there is no place when its body has come
        answer = await asyncio.to_thread(clients[0].recv, 64)
        assert b" 429 " in answer
        server.instance.model.release()
        assert {(await task).status for task in taken} == {200}
        clients[1].sendall(REST)
        assert b" 200 " in await asyncio.to_thread(clients[1].recv, 64)
        for client in clients:
            client.close()
        await server.eventually(lambda: len(server.service.in_flight) == 0)
        assert server.service.in_flight.num_places_taken == 0


async def test_connections_whose_bodies_do_not_come_give_way(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(limits=Limits(max_connections=3)) as server:
        clients = [unfinished(server) for _ in range(3)]
        await server.eventually(lambda: len(server.service.in_flight) == 3)
        assert (await server.get("/livez")).status == 503  # they may yet come
        monkeypatch.setattr(connections, "SLOW_BODY_S", 0.0)
        assert (await server.get("/livez")).status == 200
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.to_thread(clients[0].recv, 1) == b""  # the first of them
        for client in clients:
            client.close()


async def test_a_connection_whose_body_is_whole_never_gives_way(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SLOW_BODY_S", 0.0)
    async with start(limits=Limits(max_connections=2)) as server:
        server.instance.model.hold()
        whole = unfinished(server)
        await server.eventually(lambda: len(server.service.in_flight) == 1)
        whole.sendall(REST)
        await server.eventually(lambda: server.service.in_flight.num_places_taken == 1)
        slow = unfinished(server)
        await server.eventually(lambda: len(server.service.in_flight) == 2)
        # The older one is being worked on: the other one gives way.
        assert (await server.get("/livez")).status == 200
        await server.eventually(lambda: len(server.service.in_flight) == 1)
        assert server.service.in_flight.num_places_taken == 1
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.to_thread(slow.recv, 1) == b""
        slow.close()
        taken = asyncio.create_task(server.post("/v1/completions", BODY))
        await server.eventually(lambda: server.service.in_flight.num_places_taken == 2)
        # Both are being worked on: a new one is refused.
        assert (await server.get("/livez")).status == 503
        server.instance.model.release()
        assert b" 200 " in await asyncio.to_thread(whole.recv, 64)
        assert (await taken).status == 200
        whole.close()
