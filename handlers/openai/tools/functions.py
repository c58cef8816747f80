"""The functions that a request offers, the schemas of their arguments, and whether the answer may,
must or must not call them.

Chat templates that know no tools get the functions in the system message, and calls and results as
text, in the generic JSON format.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ....runtime.errors import RequestError

if TYPE_CHECKING:
    from ....runtime.grammar.spec import GrammarSpec

MAX_FUNCTIONS = 256
MAX_CALLS = 16  # in an answer that a grammar guides
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_KINDS = ("function", "custom")  # of tools
_BEFORE = "You can call these functions:\n\n"
_AFTER = (
    '\n\nTo call one, answer with nothing but a JSON object: {"name": its name, "arguments": its arguments}. For '
    "several calls give one object a line. You get the results, and answer then."
)

Message = Mapping[str, Any]


class ToolMode(enum.Enum):
    NONE = enum.auto()
    AUTO = enum.auto()  # text or calls
    REQUIRED = enum.auto()  # calls, one at least


class Function(Struct, frozen=True):
    name: str
    parameters: Mapping[str, Any]  # the schema as the request has it
    is_strict: bool
    param: str  # the field that has the schema

    def arguments(self) -> GrammarSpec:
        """The schema of the arguments in a guided call. Raises `RequestError` for one that is not supported."""
        from ....runtime.grammar.spec import GrammarSpec  # of few requests

        return GrammarSpec.json_schema({**self.parameters, "type": "object"}, param=self.param)


class ToolPlan(Struct, frozen=True):
    """The calls that an answer may have."""

    mode: ToolMode = ToolMode.NONE
    functions: tuple[Function, ...] = ()  # those that may be called
    max_calls: int | None = None
    tools: Sequence[Mapping[str, Any]] | None = None  # for the chat template

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    @property
    def parameters(self) -> dict[str, Mapping[str, Any]]:
        """The functions' parameters by name."""
        return {function.name: function.parameters for function in self.functions}

    @property
    def is_strict(self) -> bool:
        return any(function.is_strict for function in self.functions)


def tool_plan(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
    places: Sequence[str] | None = None,
) -> ToolPlan:
    """From `tools`, `tool_choice` and `parallel_tool_calls` of a request, and the fields of its tools, where these are
    not all of its list. Raises `RequestError`.
    """
    functions = _functions(tools or [], places)
    mode, names = _choice(choice, frozenset(functions), has_tools=bool(tools))
    if mode is ToolMode.NONE:
        return ToolPlan()
    max_calls = (
        1 if parallel is False or (isinstance(choice, Mapping) and choice.get("type") in _KINDS) else None
    )
    chosen = tuple(function for name, function in functions.items() if name in names)
    from ....runtime.grammar.spec import SchemaTime

    bound = SchemaTime()
    for function in chosen:
        bound.check()
        if function.is_strict or mode is ToolMode.REQUIRED:
            function.arguments().embedded_schema()  # refused before any work
    return ToolPlan(mode, chosen, max_calls, tools)


def _functions(tools: Sequence[Mapping[str, Any]], places: Sequence[str] | None) -> dict[str, Function]:
    if len(tools) > MAX_FUNCTIONS:
        raise RequestError(f"tools has {len(tools)} entries, but may have {MAX_FUNCTIONS}", param="tools")
    functions: dict[str, Function] = {}
    for number, tool in enumerate(tools):
        where = f"tools[{number}]" if places is None else places[number]
        function = _function(tool, where)
        if function.name in functions:
            raise RequestError(
                f"tools has two functions of the name {function.name!r}", param=f"{where}.function.name"
            )
        functions[function.name] = function
    return functions


