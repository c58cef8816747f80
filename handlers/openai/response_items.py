"""Items of the Responses API: from what a request and its history have to the messages of a chat.

Items of tools that OpenAI runs itself, which other servers' histories may have, are left out with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from ...runtime.errors import RequestError
from ..function.images import IMAGE_PART
from ..http.json_bodies import encode
from .response_store import Json, new_item_id
from .schemas import ContentPart, FunctionCall, Message, PlacedPart, ToolCall, part_text
from .tools.custom import CUSTOM_INPUT

TOOL_SEARCH = "tool_search"  # the name that a client's search of tools has in a chat
# Of text that OpenAI has encrypted. What comes from this server is never encrypted.
_ENCRYPTED = re.compile(r"gAAAAA[\w=-]*")
_SKIPPED = frozenset(
    f"{name}{suffix}"
    for name in (
        *("web_search", "file_search", "code_interpreter", "image_generation", "local_shell", "shell"),
        *("apply_patch", "computer", "mcp", "tool_search"),
    )
    for suffix in ("_call", "_call_output", "_output")
) | {
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "program", "program_output"),
    *("compaction", "compaction_trigger", "context_compaction", "configuration_update"),
}


class InputPart(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Content of a message, of a call's output, or of reasoning, as clients send it or got it."""

    type: str
    text: str | None = None
    refusal: str | None = None  # of an assistant's part of this type
    image_url: str | None = None
    detail: str | None = None  # of an image; without effect
    file_id: str | None = None  # refused: no files are kept here
    encrypted_content: str | None = None  # of a message between agents


