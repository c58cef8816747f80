"""Custom tools, whose input is a text: functions of one text for the model, and for the client calls of their own
shape, in chats and in responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from ....runtime.errors import RequestError
from ..deltas import Delta, ToolCallDelta

CUSTOM_INPUT = "input"  # the argument of such a function
Json = dict[str, Any]


def custom_function(tool: Mapping[str, Any], where: str, warnings: list[str]) -> Json:
    """The function for a tool with a name, a description and a format: none, or a grammar. A regular expression guides
    the input; a grammar in Lark's notation is given to the model, and a warning says so. Raises `RequestError`.
    """
    text: Json = {"type": "string"}
    description = str(tool.get("description") or "")
    fmt = tool.get("format")
    is_regex = False
    if isinstance(fmt, dict) and fmt.get("type") == "grammar":
        definition, syntax = fmt.get("definition"), fmt.get("syntax")
        if not isinstance(definition, str) or syntax not in ("lark", "regex"):
            param = f"{where}.format"
            raise RequestError(f"{param} needs syntax 'lark' or 'regex' and a definition", param=param)
        is_regex = syntax == "regex"
        if is_regex:
            text["pattern"] = f"^(?:{definition})$"
        else:
            description += f"\n\nIts input follows this grammar (Lark):\n{definition}"
            warnings.append(f"{where}.format is given to the model, and does not guide it")
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    return {
        "name": tool.get("name"),
        "description": description,
        "parameters": parameters,
        **({"strict": True} if is_regex else {}),
    }


def functions_for(tools: Sequence[Json], warnings: list[str]) -> tuple[list[Json], frozenset[str]]:
    """The tools of a chat with functions in place of custom tools, and the names of those. Raises `RequestError`."""
    functions: list[Json] = []
    names: set[str] = set()
    for number, tool in enumerate(tools):
        if tool.get("type") != "custom":
            functions.append(tool)
            continue
        where = f"tools[{number}].custom"
        custom = tool.get("custom")
        if not isinstance(custom, dict) or not isinstance(custom.get("name"), str):
            raise RequestError(f"{where}.name is missing", param=f"{where}.name")
        fmt = custom.get("format")
        if isinstance(fmt, dict) and isinstance(fmt.get("grammar"), dict):
            fmt = {**fmt, **fmt["grammar"]}
        function = custom_function({**custom, "format": fmt}, where, warnings)
        functions.append({"type": "function", "function": function})
        names.add(custom["name"])
    return functions, frozenset(names)


def custom_input(arguments: str) -> str:
    """The text in a custom tool's arguments; these themselves, where they are no JSON."""
    try:
        text = msgspec.json.decode(arguments, type=Json).get(CUSTOM_INPUT)
    except msgspec.DecodeError:
        return arguments
    return text if isinstance(text, str) else arguments


class CustomCalls:
    """The deltas of one choice, with the input of custom tools, whole, in place of arguments."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._index = 0  # of the open call
        self._pieces: list[str] | None = None  # of the open call, if that is one

    def shown(self, deltas: Sequence[Delta]) -> list[Delta]:
        result: list[Delta] = []
        for delta in deltas:
            is_more = isinstance(delta, ToolCallDelta) and not delta.id
            if self._pieces is not None and not is_more:
                result.append(ToolCallDelta(self._index, custom_input("".join(self._pieces)), is_custom=True))
                self._pieces = None
            if isinstance(delta, ToolCallDelta) and delta.name in self._names:
                self._index, self._pieces = delta.index, []
                result.append(replace(delta, arguments="", is_custom=True))
            if isinstance(delta, ToolCallDelta) and self._pieces is not None:
                self._pieces.append(delta.arguments)
            else:
                result.append(delta)
        return result
