"""Responses and conversations that a server keeps, through OpenAI's own client with its strict validation."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.support.chat_families import scripted

from teneral.handlers.openai import response_background
from teneral.handlers.openai.response_keeper import response_store

MODEL = "tiny/model"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
CUSTOM = {"type": "custom", "name": "patch", "description": "Change a file"}


def client_of(server: Any, key: str = "one") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, _strict_response_validation=True
    )


@pytest.fixture(params=["memory", "folder"])
async def server(
    request: pytest.FixtureRequest, start: Any, chat_parts: Any, tmp_path: Path
) -> AsyncIterator[Any]:
    address = str(tmp_path / "responses") if request.param == "folder" else None
    async with start(parts=chat_parts("hermes"), responses_store=address) as running:
        yield running
        running.service.shared(response_store).check_integrity()


@pytest.fixture
async def client(server: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(server) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_continues_the_one_that_it_names(client: openai.AsyncOpenAI, stream: bool) -> None:
    """Several turns give the answers that all items, sent again, would give."""
    items: list[Any] = []
    previous: str | None = None
    for turn in range(4):
        text = f"Turn {turn}"
        items.append({"role": "user", "content": text})
        whole = await client.responses.create(input=items, store=False, **GREEDY)
        asked: dict[str, Any] = {"input": text, "previous_response_id": previous, **GREEDY}
        if stream:
            events = [event async for event in await client.responses.create(stream=True, **asked)]
            answer = events[-1].response
        else:
            answer = await client.responses.create(**asked)
        assert answer.output_text == whole.output_text
        assert answer.usage.input_tokens == whole.usage.input_tokens
        assert answer.previous_response_id == previous
        items += answer.output
        previous = answer.id
    assert previous is not None
    listed = await client.responses.input_items.list(previous, order="asc", limit=100)
    assert [item.type for item in listed.data] == ["message"] * 7
    page = await client.responses.input_items.list(previous, limit=2)
    assert page.has_more
    assert page.data[0].content[0].text == "Turn 3"  # type: ignore[union-attr]


async def test_a_response_is_found_until_it_is_deleted(server: Any, client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(input="Hello", metadata={"a": "b"}, **GREEDY)
    found = await client.responses.retrieve(answer.id)
    assert found.model_dump() == answer.model_dump()
    async with client_of(server, "two") as other:
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(answer.id)
        with pytest.raises(openai.NotFoundError, match="for the API key that made"):
            await other.responses.create(input="x", previous_response_id=answer.id, **GREEDY)
    after = await client.responses.create(input="And?", previous_response_id=answer.id, **GREEDY)
    await client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(answer.id)
    # What continues it has it still.
    again = await client.responses.create(input="So?", previous_response_id=after.id, **GREEDY)
    assert again.usage is not None
    listed = await client.responses.input_items.list(again.id, order="asc")
    assert len(listed.data) == 5


async def test_nothing_is_kept_where_the_client_or_the_server_says_so(
    start: Any, client: openai.AsyncOpenAI
) -> None:
    answer = await client.responses.create(input="Hello", store=False, **GREEDY)
    assert answer.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(answer.id)
    async with start(responses_bytes=0) as server, client_of(server) as other:
        answer = await other.responses.create(input="Hello", **GREEDY)
        assert answer.store is False  # type: ignore[attr-defined]
        with pytest.raises(openai.BadRequestError) as caught:
            await other.responses.create(input="Hello", store=True, **GREEDY)
        assert caught.value.param == "store"


async def test_a_reference_stands_for_its_item(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(input="Hello", **GREEDY)
    for reference in ({"type": "item_reference", "id": first.output[0].id}, {"id": first.output[0].id}):
        items: Any = [{"role": "user", "content": "Hello"}, reference, {"role": "user", "content": "And?"}]
        answer = await client.responses.create(input=items, **GREEDY)
        whole = [items[0], first.output[0], items[2]]
        assert answer.output_text == (await client.responses.create(input=whole, **GREEDY)).output_text
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(input=[{"type": "item_reference", "id": "msg_1"}], **GREEDY)
    assert caught.value.param == "input[0]"


async def test_a_conversation_grows_by_its_responses(client: openai.AsyncOpenAI) -> None:
    hello: Any = [{"type": "message", "role": "user", "content": "Hello"}]
    made = await client.conversations.create(items=hello, metadata={"a": "b"})
    assert (await client.conversations.retrieve(made.id)).metadata == {"a": "b"}
    answer = await client.responses.create(input="And?", conversation=made.id, **GREEDY)
    assert answer.conversation is not None
    items = (await client.conversations.items.list(made.id, order="asc")).data
    assert [item.type for item in items] == ["message"] * 3
    events = [
        event
        async for event in await client.responses.create(
            input="So?", conversation={"id": made.id}, stream=True, **GREEDY
        )
    ]
    whole = [*hello, {"role": "user", "content": "And?"}, *answer.output, {"role": "user", "content": "So?"}]
    expected = await client.responses.create(input=whole, **GREEDY)
    assert events[-1].response.output_text == expected.output_text
    items = (await client.conversations.items.list(made.id, order="asc")).data
    assert len(items) == 5
    first = items[0].id
    assert first is not None
    await client.conversations.items.delete(first, conversation_id=made.id)
    added = await client.conversations.items.create(made.id, items=hello)
    assert added.data[0].type == "message"
    assert len((await client.conversations.items.list(made.id)).data) == 5
    await client.conversations.update(made.id, metadata={"c": "d"})
    assert (await client.conversations.retrieve(made.id)).metadata == {"c": "d"}
    assert (await client.conversations.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(input="x", conversation=made.id, **GREEDY)


async def test_input_is_counted_as_it_is_computed(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(input="Hello", **GREEDY)
    asked: dict[str, Any] = {"input": "And?", "previous_response_id": first.id, "instructions": "Be brief."}
    counted = await client.responses.input_tokens.count(model=MODEL, **asked)
    answer = await client.responses.create(**asked, **GREEDY)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


async def test_the_count_is_a_route_and_no_response(server: Any) -> None:
    refused = await server.get("/v1/responses/input_tokens")
    assert (refused.status, refused.headers["allow"]) == (405, "POST")


async def test_a_response_is_made_in_the_background(client: openai.AsyncOpenAI) -> None:
    expected = await client.responses.create(input="Hello", **GREEDY)
    answer = await client.responses.create(input="Hello", background=True, **GREEDY)
    assert (answer.status, answer.background) == ("queued", True)
    while answer.status in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
        answer = await client.responses.retrieve(answer.id)
    assert answer.status == "incomplete"  # max_output_tokens
    assert answer.output_text == expected.output_text
    after = await client.responses.create(input="And?", previous_response_id=answer.id, **GREEDY)
    assert after.status == "incomplete"


async def test_a_response_in_the_background_can_be_cancelled_or_fail(
    server: Any, client: openai.AsyncOpenAI
) -> None:
    server.instance.model.step_s = 0.02
    long = {**GREEDY, "max_output_tokens": 2000}
    answer = await client.responses.create(input="Hello", background=True, **long)
    await server.eventually(lambda: server.running() == 1)
    with pytest.raises(openai.BadRequestError, match="not complete yet"):
        await client.responses.create(input="x", previous_response_id=answer.id, **GREEDY)
    cancelled = await client.responses.cancel(answer.id)
    assert cancelled.status == "cancelled"
    await server.eventually(lambda: server.running() == 0)
    assert (await client.responses.cancel(answer.id)).status == "cancelled"
    other = await client.responses.create(input="Hello", **GREEDY)
    with pytest.raises(openai.BadRequestError, match="not made in the background"):
        await client.responses.cancel(other.id)
    answer = await client.responses.create(input="Hello", background=True, **long)
    await server.eventually(lambda: server.running() == 1)
    server.instance.model.failure = RuntimeError("broken")
    while answer.status in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
        answer = await client.responses.retrieve(answer.id)
    assert answer.status == "failed"
    assert answer.error is not None
    assert "broken" in answer.error.message


def held(store: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, list[Any]]:
    """Have calls of the store's method wait for the event. Also those that have come so far."""
    go_on, came, call = asyncio.Event(), list[Any](), getattr(store, method)

    async def later(*args: Any) -> Any:
        came.append(args)
        await go_on.wait()
        return await call(*args)

    monkeypatch.setattr(store, method, later)
    return go_on, came


