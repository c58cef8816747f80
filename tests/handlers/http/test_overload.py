"""Overload: requests are refused before any work, with the time to come back."""

from __future__ import annotations

import asyncio
import http.client
from typing import Any

import pytest
from tests.support.inspection import capacity_of, fill
from tests.support.instances import TinyParts
from tests.support.load import patience_s

from teneral.handlers.http.limits import Limits
from teneral.runtime.engine.capacity import MIN_MEANS, NUM_RECENT_ENDS, STEPS_OF_A_MEAN, Capacity
from teneral.runtime.engine.options import EngineOptions

BODY = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
GENERATING = {
    "/v1/completions": BODY,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
}


def error_of(answer: Any) -> Any:
    """In whichever of the protocols' shapes."""
    return answer.json["error"]


def retry_after_s(answer: Any) -> int:
    return int(answer.headers["Retry-After"])


@pytest.mark.parametrize("loaded", [True, False])
async def test_every_route_that_does_work_turns_away_before_it_reads_a_body(start: Any, loaded: bool) -> None:
    async with start(loaded=loaded, limits=Limits(max_in_flight=1), handler=lambda e, c: e) as server:
        if loaded:
            server.instance.model.hold()
        first = asyncio.create_task(server.post("/v1/completions", BODY))
        await server.eventually(lambda: len(server.service.in_flight) == 1)
        for path in server.post_paths():
            answer = await server.request("POST", path, data=b"not even JSON")
            assert answer.status == 429, path
            assert retry_after_s(answer) >= 1
            assert error_of(answer)
        server.instance.model.release() if loaded else server.instance.let_in()
        assert (await first).status == 200


async def test_every_route_that_does_work_says_that_the_instance_is_ending(start: Any) -> None:
    async with start(limits=Limits(), handler=lambda e, c: e) as server:
        server.service.in_flight.draining = True
        for path in server.post_paths():
            answer = await server.request("POST", path, data=b"not even JSON")
            assert answer.status == 503, path
            assert retry_after_s(answer) == 1


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("path", sorted(GENERATING))
async def test_a_full_queue_refuses_before_a_word_is_tokenised(start: Any, path: str, loaded: bool) -> None:
    async with start(loaded=loaded, max_running=1, max_queued=1) as server:
        if loaded:
            server.instance.model.hold()
        taken = [asyncio.create_task(server.post("/v1/completions", BODY)) for _ in range(2)]
        await server.eventually(lambda: len(server.service.in_flight) == 2)
        if loaded:
            await server.eventually(lambda: server.running() + server.queued() == 2)
        refused = await server.post(path, GENERATING[path])
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert retry_after_s(refused) >= 1
        server.instance.model.release() if loaded else server.instance.let_in()
        assert [answer.status for answer in await asyncio.gather(*taken)] == [200, 200]


async def test_a_full_embedder_refuses_before_a_text_is_tokenised(
    start: Any, encoder_parts: TinyParts
) -> None:
    async with start(parts=encoder_parts) as server:
        embedder = server.instance.embedder.result()
        fill(embedder)
        answer = await server.post("/v1/embeddings", {"input": "x"})
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
        assert retry_after_s(answer) >= 1
        assert "teneral_prompt_tokens_total 0.0" in server.metrics_text()


async def test_a_function_that_meets_a_full_queue_passes_it_on(start: Any) -> None:
    def generate(event: Any, context: Any) -> str:
        return context.model.generate("x", max_tokens=2).text

    async with start(max_running=1, max_queued=0, handler=generate) as server:
        server.instance.model.hold()
        taken = asyncio.create_task(server.post("/v1/completions", BODY))
        await server.eventually(lambda: server.running() == 1)
        refused = await server.post("/invoke", {})
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert retry_after_s(refused) >= 1
        server.instance.model.release()
        assert (await taken).status == 200


@pytest.mark.parametrize("path", sorted(GENERATING))
async def test_a_request_that_would_wait_too_long_gets_the_waiting_time(start: Any, path: str) -> None:
    async with start(max_running=1, max_queued=8, max_wait_s=4.5) as server:
        server.instance.model.hold()
        capacity = capacity_of(server.instance.engine.result())
        for _ in range(MIN_MEANS * STEPS_OF_A_MEAN):
            capacity.step_times.add(0.5)
        bodies = [{**BODY, "max_tokens": num_tokens} for num_tokens in (8, 5)]
        taken = []
        for body in bodies:  # 4 s are waited
            taken.append(asyncio.create_task(server.post("/v1/completions", body)))
            await server.eventually(lambda: server.running() + server.queued() == len(taken))
        refused = await server.post(path, GENERATING[path])
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert "6.5 s" in refused.error["message"]
        assert retry_after_s(refused) == 7
        server.instance.model.release()
        assert [answer.status for answer in await asyncio.gather(*taken)] == [200, 200]
        assert (await server.post(path, GENERATING[path])).status == 200  # a place is free


