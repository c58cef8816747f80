"""Bodies of /v1/responses, and the chat that each comes to.

Nothing is stored: a request brings its whole conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ...runtime.errors import RequestError
from .fields import RESPONSES, refuse_unsupported
from .schemas import (
    ChatBody,
    ContentPart,
    Extras,
    FunctionCall,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    StreamOptions,
    ToolCall,
)

LOGPROBS = "message.output_text.logprobs"
# Of `include`, without effect: reasoning is never encrypted.
_IDLE_INCLUDES = frozenset({"reasoning.encrypted_content"})


class InputPart(msgspec.Struct, kw_only=True, frozen=True):
    """Content of a message, of a call's output, or of reasoning, as clients send it or got it."""

    type: str
    text: str | None = None
    refusal: str | None = None  # of an assistant's part of this type


class InputItem(msgspec.Struct, kw_only=True, frozen=True):
    """Any item; `type` says which of the fields count. An item that an answer had comes back with all of its fields."""

    type: str | None = None  # None: a message
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class TextFormat(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    schema_: dict[str, Any] | None = msgspec.field(name="schema", default=None)
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, kw_only=True, frozen=True):
    effort: str | None = None
    summary: str | None = None  # without effect: reasoning is given whole
    generate_summary: str | None = None


class ResponsesBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    teneral: Extras | None = None
    # Without effect on an answer
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
    # Refused, unless null
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    access_programs: Any = None
    background_options: Any = None
    context_management: Any = None
    image: Any = None
    moderation: Any = None


def chat_of(body: ResponsesBody) -> ChatBody:
    """The same request as a chat. Raises `RequestError` for what is not supported, by the names of this route."""
    refuse_unsupported(body, RESPONSES)
    for name, wanted in (("store", False), ("background", False), ("truncation", "disabled")):
        if getattr(body, name) not in (None, wanted):
            raise RequestError(
                f"{name} other than {msgspec.json.encode(wanted).decode()} is not supported: this server stores "
                "nothing, and answers in the request",
                param=name,
            )
    messages = _messages(body.input)
    if body.instructions is not None:
        messages = [Message(role="system", content=body.instructions), *messages]
    logprobs = _wants_logprobs(body)
    return ChatBody(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=logprobs or None,
        top_logprobs=body.top_logprobs if logprobs else None,
        tools=None if body.tools is None else [_tool(tool, number) for number, tool in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.text),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        stream=body.stream,
        # So that the end of a stream is written with the usage.
        stream_options=StreamOptions(include_usage=True) if body.stream else None,
        teneral=body.teneral,
    )


def _wants_logprobs(body: ResponsesBody) -> bool:
    for number, name in enumerate(body.include or []):
        if name != LOGPROBS and name not in _IDLE_INCLUDES:
            raise RequestError(f"include {name[:100]!r} is not supported", param=f"include[{number}]")
    return LOGPROBS in (body.include or []) or bool(body.top_logprobs)


def _messages(given: str | Sequence[InputItem]) -> list[Message]:
    """Calls and reasoning belong to the assistant's message before or behind them."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    if not given:
        raise RequestError("input is empty", param="input")
    messages: list[Message] = []
    reasoning: str | None = None
    for number, item in enumerate(given):
        where = f"input[{number}]"
        match item.type:
            case None | "message":
                message = _message(item, where)
                if message.role == "assistant" and reasoning is not None:
                    message = msgspec.structs.replace(message, reasoning_content=reasoning)
                reasoning = None
                messages.append(message)
            case "function_call":
                call = _call(item, where)
                if messages and messages[-1].role == "assistant" and reasoning is None:
                    calls = [*(messages[-1].tool_calls or []), call]
                    messages[-1] = msgspec.structs.replace(messages[-1], tool_calls=calls)
                else:
                    messages.append(Message(role="assistant", tool_calls=[call], reasoning_content=reasoning))
                    reasoning = None
            case "function_call_output":
                if item.output is None or item.call_id is None:
                    raise RequestError(f"{where} needs call_id and output", param=where)
                output = _text(item.output, f"{where}.output")
                messages.append(Message(role="tool", content=output, tool_call_id=item.call_id))
            case "reasoning":
                reasoning = "\n".join(part.text or "" for part in _parts(item.content)) or None
            case kind:
                raise RequestError(f"{where} is of type {kind[:50]!r}, which is not supported", param=where)
    return messages


def _message(item: InputItem, where: str) -> Message:
    if item.role is None:
        raise RequestError(f"{where}.role is missing", param=f"{where}.role")
    if item.content is None:
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    return Message(role=item.role, content=_text(item.content, f"{where}.content"))


def _call(item: InputItem, where: str) -> ToolCall:
    if item.call_id is None or item.name is None or item.arguments is None:
        raise RequestError(f"{where} needs call_id, name and arguments", param=where)
    return ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))


def _parts(content: str | list[InputPart] | None) -> list[InputPart]:
    return [InputPart(type="text", text=content)] if isinstance(content, str) else content or []


def _text(content: str | list[InputPart], where: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts = []
    for number, part in enumerate(content):
        param = f"{where}[{number}]"
        if part.type == "refusal" and part.refusal is not None:
            parts.append(ContentPart("text", part.refusal))
            continue
        if part.type not in ("input_text", "output_text", "text"):
            raise RequestError(
                f"{param} is of type {part.type[:50]!r}; this model takes text only", param=param
            )
        if part.text is None:
            raise RequestError(f"{param}.text is missing", param=f"{param}.text")
        parts.append(ContentPart("text", part.text))
    return parts


def _tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    """A function as chats have it, one level deeper. Other kinds are refused here, by their place."""
    kind = tool.get("type")
    if kind != "function":
        raise RequestError(
            f"tools[{number}] is of type {str(kind)[:50]!r}; only functions are supported",
            param=f"tools[{number}].type",
        )
    names = ("name", "description", "parameters", "strict")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        if isinstance(choice, dict):
            kind = str(choice.get("type"))[:50]
            raise RequestError(f"tool_choice of type {kind!r} is not supported", param="tool_choice.type")
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(text: TextConfig | None) -> ResponseFormat | None:
    if text is None:
        return None
    if text.verbosity is not None:
        raise RequestError(
            "text.verbosity is not supported: say in a message how long the answer should be",
            param="text.verbosity",
        )
    fmt = text.format
    if fmt is None:
        return None
    if fmt.type not in ("text", "json_object", "json_schema"):
        raise RequestError(
            f"text.format of type {fmt.type[:50]!r} is not supported", param="text.format.type"
        )
    if fmt.type != "json_schema":
        return ResponseFormat(fmt.type)
    if fmt.schema_ is None:
        raise RequestError("text.format.schema is missing", param="text.format.schema")
    return ResponseFormat("json_schema", JsonSchemaFormat(schema_=fmt.schema_, name=fmt.name))