async def test_responses_in_the_background_are_counted_before_their_store_answers(
    server: Any, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_background, "MAX_BACKGROUND", 1)
    go_on, came = held(server.service.shared(response_store), "put", monkeypatch)
    first = asyncio.create_task(client.responses.create(input="Hello", background=True, **GREEDY))
    await server.eventually(lambda: came)
    second = asyncio.create_task(client.responses.create(input="Hello", background=True, **GREEDY))
    await asyncio.wait([second], timeout=0.5)
    go_on.set()
    with pytest.raises(openai.RateLimitError, match="which is the limit"):
        await second
    assert (await first).status == "queued"


async def test_a_response_that_is_cancelled_twice_is_kept_as_cancelled(
    server: Any, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.instance.model.step_s = 0.02
    answer = await client.responses.create(
        input="Hello", background=True, **{**GREEDY, "max_output_tokens": 2000}
    )
    await server.eventually(lambda: server.running() == 1)
    go_on, came = held(server.service.shared(response_store), "change", monkeypatch)
    cancels = [asyncio.create_task(client.responses.cancel(answer.id)) for _ in range(2)]
    await server.eventually(lambda: came)
    await asyncio.wait(cancels, timeout=0.5)
    go_on.set()
    assert [(await each).status for each in cancels] == ["cancelled"] * 2


async def test_a_stream_in_the_background_goes_on_where_its_client_left_it(
    server: Any, client: openai.AsyncOpenAI
) -> None:
    server.instance.model.step_s = 0.01
    asked: dict[str, Any] = {"input": "Hello", "background": True, "stream": True, **GREEDY}
    stream = await client.responses.create(**asked)
    first = [await anext(stream) for _ in range(2)]
    await stream.close()
    assert [event.type for event in first] == ["response.created", "response.queued"]
    name = first[0].response.id
    rest = [
        event
        async for event in await client.responses.retrieve(
            name, stream=True, starting_after=first[-1].sequence_number
        )
    ]
    assert [event.sequence_number for event in rest] == list(range(2, 2 + len(rest)))
    assert rest[0].type == "response.in_progress"
    last = rest[-1]
    assert last.type == "response.incomplete"  # max_output_tokens
    assert (await client.responses.retrieve(name)).model_dump() == last.response.model_dump()
    # Once it has ended, too, and for its own key alone
    again = [event async for event in await client.responses.retrieve(name, stream=True)]
    assert [event.type for event in again] == [event.type for event in (*first, *rest)]
    async with client_of(server, "two") as other:
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(name, stream=True)
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        await client.responses.retrieve(name, stream=True, extra_query={"starting_after": "x"})
    plain = await client.responses.create(input="Hello", **GREEDY)
    assert plain.output_text == last.response.output_text
    with pytest.raises(openai.BadRequestError, match="no stream"):
        await client.responses.retrieve(plain.id, stream=True)
    await client.responses.delete(name)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(name, stream=True)


async def test_a_stream_in_the_background_ends_by_an_event(server: Any, client: openai.AsyncOpenAI) -> None:
    server.instance.model.step_s = 0.02
    asked: dict[str, Any] = {"input": "Hello", "background": True, "stream": True, **GREEDY}
    asked["max_output_tokens"] = 2000
    kinds: list[str] = []
    async for event in await client.responses.create(**asked):
        kinds.append(event.type)
        if event.type == "response.in_progress":
            assert (await client.responses.cancel(event.response.id)).status == "cancelled"
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "error"
    stream = await client.responses.create(**asked)
    await server.eventually(lambda: server.running() == 1)
    server.instance.model.failure = RuntimeError("broken")
    events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert "broken" in events[-1].response.error.message


async def test_a_full_context_loses_its_oldest_messages(client: openai.AsyncOpenAI) -> None:
    long: list[Any] = [{"role": "user", "content": f"{number} " + "word " * 400} for number in range(12)]
    asked: dict[str, Any] = {"input": long, "instructions": "Be brief.", **GREEDY}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**asked)
    assert caught.value.code == "context_length_exceeded"
    answer = await client.responses.create(truncation="auto", **asked)
    assert answer.truncation == "auto"
    (warning,) = answer.teneral["warnings"]  # type: ignore[attr-defined]
    assert "oldest messages are left out" in warning
    num_left_out = int(warning.split("the ")[2].split(" ")[0])
    kept = await client.responses.create(**{**asked, "input": long[num_left_out:]})
    assert kept.output_text == answer.output_text