async def test_a_request_with_several_answers_is_judged_by_the_first(start: Any) -> None:
    async with start(max_running=1, max_queued=8, max_wait_s=0.0) as server:
        capacity = capacity_of(server.instance.engine.result())
        for _ in range(MIN_MEANS * STEPS_OF_A_MEAN):
            capacity.step_times.add(100.0)
        answer = await server.post("/v1/completions", {**BODY, "n": 4})
        assert (answer.status, len(answer.json["choices"])) == (200, 4)


async def test_while_weights_arrive_the_time_to_come_back_follows_the_load(start: Any) -> None:
    async with start(loaded=False, limits=Limits(max_in_flight=0)) as server:
        now_s = server.instance.timeline.now_s
        server.instance.timeline.now_s = lambda: 6.0
        for fraction, expected_s in ((0.0, 1), (0.25, 18), (0.5, 6), (0.99, 1), (0.001, 30)):
            server.instance.fraction = fraction
            assert retry_after_s(await server.post("/v1/completions", BODY)) == expected_s
        server.instance.timeline.now_s = now_s


async def test_once_it_serves_the_time_to_come_back_is_that_between_the_latest_ends(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with start(limits=Limits(max_in_flight=0)) as server:
        engine = server.instance.engine.result()
        capacity_of(engine).recent_ends_s.extend([0.0, 4.0, 8.0])
        assert retry_after_s(await server.post("/v1/completions", BODY)) == 4


@pytest.mark.parametrize("num_queued", [1, 6])
async def test_the_time_to_come_back_follows_the_queue(start: Any, num_queued: int) -> None:
    async with start(max_running=1, max_queued=num_queued) as server:
        server.instance.model.hold()
        taken = []
        for number in range(1 + num_queued):
            taken.append(asyncio.create_task(server.post("/v1/completions", BODY)))
            await server.eventually(lambda: server.running() + server.queued() == number + 1)  # noqa: B023
        capacity = capacity_of(server.instance.engine.result())
        capacity.recent_ends_s.extend([0.0, 4.0, 8.0])
        refused = await server.post("/v1/completions", BODY)
        assert (refused.status, retry_after_s(refused)) == (429, 4 * num_queued)
        for _ in range(MIN_MEANS * STEPS_OF_A_MEAN):
            capacity.step_times.add(0.5)  # all that wait must have ended sooner: two tokens each
        assert retry_after_s(await server.post("/v1/completions", BODY)) == min(4, 1) * (1 + num_queued)
        server.instance.model.release()
        assert {answer.status for answer in await asyncio.gather(*taken)} == {200}


def test_the_time_to_come_back_is_bounded_and_forgets_what_was_long_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capacity = Capacity(EngineOptions(kv_bytes=1))
    now_s = 0.0
    monkeypatch.setattr("teneral.runtime.engine.capacity.time.monotonic", lambda: now_s)
    assert capacity.retry_after_s == 1.0  # nothing is known
    for between_s, expected_s in ((0.001, 1.0), (5.0, 5.0), (500.0, 120.0), (2.0, 2.0)):
        for _ in range(NUM_RECENT_ENDS):
            now_s += between_s
            capacity.note_end()
        assert capacity.retry_after_s == pytest.approx(expected_s, rel=0.01)


async def test_who_is_turned_away_while_it_sends_a_large_body_gets_the_answer_all_the_same(
    start: Any,
) -> None:
    """Not a reset: many clients send all of a request before they look for an answer."""

    def send_all_then_read(address: tuple[str, int]) -> list[int]:
        connection = http.client.HTTPConnection(*address, timeout=patience_s(60))
        statuses = []
        for _ in range(2):  # and the connection goes on
            connection.request("POST", "/v1/completions", b"x" * (4 << 20))
            response = connection.getresponse()
            statuses.append(response.status)
            response.read()
        connection.close()
        return statuses

    async with start(limits=Limits(max_in_flight=0)) as server:
        assert await asyncio.to_thread(send_all_then_read, server.address) == [429, 429]
        assert server.service.admission.body_bytes == 0