def _function(tool: Mapping[str, Any], where: str) -> Function:
    kind = tool.get("type", "function")
    if kind != "function":
        raise RequestError(
            f"{where} is of type {str(kind)[:50]!r}; only functions and custom tools are supported",
            param=f"{where}.type",
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function is missing", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name must be 1 to 128 letters, digits or characters of _.:/- in ASCII",
            param=f"{where}.function.name",
        )
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise RequestError(f"{where}.function.strict must be true or false", param=f"{where}.function.strict")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise RequestError(
            f"{where}.function.parameters must be a JSON schema: an object",
            param=f"{where}.function.parameters",
        )
    return Function(name, parameters, bool(strict), f"{where}.function.parameters")


def _choice(
    choice: str | Mapping[str, Any] | None, names: frozenset[str], *, has_tools: bool
) -> tuple[ToolMode, frozenset[str]]:
    """The mode, and which functions may be called. Raises `RequestError`."""
    if choice is None:
        return (ToolMode.AUTO if has_tools else ToolMode.NONE), names
    if isinstance(choice, str):
        modes = {"none": ToolMode.NONE, "auto": ToolMode.AUTO, "required": ToolMode.REQUIRED}
        if choice not in modes:
            raise RequestError(
                f"tool_choice is {choice[:50]!r}, but must be 'none', 'auto', 'required' or a function",
                param="tool_choice",
            )
        mode = modes[choice]
        if mode is ToolMode.REQUIRED and not has_tools:
            raise RequestError("tool_choice is 'required', but there are no tools", param="tool_choice")
        return (mode if has_tools else ToolMode.NONE), names
    if choice.get("type") in _KINDS:
        return ToolMode.REQUIRED, frozenset((_named(choice, names),))
    if choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools", choice), names)
    raise RequestError(
        f"tool_choice of type {str(choice.get('type'))[:50]!r} is not supported; 'function', 'custom' and "
        "'allowed_tools' are",
        param="tool_choice.type",
    )


def _allowed(allowed: Any, names: frozenset[str]) -> tuple[ToolMode, frozenset[str]]:
    tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tool_choice.allowed_tools.tools must be a list of functions", param="tool_choice")
    modes = {"auto": ToolMode.AUTO, "required": ToolMode.REQUIRED}
    if allowed.get("mode") not in modes:
        raise RequestError("tool_choice.allowed_tools.mode must be 'auto' or 'required'", param="tool_choice")
    return modes[allowed["mode"]], frozenset(_named(tool, names) for tool in tools)


def _named(choice: Mapping[str, Any], names: frozenset[str]) -> str:
    function = choice.get(choice.get("type", "function"))
    name = function.get("name") if isinstance(function, Mapping) else choice.get("name")
    if not isinstance(name, str) or name not in names:
        raise RequestError(
            f"tool_choice names the function {str(name)[:128]!r}, which tools does not have",
            param="tool_choice",
        )
    return name


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
            parts = message.get("parts", [])  # images among them stay with the message
            if plain and plain[-1].get("is_result"):
                plain[-1]["content"] += f"\n{result}"
                plain[-1]["parts"] += parts
            else:
                plain.append({"role": "user", "content": result, "parts": [*parts], "is_result": True})
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


class Property(Struct, frozen=True):
    """One argument of a function."""

    name: str
    schema: Mapping[str, Any]  # with the definitions that it refers to
    is_required: bool


def properties_of(arguments: GrammarSpec) -> list[Property] | None:
    """The arguments that an object of this schema may have; None: any.

    Raises `RequestError` for a schema that is more than a list of properties.
    """
    schema = json.loads(arguments.text)
    shared = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
    if others := schema.keys() - {"type", "properties", "required", "additionalProperties"}:
        raise RequestError(
            f"{arguments.param} has {min(others)}; this model's calls name each argument, so they can be guided by a "
            "list of properties only",
            param=arguments.param,
            hint="Use tool_choice 'auto' without strict, or serve with --tool-parser json.",
        )
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not properties and not required and schema.get("additionalProperties") is not False:
        return None
    named = {**properties, **{name: True for name in required if name not in properties}}
    return [
        Property(name, {**shared, **(each if isinstance(each, dict) else {})}, name in required)
        for name, each in named.items()
        if each is not False
    ]
