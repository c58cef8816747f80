"""Anthropic's own client against a server: ANTHROPIC_PYTHON anthropic_calls.py URL MODEL KEY. Fails by an assertion.

The server's model answers with one call of `weather` to each request that offers it, and with text else.
"""

from __future__ import annotations

import sys

import anthropic

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def main(url: str, model: str, key: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, _strict_response_validation=True)
    greedy = {"temperature": 0}  # which newer clients have no argument for
    asked = {"model": model, "max_tokens": 8, "messages": HELLO, "system": "Be brief.", "extra_body": greedy}

    whole = client.messages.create(**asked)
    assert whole.role == "assistant"
    assert whole.stop_reason in ("max_tokens", "end_turn"), whole
    assert whole.usage.output_tokens <= 8

    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert final.stop_reason == whole.stop_reason
    read = final.usage.cache_read_input_tokens or 0
    before = whole.usage.cache_read_input_tokens or 0
    assert final.usage.input_tokens + read == whole.usage.input_tokens + before

    counted = client.messages.count_tokens(model=model, messages=HELLO, system="Be brief.")
    assert counted.input_tokens == whole.usage.input_tokens + before

    required = {"type": "any", "disable_parallel_tool_use": True}
    offered = {"model": model, "max_tokens": 300, "messages": HELLO, "tools": [TOOL], "tool_choice": required}
    call = client.messages.create(**offered)
    assert call.stop_reason == "tool_use", call
    block = call.content[-1]
    assert (block.type, block.name) == ("tool_use", "weather")
    assert isinstance(block.input["city"], str)
    with client.messages.stream(**offered) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert "input_json" in kinds, kinds
    assert isinstance(final.content[-1].input["city"], str)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    after = client.messages.create(
        model=model,
        max_tokens=4,
        tools=[TOOL],
        tool_choice={"type": "none"},
        messages=[
            *HELLO,
            {"role": "assistant", "content": call.content},
            {"role": "user", "content": [result]},
        ],
    )
    assert after.content[0].type == "text"

    schema = {"type": "object", "properties": {"kind": {"enum": ["cat"]}}, "required": ["kind"]}
    fmt = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    answer = client.messages.create(**{**asked, "max_tokens": 100}, output_config={"format": fmt})
    assert answer.content[0].text == '{"kind":"cat"}', answer

    # As a coding agent asks, of a model that has no use for all of it.
    agent = client.beta.messages.create(
        **asked,
        betas=["context-management-2025-06-27"],
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        output_config={"effort": "high"},
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
    )
    assert agent.context_management.applied_edits == []
    assert len(agent.teneral["warnings"]) == 3, agent
    with client.beta.messages.stream(**asked, context_management={"edits": []}) as stream:
        assert stream.get_final_message().context_management.applied_edits == []
    managed = client.beta.messages.count_tokens(
        model=model, messages=HELLO, context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}
    )
    assert managed.context_management.original_input_tokens == managed.input_tokens

    for wrong, kind in (
        ({"model": "another"}, anthropic.NotFoundError),
        ({"max_tokens": -1}, anthropic.BadRequestError),
        ({"extra_body": {"no_such_field": 1}}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**{**asked, **wrong})
        except kind as error:
            shape = error.body["type"]
        else:
            raise AssertionError(f"{wrong} was not refused")
        assert shape == "error"
    stranger = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
    try:
        stranger.messages.create(**asked)
    except anthropic.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was let in")
    print(
        f"anthropic {anthropic.__version__}: answers, streams, counts, tools, schemas and errors are understood"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
