"""A request's messages as chat templates want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...runtime.errors import RequestError
from ..http.json_bodies import check_shape
from .schemas import Message, ToolCall

# Of tool calls that the conversation has. They are JSON in a text of the body, so its own bounds do not count them.
MAX_ARGUMENTS_CHARS = 1 << 20  # of all calls of a request
MAX_ARGUMENT_ITEMS = 1 << 16  # values in one call's


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """All of them. Raises `RequestError` naming the first that cannot be given to a template."""
    if not messages:
        raise RequestError("messages is empty", param="messages")
    calls = [call for message in messages for call in message.tool_calls or []]
    if sum(len(call.function.arguments) for call in calls) > MAX_ARGUMENTS_CHARS:
        raise RequestError(
            f"the arguments of all tool calls together may have {MAX_ARGUMENTS_CHARS} characters",
            param="messages",
        )
    return [template_message(message, index) for index, message in enumerate(messages)]


def template_message(message: Message, index: int) -> dict[str, Any]:
    """A message as chat templates want it: text for content, objects for the arguments of tool calls."""
    where = f"messages[{index}]"
    content = _text_content(message, where)
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    # Templates know the older name of the developer's role.
    result: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content or "",
    }
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning_content or message.reasoning:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{number}]")
            for number, call in enumerate(message.tool_calls)
        ]
    return result


def with_ids(messages: Sequence[dict[str, Any]], change: Callable[[str], str]) -> list[dict[str, Any]]:
    """The messages, with the ids of calls as a family's template takes them."""
    changed = []
    for message in messages:
        result = dict(message)
        if "tool_call_id" in message:
            result["tool_call_id"] = change(message["tool_call_id"])
        if "tool_calls" in message:
            result["tool_calls"] = [
                {**call, "id": change(call["id"])} if "id" in call else call for call in message["tool_calls"]
            ]
        changed.append(result)
    return changed


def _text_content(message: Message, where: str) -> str | None:
    """The message's text; several parts are joined by line breaks."""
    if message.content is None or isinstance(message.content, str):
        return message.content
    texts = []
    for number, part in enumerate(message.content):
        param = f"{where}.content[{number}]"
        if part.type != "text":
            raise RequestError(
                f"{param} is of type {part.type[:50]!r}; this model takes text only", param=param
            )
        if part.text is None:
            raise RequestError(f"{param}.text is missing", param=f"{param}.text")
        texts.append(part.text)
    return "\n".join(texts)


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    param = f"{where}.function.arguments"
    data = (call.function.arguments or "{}").encode()
    try:
        check_shape(data, max_items=MAX_ARGUMENT_ITEMS)
        arguments = msgspec.json.decode(data, type=dict[str, Any])
    except RequestError as error:
        raise RequestError(f"{param} is refused: {error.message}", param=param) from None
    except msgspec.DecodeError as error:
        raise RequestError(f"{param} is not a JSON object: {error}", param=param) from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id is not None else {})