async def test_tools_that_openai_runs_are_left_out_with_a_warning(client: openai.AsyncOpenAI) -> None:
    tools: Any = [{"type": "web_search"}, {"type": "mcp", "server_label": "x", "server_url": "http://x"}]
    items: Any = [
        {
            "type": "web_search_call",
            "id": "ws_1",
            "status": "completed",
            "action": {"type": "search", "query": "x"},
        },
        {"role": "user", "content": "Hello"},
    ]
    answer = await client.responses.create(
        input=items,
        tools=tools,
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        **GREEDY,
    )
    warnings = answer.teneral["warnings"]  # type: ignore[attr-defined]
    for words in ("tools[0]", "tools[1]", "input[0]", "summary", "reasoning_effort", "verbosity"):
        assert any(words in warning for warning in warnings), words
    plain = await client.responses.create(input="Hello", **GREEDY)
    assert answer.output_text == plain.output_text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_custom_tool_takes_a_text(server: Any, client: openai.AsyncOpenAI, stream: bool) -> None:
    call = '<tool_call>\n{"name": "patch", "arguments": {"input": "a \\"b\\"\\nc"}}\n</tool_call>'
    asked: dict[str, Any] = {"input": "Hello", "tools": [CUSTOM], **GREEDY, "max_output_tokens": 200}
    with scripted(server, call):
        if stream:
            events = [event async for event in await client.responses.create(stream=True, **asked)]
            answer = events[-1].response
            kinds = [event.type for event in events if "custom_tool_call_input" in event.type]
            assert kinds == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
        else:
            answer = await client.responses.create(**asked)
    (item,) = answer.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", 'a "b"\nc')
    result: Any = [{"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}]
    after = await client.responses.create(
        input=result, previous_response_id=answer.id, tools=[CUSTOM], **GREEDY
    )
    assert after.status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["tools", "input"])
async def test_functions_in_a_namespace_are_called_by_both_names(
    server: Any, client: openai.AsyncOpenAI, stream: bool, place: str
) -> None:
    functions = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in "ab"]
    space = {"type": "namespace", "name": "crm", "description": "Orders", "tools": [*functions, CUSTOM]}
    other = {"type": "function", "name": "b", "parameters": {"type": "object"}}
    items: list[Any] = [{"role": "user", "content": "Hello"}]
    if place == "input":
        items.append({"type": "additional_tools", "role": "developer", "tools": [space]})
    asked: dict[str, Any] = {**GREEDY, "max_output_tokens": 200, "tools": [other]}
    asked["tools"] += [space] if place == "tools" else []
    calls = ('{"name": "crm.a", "arguments": {}}', '{"name": "crm.patch", "arguments": {"input": "x"}}')
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    with scripted(server, text):
        answer = await client.responses.create(input=items, stream=stream, **asked)
        if stream:
            answer = [event async for event in answer][-1].response  # type: ignore[union-attr]
    first, second = answer.output
    assert (first.type, first.namespace, first.name) == ("function_call", "crm", "a")
    assert (second.type, second.namespace, second.name) == ("custom_tool_call", "crm", "patch")
    results: Any = [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": "done"} for item in answer.output
    ]
    after = await client.responses.create(input=results, previous_response_id=answer.id, **asked)
    whole = await client.responses.create(input=[*items, *answer.output, *results], **asked)
    assert after.output_text == whole.output_text
    assert after.usage.input_tokens == whole.usage.input_tokens
    for choice, names in (
        ({"type": "function", "name": "a"}, [("crm", "a")]),
        ({"type": "function", "name": "b"}, [(None, "b")]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "crm"}]},
            [("crm", "a"), ("crm", "b"), ("crm", "patch")],
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "web_search"}, {"type": "function", "name": "b"}],
            },
            [(None, "b")],
        ),
    ):
        guided = await client.responses.create(
            input=items, tool_choice=choice, parallel_tool_calls=False, **asked
        )
        assert all((item.namespace, item.name) in names for item in guided.output)
        assert guided.output


