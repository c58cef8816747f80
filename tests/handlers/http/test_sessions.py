"""Sessions, tenants and priorities as clients ask for them, and what the server tells of its KV pool."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from teneral.runtime.kv.view import PoolView, render

TOKENS = [(number * 7) % 90 for number in range(50)]
BODY: dict[str, Any] = {"prompt": TOKENS, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
SECRETS = {"session": "secret-session", "tenant": "secret-tenant", "cache_salt": "secret salt"}


def cached(answer: Any) -> int:
    return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_session_keeps_its_blocks_for_the_next_turn(start: Any) -> None:
    async with start() as server:
        extras = {"teneral": {"session": "s"}}
        assert cached(await server.post("/v1/completions", {**BODY, **extras})) == 0
        statistics = server.instance.engine.result().statistics()
        assert (statistics.sessions, statistics.pinned_blocks) == (1, 3)
        again = await server.post("/v1/completions", {**BODY, "prompt": [*TOKENS, 5], **extras})
        assert cached(again) == 48


async def test_a_chat_has_the_same_fields(start: Any) -> None:
    async with start() as server:
        body = {
            "messages": [{"role": "user", "content": "x" * 40}],
            "max_tokens": 2,
            "teneral": {"session": "s", "tenant": "t", "priority": "batch"},
        }
        assert (await server.post("/v1/chat/completions", body)).status == 200
        assert server.instance.engine.result().statistics().sessions == 1


async def test_a_hostile_session_is_refused_by_name(start: Any) -> None:
    async with start() as server:
        for session in ("a b", "a\0", "x" * 129, "\u0301"):
            answer = await server.post("/v1/completions", {**BODY, "teneral": {"session": session}})
            assert (answer.status, answer.error["param"]) == (400, "session")
        raw = b'{"prompt": "x", "teneral": {"session": "\\ud800"}}'
        answer = await server.request("POST", "/v1/completions", data=raw)
        assert answer.status == 400
        assert (await server.post("/v1/completions", BODY)).status == 200


async def test_a_function_is_given_the_session_of_its_invocation(start: Any) -> None:
    def handler(event: Any, context: Any) -> Any:
        context.model.generate("a" * 40, max_tokens=2, ignore_eos=True)
        return {"session": context.session}

    async with start(handler=handler) as server:
        answer = await server.request("POST", "/invoke", data=b"1", headers={"Teneral-Session": "s-7"})
        assert answer.json == {"session": "s-7"}
        assert server.instance.engine.result().statistics().sessions == 1
        refused = await server.request("POST", "/invoke", data=b"1", headers={"Teneral-Session": "a b"})
        assert (refused.status, refused.error["param"]) == (400, "session")


async def test_a_tenant_beyond_its_share_of_the_queue_is_refused_before_its_prompt_is_looked_at(
    start: Any, monkeypatch: Any
) -> None:
    async with start(max_running=1, max_queued=8, max_queued_per_tenant=2) as server:
        server.instance.model.hold()
        body = {**BODY, "prompt": "x", "teneral": {"tenant": "a"}}
        taken = [asyncio.create_task(server.post("/v1/completions", body)) for _ in range(3)]
        await server.eventually(lambda: (server.running(), server.queued()) == (1, 2))

        def encode(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("the prompt was tokenised")

        with monkeypatch.context() as patch:
            patch.setattr(type(server.instance.tokenizer.result()), "encode", encode)
            refused = await server.post("/v1/completions", body)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["Retry-After"]) >= 1
        other = asyncio.create_task(
            server.post("/v1/completions", {**BODY, "prompt": "x", "teneral": {"tenant": "b"}})
        )
        await server.eventually(lambda: server.queued() == 3)
        server.instance.model.release()
        assert [answer.status for answer in await asyncio.gather(*taken, other)] == [200] * 4


async def test_a_full_queue_refuses_before_the_prompt_is_looked_at(start: Any, monkeypatch: Any) -> None:
    async with start(max_running=1, max_queued=1) as server:
        server.instance.model.hold()
        taken = [
            asyncio.create_task(server.post("/v1/completions", {**BODY, "prompt": "x"})) for _ in range(2)
        ]
        await server.eventually(lambda: server.running() + server.queued() == 2)

        def encode(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("the prompt was tokenised")

        with monkeypatch.context() as patch:
            patch.setattr(type(server.instance.tokenizer.result()), "encode", encode)
            refused = await server.post("/v1/completions", {**BODY, "prompt": "x"})
        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) >= 1
        server.instance.model.release()
        assert [answer.status for answer in await asyncio.gather(*taken)] == [200, 200]


async def test_the_metrics_tell_of_sessions_tenants_and_priorities(start: Any) -> None:
    async with start(max_running=1) as server:
        await server.post("/v1/completions", {**BODY, "teneral": {"session": "s"}})
        server.instance.model.hold()
        waiting = [asyncio.create_task(server.post("/v1/completions", {**BODY, "teneral": {"tenant": "a"}}))]
        await server.eventually(lambda: server.running() == 1)  # neither of the others
        waiting += [
            asyncio.create_task(server.post("/v1/completions", {**BODY, "teneral": each}))
            for each in ({"tenant": "b"}, {"tenant": "c", "priority": "batch"})
        ]
        await server.eventually(lambda: server.queued() == 2)
        text = (await server.get("/metrics")).body.decode()
        server.instance.model.release()
        await asyncio.gather(*waiting)
    assert "teneral_engine_sessions 1.0" in text
    assert "teneral_engine_pinned_blocks 3.0" in text
    assert "teneral_engine_tenants_waiting 2.0" in text
    assert "teneral_engine_queued_by_priority_interactive 1.0" in text
    assert "teneral_engine_queued_by_priority_batch 1.0" in text


# -- /debug/kv -----------------------------------------------------------------------------------------------


async def test_the_pool_can_be_looked_at_without_learning_whose_it_is(start: Any) -> None:
    async with start() as server:
        for _ in range(2):
            await server.post("/v1/completions", {**BODY, "teneral": SECRETS})
        answer = await server.get("/debug/kv")
        assert answer.status == 200
        assert not any(secret.encode() in answer.body for secret in SECRETS.values())
        view = msgspec.json.decode(answer.body, type=PoolView)
        assert (view.num_pinned, view.num_in_use, view.num_sessions, view.num_session_owners) == (3, 0, 1, 1)
        assert view.num_free + view.num_idle + view.num_pinned == view.num_blocks
        (chain,) = view.chains
        assert (chain.num_tokens, chain.num_hits, chain.num_sessions) == (48, 1, 1)
        assert "3 pinned" in render(view)


async def test_the_pool_is_looked_at_with_the_key_only(start: Any) -> None:
    async with start(api_key="key") as server:
        assert (await server.get("/debug/kv")).status == 401
        assert (await server.get("/debug/kv", headers={"Authorization": "Bearer key"})).status == 200


async def test_while_the_model_loads_there_is_no_pool(start: Any) -> None:
    async with start(loaded=False) as server:
        answer = await server.get("/debug/kv")
        assert (answer.status, answer.error["code"]) == (503, "loading")
        assert int(answer.headers["Retry-After"]) >= 1


async def test_an_encoder_has_no_pool(start: Any, encoder_parts: Any) -> None:
    async with start(parts=encoder_parts) as server:
        assert (await server.get("/debug/kv")).status == 400
