"""The loop on Lambda, against an API of our own: what comes in reaches the function, and what it gives goes back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from typing import Any

import pytest
from tests.support.fake_runtime_api import ARN, FakeRuntimeApi, Trouble
from tests.support.instances import StagedInstance, TinyParts
from tests.support.lambda_rig import running_loop
from tests.support.load import patience_s, slowdown

from teneral.handlers.platforms.aws_lambda import loop as loop_module
from teneral.handlers.platforms.aws_lambda import runtime_api
from teneral.handlers.platforms.aws_lambda.errors import MAX_RESPONSE_BYTES
from teneral.handlers.platforms.aws_lambda.logs import LambdaJsonLines, TextLines
from teneral.handlers.platforms.aws_lambda.runtime_api import RuntimeApiError
from teneral.loader.errors import UnavailableError


@pytest.fixture
def instance(tiny_parts: TinyParts) -> StagedInstance:
    return StagedInstance(tiny_parts)


async def test_an_event_goes_to_the_function_and_its_value_comes_back(
    api: FakeRuntimeApi, instance: StagedInstance
) -> None:
    async with running_loop(api, instance, lambda event, context: {"hello": event["name"]}) as rig:
        outcome = await rig.invoke({"name": "Ünal"})
        assert (outcome.kind, outcome.body) == ("response", '{"hello": "Ünal"}'.encode())
        assert outcome.headers["content-type"] == "application/json"
        for number in range(3):
            assert (await rig.invoke({"name": number})).json == {"hello": number}
        assert api.num_connections == 1


async def test_the_context_knows_what_lambda_tells(api: FakeRuntimeApi, instance: StagedInstance) -> None:
    def handler(event: Any, context: Any) -> Any:
        return {
            "id": context.request_id,
            "trace": [context.trace_id, os.environ.get("_X_AMZN_TRACE_ID")],
            "left_s": context.remaining_time_s(),
            **context.platform,
        }

    environment = {"AWS_LAMBDA_FUNCTION_NAME": "tests", "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "3008"}
    async with running_loop(api, instance, handler, environment=environment) as rig:
        outcome = await rig.invoke(
            {},
            timeout_s=30,
            Lambda_Runtime_Client_Context='{"custom": {"a": "1"}}',
            Lambda_Runtime_Cognito_Identity='{"cognitoIdentityId": "x"}',
            Lambda_Runtime_Aws_Tenant_Id="blue",
        )
        reply = outcome.json
        assert reply["id"] == outcome.request_id
        assert reply["trace"] == [f"Root=1-{outcome.request_id}"] * 2
        assert 0 < reply["left_s"] <= 29.8  # some is kept for the answer
        assert reply["invoked_function_arn"] == ARN
        assert reply["client_context"] == {"custom": {"a": "1"}}
        assert reply["identity"] == {"cognitoIdentityId": "x"}
        assert (reply["function_name"], reply["memory_limit_in_mb"]) == ("tests", "3008")
        assert (reply["name"], reply["tenant_id"]) == ("lambda", "blue")


async def test_an_attempts_id_is_sent_back(api: FakeRuntimeApi, instance: StagedInstance) -> None:
    async with running_loop(api, instance, lambda event, context: 1 / event) as rig:
        for event in (1, 0):
            outcome = await rig.invoke(event, Lambda_Runtime_Invocation_Id="attempt-7")
            assert outcome.headers["lambda-runtime-invocation-id"] == "attempt-7"


async def test_events_in_chunks_are_read(instance: StagedInstance) -> None:
    with FakeRuntimeApi(chunked=True) as api:
        async with running_loop(api, instance, lambda event, context: len(event)) as rig:
            assert (await rig.invoke("x" * 300_000)).json == 300_000


async def test_an_async_function_answers_too(api: FakeRuntimeApi, instance: StagedInstance) -> None:
    async def handler(event: Any, context: Any) -> Any:
        await asyncio.sleep(0)
        return [event]

    async with running_loop(api, instance, handler) as rig:
        assert (await rig.invoke(5)).json == [5]


async def test_the_first_invocation_waits_for_the_model_and_not_for_the_load(
    api: FakeRuntimeApi, instance: StagedInstance
) -> None:
    def handler(event: Any, context: Any) -> Any:
        return context.model.generate(event, max_tokens=3, temperature=0, ignore_eos=True).to_dict()

    async with running_loop(api, instance, handler) as rig:
        submitted = api.submit("hello")
        await asyncio.to_thread(api.polled.wait)
        assert not submitted.done.is_set()
        instance.let_in()
        assert (await rig.outcome(submitted)).json["usage"]["completion_tokens"] == 3


# -- errors ------------------------------------------------------------------------------------------------------------


async def test_an_exception_is_reported_as_the_users_own(
    api: FakeRuntimeApi, instance: StagedInstance
) -> None:
    class OutOfPaper(Exception):
        pass

    def handler(event: Any, context: Any) -> Any:
        raise OutOfPaper("the tray is empty")

    async with running_loop(api, instance, handler) as rig:
        outcome = await rig.invoke({})
        assert outcome.kind == "error"
        assert outcome.headers["lambda-runtime-function-error-type"] == "OutOfPaper"
        reply = outcome.json
        assert (reply["errorType"], reply["errorMessage"]) == ("OutOfPaper", "the tray is empty")
        assert reply["requestId"] == outcome.request_id
        assert len(reply["stackTrace"]) == 1
        assert "raise OutOfPaper" in reply["stackTrace"][0]
        assert '"type": "OutOfPaper"' in outcome.headers["lambda-runtime-function-xray-error-cause"]


@pytest.mark.parametrize(
    ("given", "error_type"),
    [({1, 2}, "Runtime.MarshalError"), ("x" * MAX_RESPONSE_BYTES, "Function.ResponseSizeTooLarge")],
)
async def test_what_cannot_be_sent_is_an_error_and_is_not_sent(
    api: FakeRuntimeApi, instance: StagedInstance, given: Any, error_type: str
) -> None:
    async with running_loop(api, instance, lambda event, context: given) as rig:
        outcome = await rig.invoke({})
        assert (outcome.kind, outcome.json["errorType"]) == ("error", error_type)
        assert len(outcome.body) < 10_000


async def test_an_event_that_is_no_json_is_refused(api: FakeRuntimeApi, instance: StagedInstance) -> None:
    async with running_loop(api, instance, lambda event, context: event) as rig:
        assert (await rig.invoke(b"{")).json["errorType"] == "Runtime.UnmarshalError"
        reply = (await rig.invoke({}, Lambda_Runtime_Client_Context="{")).json
        assert reply["errorType"] == "Runtime.LambdaContextUnmarshalError"
        assert (await rig.invoke(1)).json == 1


async def test_an_invocation_without_time_is_ended_before_lambda_ends_the_instance(
    api: FakeRuntimeApi,
    instance: StagedInstance,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit_s = 2.0 * slowdown()
    monkeypatch.setattr(runtime_api, "MARGIN_S", limit_s)  # of a loop that waits for its core
    monkeypatch.setattr(runtime_api, "MARGIN_SHARE", 0.5)
    held = threading.Event()

    def handler(event: Any, context: Any) -> Any:
        return held.wait(patience_s(30)) if event == "hold" else "free"

    async with running_loop(api, instance, handler) as rig:
        deadline_s = time.monotonic() + limit_s
        outcome = await rig.invoke("hold", timeout_s=limit_s)
        assert outcome.json["errorType"] == "CancelledError"
        assert outcome.answered_s < deadline_s
        [record] = [each for each in caplog.records if "did not end before its deadline" in each.getMessage()]
        assert record.exc_info is None  # one line, no traceback
        assert (await rig.invoke("go")).json == "free"
        held.set()


async def test_an_instance_that_fails_answers_with_its_failure_and_ends(
    api: FakeRuntimeApi, instance: StagedInstance
) -> None:
    begun = threading.Event()

    def handler(event: Any, context: Any) -> Any:
        begun.set()
        return context.model.tokenize("hello")

    async with running_loop(api, instance, handler) as rig:
        submitted = api.submit({})
        await asyncio.to_thread(begun.wait)
        instance.fail(UnavailableError("the store is gone"))
        outcome = await rig.outcome(submitted)
        assert (outcome.json["errorType"], outcome.json["errorMessage"]) == (
            "UnavailableError",
            "the store is gone",
        )
        with pytest.raises(UnavailableError):
            await rig.task


# -- streams -----------------------------------------------------------------------------------------------------------


async def test_what_is_yielded_is_streamed_as_it_comes(api: FakeRuntimeApi, instance: StagedInstance) -> None:
    go_on = threading.Event()

    def handler(event: Any, context: Any) -> Any:
        yield {"n": 1}
        yield {"n": 2}
        assert go_on.wait(patience_s(30))
        yield {"n": 3}

    async with running_loop(api, instance, handler, is_streaming=True) as rig:
        submitted = api.submit({})
        assert await asyncio.to_thread(submitted.first_piece.wait, 30)
        assert not submitted.done.is_set()
        go_on.set()
        outcome = await rig.outcome(submitted)
        assert outcome.is_streamed
        assert outcome.pieces == [b'{"n": 1}\n', b'{"n": 2}\n', b'{"n": 3}\n']
        assert outcome.trailers == {}
        assert (await rig.invoke({})).body == outcome.body  # on a connection of its own


@pytest.mark.parametrize("returns_it", [False, True])
async def test_the_first_piece_does_not_wait_for_the_second(
    api: FakeRuntimeApi, instance: StagedInstance, returns_it: bool
) -> None:
    go_on = threading.Event()

    def pieces() -> Any:
        yield {"n": 1}
        assert go_on.wait(patience_s(30))
        yield {"n": 2}

    def handler(event: Any, context: Any) -> Any:
        yield from pieces()

    def returning(event: Any, context: Any) -> Any:
        return pieces()

    async with running_loop(api, instance, returning if returns_it else handler, is_streaming=True) as rig:
        submitted = api.submit({})
        try:
            assert await asyncio.to_thread(submitted.first_piece.wait, 10)
        finally:
            go_on.set()
        assert (await rig.outcome(submitted)).pieces == [b'{"n": 1}\n', b'{"n": 2}\n']


async def test_one_value_of_a_plain_function_is_no_stream(
    api: FakeRuntimeApi, instance: StagedInstance
) -> None:
    async with running_loop(api, instance, lambda event, context: event, is_streaming=True) as rig:
        outcome = await rig.invoke({"n": 1})
        assert (outcome.json, outcome.is_streamed) == ({"n": 1}, False)


async def test_an_error_behind_the_only_piece_is_in_the_trailers_and_announced(
    api: FakeRuntimeApi, instance: StagedInstance
) -> None:
    def handler(event: Any, context: Any) -> Any:
        yield {"n": 1}
        raise ValueError("no more")

    async with running_loop(api, instance, handler, is_streaming=True) as rig:
        outcome = await rig.invoke({})
        assert (outcome.kind, outcome.body) == ("response", b'{"n": 1}\n')
        announced = {name.strip().lower() for name in outcome.headers["trailer"].split(",")}
        assert announced == set(outcome.trailers)
        reply = outcome.trailing_error()
        assert (reply["errorType"], reply["errorMessage"]) == ("ValueError", "no more")
        assert isinstance(reply["stackTrace"], list)


async def test_an_error_behind_the_first_piece_is_in_the_trailers(
    api: FakeRuntimeApi, instance: StagedInstance
) -> None:
    def handler(event: Any, context: Any) -> Any:
        yield b"some"
        yield b"thing"
        raise ValueError("and no more\n\r")

    async with running_loop(api, instance, handler, is_streaming=True) as rig:
        outcome = await rig.invoke({})
        assert (outcome.kind, outcome.body) == ("response", b"something")
        assert outcome.headers["content-type"] == "application/octet-stream"
        reply = outcome.trailing_error()
        assert (reply["errorType"], reply["errorMessage"]) == ("ValueError", "and no more\n\r")


async def test_an_error_before_the_first_piece_is_an_ordinary_one(
    api: FakeRuntimeApi, instance: StagedInstance
) -> None:
    def handler(event: Any, context: Any) -> Any:
        raise ValueError("nothing at all")
        yield 1

    async with running_loop(api, instance, handler, is_streaming=True) as rig:
        outcome = await rig.invoke({})
        assert (outcome.kind, outcome.json["errorType"]) == ("error", "ValueError")


async def test_a_stream_that_lambda_takes_no_more_of_ends_and_the_instance_goes_on(
    api: FakeRuntimeApi, instance: StagedInstance
) -> None:
    ended = threading.Event()

    def handler(event: Any, context: Any) -> Any:
        try:
            for _ in range(event):
                yield "x" * 100_000
        finally:
            ended.set()

    async with running_loop(api, instance, handler, is_streaming=True) as rig:
        cut = api.submit(1_000_000)
        assert await asyncio.to_thread(cut.first_piece.wait, 30)
        api.drop_connections()
        assert await asyncio.to_thread(ended.wait, 30)
        assert len((await rig.invoke(2)).pieces) == 2


async def test_without_streaming_what_is_yielded_becomes_a_list(
    api: FakeRuntimeApi, instance: StagedInstance
) -> None:
    def handler(event: Any, context: Any) -> Any:
        yield from event

    async with running_loop(api, instance, handler) as rig:
        for event in ([], ["one"], [1, {"two": 2}]):
            outcome = await rig.invoke(event)
            assert (outcome.json, outcome.is_streamed) == (event, False)


# -- the Runtime API in trouble ----------------------------------------------------------------------------------------


async def test_connections_that_were_closed_meanwhile_are_made_anew(
    api: FakeRuntimeApi, instance: StagedInstance
) -> None:
    async with running_loop(api, instance, lambda event, context: event) as rig:
        assert (await rig.invoke(1)).json == 1
        api.trouble("response", Trouble(drop=True))
        assert (await rig.invoke(2)).json == 2  # asked again, on a new one
        while not api.num_polling:
            await asyncio.sleep(0.005)
        api.drop_connections()
        assert (await rig.invoke(3)).json == 3


@pytest.mark.parametrize("status", [400, 403, 413])
async def test_an_answer_that_is_refused_is_no_reason_to_end(
    api: FakeRuntimeApi, instance: StagedInstance, status: int
) -> None:
    async with running_loop(api, instance, lambda event, context: event) as rig:
        api.trouble("response", Trouble(status=status))
        refused = api.submit(1)
        assert (await rig.invoke(2)).json == 2
        assert not refused.done.is_set()


@pytest.mark.parametrize("endpoint", ["next", "response", "error"])
async def test_a_runtime_api_that_has_failed_ends_the_instance(
    api: FakeRuntimeApi, instance: StagedInstance, endpoint: str
) -> None:
    api.trouble(endpoint, Trouble(status=500))
    async with running_loop(api, instance, lambda event, context: 1 / event) as rig:
        api.submit(0 if endpoint == "error" else 1)
        with pytest.raises(RuntimeApiError, match="500"):
            await rig.task


async def test_a_slow_runtime_api_is_waited_for(api: FakeRuntimeApi, instance: StagedInstance) -> None:
    async with running_loop(api, instance, lambda event, context: event) as rig:
        api.trouble("next", Trouble(wait_s=0.2))
        api.trouble("response", Trouble(wait_s=0.2))
        assert (await rig.invoke(1)).json == 1


# -- several at a time, the end, and standing still --------------------------------------------------------------------


async def test_as_many_run_at_a_time_as_lambda_says_each_on_its_own(
    api: FakeRuntimeApi, instance: StagedInstance, caplog: pytest.LogCaptureFixture
) -> None:
    together = threading.Barrier(4)
    seen: list[str | None] = []
    log = logging.getLogger("users.own")

    def handler(event: Any, context: Any) -> Any:
        together.wait(patience_s(30))  # none passes alone
        log.warning("on %s", event)
        seen.append(os.environ.get("_X_AMZN_TRACE_ID"))
        return [event, context.request_id, context.trace_id]

    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(TextLines().format(record))
            assert f'"requestId": "{lines[-1].split(chr(9))[2]}"' in LambdaJsonLines().format(record)

    keep = Keep()
    log.addHandler(keep)
    try:
        async with running_loop(api, instance, handler, num_workers=4) as rig:
            submitted = [api.submit(number) for number in range(8)]
            outcomes = [await rig.outcome(one) for one in submitted]
    finally:
        log.removeHandler(keep)
    for number, outcome in enumerate(outcomes):
        assert outcome.json == [number, outcome.request_id, f"Root=1-{outcome.request_id}"]
        line = next(line for line in lines if line.endswith(f"on {number}"))
        assert line.split("\t")[2] == outcome.request_id
    assert api.num_connections == 4
    assert set(seen) == {os.environ.get("_X_AMZN_TRACE_ID")}  # of no invocation, where there are several


async def test_at_the_end_what_runs_may_finish(api: FakeRuntimeApi, instance: StagedInstance) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def handler(event: Any, context: Any) -> Any:
        begun.set()
        assert go_on.wait(patience_s(30))
        return "done"

    async with running_loop(api, instance, handler, num_workers=2, drain_timeout_s=30) as rig:
        submitted = api.submit({})
        await asyncio.to_thread(begun.wait)
        rig.loop.request_stop()
        go_on.set()
        assert (await rig.outcome(submitted)).json == "done"
        await rig.task


async def test_an_invocation_that_takes_too_long_gets_an_error(
    api: FakeRuntimeApi, instance: StagedInstance
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def handler(event: Any, context: Any) -> Any:
        begun.set()
        while not context.cancelled:
            time.sleep(0.005)
        ended.set()

    async with running_loop(api, instance, handler, drain_timeout_s=0.05) as rig:
        submitted = api.submit({})
        await asyncio.to_thread(begun.wait)
        await rig.end()
        assert (await rig.outcome(submitted)).json["errorType"] == "DrainingError"
        assert await asyncio.to_thread(ended.wait, 30)


async def test_after_a_long_pause_what_may_be_stale_is_let_go(
    api: FakeRuntimeApi, instance: StagedInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    rested: list[int] = []
    monkeypatch.setattr(type(instance), "quiesce", lambda _: rested.append(1))
    async with running_loop(api, instance, lambda event, context: event) as rig:
        await rig.invoke(1)
        await rig.invoke(2)
        assert rested == []
        monkeypatch.setattr(loop_module, "STALE_AFTER_S", -1.0)
        await rig.invoke(3)
        assert rested == [1]
        with contextlib.suppress(RuntimeApiError):
            await rig.end()
