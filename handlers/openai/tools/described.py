"""Conversations with tools for chat templates that know none: functions in the system message, calls and results as
text, in the generic JSON format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_BEFORE = "You can call these functions:\n\n"
_AFTER = (
    '\n\nTo call one, answer with nothing but a JSON object: {"name": its name, "arguments": its arguments}. For '
    "several calls give one object a line. You get the results, and answer then."
)

Message = Mapping[str, Any]


def described(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The conversation without roles and fields for tools. `tools` are those that the answer may call."""
    plain: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        if calls := message.get("tool_calls"):
            names |= {call.get("id", ""): call["function"]["name"] for call in calls}
            plain.append({"role": "assistant", "content": _with_calls(message["content"], calls)})
        elif message["role"] == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id", ""), "the function")
            result = f"Result of {name}: {message['content']}"
            if plain and plain[-1].get("is_result"):
                plain[-1]["content"] += f"\n{result}"
            else:
                plain.append({"role": "user", "content": result, "is_result": True})
        else:
            plain.append(dict(message))
    for message in plain:
        message.pop("is_result", None)
    return _with_functions(plain, tools) if tools else plain


def _with_calls(content: str, calls: Sequence[Mapping[str, Any]]) -> str:
    lines = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    return "\n".join([content, *lines] if content else lines)


def _with_functions(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(tool.get("function"), ensure_ascii=False) for tool in tools)
    text = f"{_BEFORE}{lines}{_AFTER}"
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