class InputItem(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Any item; `type` says which of the fields count. An item that an answer had comes back with all of its fields."""

    type: str | None = None  # None: a message, or a reference if there is an id alone
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None  # of the function or custom tool that was called
    arguments: str | dict[str, Any] | None = None  # an object of a search of tools, else JSON
    execution: str | None = None  # of a search of tools: who runs it
    author: str | None = None  # of a message between agents
    recipient: str | None = None
    input: str | None = None  # of a custom tool's call
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    tools: list[dict[str, Any]] | None = None  # more tools, from this item on

    @property
    def is_reference(self) -> bool:
        is_bare = self.type is None and self.role is None and self.content is None and self.id is not None
        return self.type == "item_reference" or is_bare


class CallableTool(NamedTuple):
    """A function, a custom tool or a client's search of tools, as items name it."""

    name: str
    namespace: str | None = None
    kind: str = "function"  # as `type` of the tool

    @property
    def full_name(self) -> str:
        """Its name in a chat, which has no namespaces."""
        return self.name if self.namespace is None else f"{self.namespace}.{self.name}"


_PREFIXES = {"function_call": "fc", "custom_tool_call": "ctc", "tool_search_call": "tsc", "reasoning": "rs"}


def stored_items(given: str | Sequence[InputItem], entry_id: str) -> list[Json]:
    """The items as they are kept in this entry, and listed: each with an id, content as parts."""
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    return [_stored(item, entry_id) for item in items]


def _stored(item: InputItem, entry_id: str) -> Json:
    stored: Json = msgspec.to_builtins(item)
    kind = item.type or "message"
    stored = {"id": item.id or new_item_id(_PREFIXES.get(kind, "msg"), entry_id), **stored, "type": kind}
    if kind == "message":
        part = "output_text" if item.role == "assistant" else "input_text"
        if isinstance(item.content, str):
            stored["content"] = [{"type": part, "text": item.content}]
        for each in stored.get("content", []):
            if each["type"] == "output_text":
                each.setdefault("annotations", [])
        stored.setdefault("status", "completed")
    return stored


def messages_of(given: Sequence[InputItem], warnings: list[str], *, first: int = 0) -> list[Message]:
    """The messages of a chat. Calls and reasoning belong to the assistant's message before or behind them.

    Adds warnings of what is left out. `first` is the number of items before those of the request, which has named none
    of them. Raises `RequestError`.
    """
    messages: list[Message] = []
    reasoning: str | None = None
    for number, item in enumerate(given, -first):
        where = f"input[{number}]" if number >= 0 else "previous_response_id"
        match item.type:
            case None | "message" | "agent_message":
                message = _message(item, where) if item.type != "agent_message" else _of_agent(item, where)
                if message.role == "assistant" and reasoning is not None:
                    message = msgspec.structs.replace(message, reasoning_content=reasoning)
                reasoning = None
                messages.append(message)
            case kind if kind in ("function_call", "custom_tool_call") or _is_search(item, "call"):
                call = _call(item, where)
                if messages and messages[-1].role == "assistant" and reasoning is None:
                    calls = [*(messages[-1].tool_calls or []), call]
                    messages[-1] = msgspec.structs.replace(messages[-1], tool_calls=calls)
                else:
                    messages.append(Message(role="assistant", tool_calls=[call], reasoning_content=reasoning))
                    reasoning = None
            case "function_call_output" | "custom_tool_call_output":
                if item.output is None or item.call_id is None:
                    raise RequestError(f"{where} needs call_id and output", param=where)
                output = _text(item.output, f"{where}.output")
                messages.append(Message(role="tool", content=output, tool_call_id=item.call_id))
            case _ if _is_search(item, "output"):  # whose tools `tools_of` reads
                found = [name for tool in item.tools or [] for name in _names_of(tool)]
                content = encode({"tools": found}).decode()
                messages.append(Message(role="tool", content=content, tool_call_id=item.call_id))
            case "reasoning":
                parts = _parts(item.content) or item.summary or []
                reasoning = "\n".join(part.text or "" for part in parts) or None
            case "additional_tools":  # which `tools_of` reads
                pass
            case kind if kind in _SKIPPED:
                warnings.append(f"{where} is left out: this server has no use for items of type {kind!r}")
            case kind:
                raise RequestError(f"{where} is of type {kind[:50]!r}, which is not supported", param=where)
    return messages


def _message(item: InputItem, where: str) -> Message:
    if item.role is None:
        raise RequestError(f"{where}.role is missing", param=f"{where}.role")
    if item.content is None:
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    return Message(role=item.role, content=_text(item.content, f"{where}.content"))


def _of_agent(item: InputItem, where: str) -> Message:
    """A message from another agent, as a user's. Raises `RequestError` for what another server has encrypted."""
    if item.author is None or not isinstance(item.content, list):
        raise RequestError(f"{where} needs author and content", param=where)
    parts = [InputPart(type="text", text=f"Message from {item.author}:")]
    for number, part in enumerate(item.content):
        if part.type == "encrypted_content" and part.encrypted_content is not None:
            if _ENCRYPTED.fullmatch(part.encrypted_content):
                param = f"{where}.content[{number}]"
                raise RequestError(f"{param} is encrypted for another server", param=param)
            parts.append(InputPart(type="text", text=part.encrypted_content))
        else:
            parts.append(part)
    text = _text(parts, f"{where}.content", first=1)
    return Message(role="user", content=text)


def _is_search(item: InputItem, end: str) -> bool:
    """True for the call, or the output, of a search of tools that the client runs."""
    return item.type == f"{TOOL_SEARCH}_{end}" and item.execution == "client"


def _names_of(tool: dict[str, Any]) -> list[str]:
    """The names in a chat of a tool, or of those in a namespace."""
    if tool.get("type") != "namespace":
        return [str(tool.get("name"))]
    members = tool.get("tools")
    return [
        f"{tool.get('name')}.{each.get('name')}"
        for each in (members if isinstance(members, list) else [])
        if isinstance(each, dict)
    ]


def _call(item: InputItem, where: str) -> ToolCall:
    arguments, name = item.arguments, item.name
    if item.type == f"{TOOL_SEARCH}_call":
        name = TOOL_SEARCH
        arguments = encode(arguments).decode() if isinstance(arguments, dict) else arguments
    if item.type == "custom_tool_call" and item.input is not None:
        arguments = encode({CUSTOM_INPUT: item.input}).decode()
    if item.call_id is None or name is None or not isinstance(arguments, str):
        text = "input" if item.type == "custom_tool_call" else "arguments"
        raise RequestError(f"{where} needs call_id, name and {text}", param=where)
    name = CallableTool(name, item.namespace).full_name
    return ToolCall(id=item.call_id, function=FunctionCall(name=name, arguments=arguments))


def _parts(content: str | list[InputPart] | None) -> list[InputPart]:
    return [InputPart(type="text", text=content)] if isinstance(content, str) else content or []


def _text(content: str | list[InputPart], where: str, *, first: int = 0) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts: list[ContentPart] = []
    for number, part in enumerate(content, -first):  # `first` parts are ours
        param = f"{where}[{number}]"
        if part.type == "refusal" and part.refusal is not None:
            parts.append(ContentPart("text", part.refusal))
            continue
        if part.type == "input_image" and part.file_id is None:
            parts.append(PlacedPart(IMAGE_PART, image_url=part.image_url, place=param))
            continue
        kinds = ("input_text", "output_text", "text")
        parts.append(ContentPart("text", part_text(part.type, part.text, param, kinds)))
    return parts


def as_item(value: Any) -> InputItem:
    """A stored item as a request has it."""
    return msgspec.convert(value, InputItem)