async def test_tools_of_others_are_left_out_of_those_allowed_and_the_log_says_so(
    client: openai.AsyncOpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    tools: Any = [{"type": "web_search"}, {"type": "function", "name": "b", "parameters": {"type": "object"}}]
    asked: Any = {**GREEDY, "input": "Hello", "tools": tools, "max_output_tokens": 8}
    with caplog.at_level("INFO", logger="teneral.http"):
        answer = await client.responses.create(tool_choice=allowed, **asked)
    assert answer.output[0].type == "message"
    assert f"request {answer.id}: tools[0] is left out" in caplog.text
    with pytest.raises(openai.BadRequestError, match="must be a list of functions"):
        await client.responses.create(tool_choice={**allowed, "mode": "required"}, **asked)


async def test_a_regular_expression_guides_a_custom_tool(client: openai.AsyncOpenAI) -> None:
    fmt = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"}
    answer = await client.responses.create(
        input="Hello",
        tools=[{**CUSTOM, "format": fmt}],  # type: ignore[typeddict-item]
        tool_choice={"type": "custom", "name": "patch"},
        **{**GREEDY, "max_output_tokens": 200},
    )
    (item,) = answer.output
    assert item.type == "custom_tool_call"
    assert item.input.isdigit()
    assert len(item.input) == 3


async def test_a_response_is_continued_after_a_restart_and_by_another_instance(
    start: Any, chat_parts: Any, tmp_path: Path
) -> None:
    parts, address = chat_parts("hermes"), str(tmp_path)
    items: list[Any] = []
    previous: str | None = None
    for turn in range(4):
        items.append({"role": "user", "content": f"Turn {turn}"})
        # A server of its own for each turn
        async with start(parts=parts, responses_store=address) as server, client_of(server) as client:
            asked: dict[str, Any] = {**GREEDY, "previous_response_id": previous}
            answer = await client.responses.create(input=f"Turn {turn}", **asked)
            whole = await client.responses.create(input=items, store=False, **GREEDY)
            assert answer.output_text == whole.output_text
            metrics = await server.get("/metrics")
            assert "teneral_responses_writes_total 1.0" in metrics.body.decode()
            async with client_of(server, "two") as other:
                with pytest.raises(openai.NotFoundError):
                    await other.responses.retrieve(answer.id)
        items += answer.output
        previous = answer.id
    assert len(list(tmp_path.glob("*/resp_*.json.gz"))) == 4


async def test_a_store_that_fails_loses_no_answer(start: Any, chat_parts: Any, tmp_path: Path) -> None:
    folder = tmp_path / "responses"
    async with (
        start(parts=chat_parts("hermes"), responses_store=str(folder)) as server,
        client_of(server) as client,
    ):
        await client.responses.create(input="Hello", **GREEDY)
        shutil.rmtree(folder)
        folder.write_text("in the way")
        answer = await client.responses.create(input="Hello", **GREEDY)
        assert answer.output_text
        events = [event async for event in await client.responses.create(input="Hi", stream=True, **GREEDY)]
        for each in (answer, events[-1].response):
            assert each.store is False
            assert "not stored" in each.teneral["warnings"][0]
        folder.unlink()
