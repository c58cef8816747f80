"""Bodies of /v1/messages, and the chat that each comes to.

Each field of /v1/messages and its effect; docs/openai.md has the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ...runtime.errors import RequestError
from ..http.json_bodies import encode
from ..openai.fields import Effect, Fields, refuse_unsupported
from ..openai.schemas import (
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

_YES, _NO, _IDLE = Effect.HONOURED, Effect.REFUSED, Effect.WITHOUT_EFFECT

_PROMPT: Fields = {
    "model": (_YES, "the served model's name"),
    "messages": (
        _YES,
        "`text`, `tool_use`, `tool_result` and `thinking` blocks; a last assistant's is gone on from",
    ),
    "system": (_YES, "a text, or blocks of text"),
    "tools": (_YES, "functions; others are refused"),
    "tool_choice": (_YES, "`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`"),
    "thinking": (_YES, "where the model's template has `enable_thinking`; `budget_tokens` is without effect"),
    "output_config": (_YES, "`format`: `json_schema`; `effort` where the model's template takes it"),
    "cache_control": (_IDLE, "prompts are found by their content, here and in blocks"),
    "speed": (_NO, "there is one speed"),
    "user_profile_id": (_NO, "there are no profiles"),
    "workspace_id": (_NO, "there are no workspaces"),
}

MESSAGES: Fields = {
    **_PROMPT,
    "max_tokens": (_YES, ""),
    "stop_sequences": (_YES, ""),
    "stream": (_YES, ""),
    "temperature": (_YES, ""),
    "top_p": (_YES, ""),
    "top_k": (_YES, ""),
    "teneral": (_YES, "`first_token`, `cache_salt`, `session`, `tenant`, `priority`"),
    "metadata": (_IDLE, "no users are distinguished by it: `teneral.tenant` does"),
    "service_tier": (_IDLE, "there is one tier; `teneral.priority` is ours"),
    "container": (_NO, "nothing is stored"),
    "context_management": (_NO, "the context is the client's to shorten"),
    "diagnostics": (_NO, "there are none"),
    "inference_geo": (_NO, "this server is where it is"),
    "mcp_servers": (_NO, "this server calls no others"),
}

COUNT_TOKENS: Fields = {**_PROMPT}

ROUTES = {"/v1/messages": MESSAGES, "/v1/messages/count_tokens": COUNT_TOKENS}


# Accepted without effect: there is no text in them.
_IDLE_BLOCKS = frozenset({"redacted_thinking"})


class Block(msgspec.Struct, kw_only=True, frozen=True):
    """Any block of content; `type` says which of the fields count."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None  # without effect: the content says so
    thinking: str | None = None


class Turn(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct, kw_only=True, frozen=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, frozen=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None  # without effect


class OutputFormat(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    type: str
    schema_: dict[str, Any] | None = msgspec.field(name="schema", default=None)


class OutputConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    format: OutputFormat | None = None


class PromptBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The fields that make a prompt."""

    messages: list[Turn]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None  # without effect
    # Refused, unless null
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class CountBody(PromptBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A prompt alone."""


class MessagesBody(PromptBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    teneral: Extras | None = None
    # Without effect on an answer
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    # Refused, unless null
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None


def chat_of(body: PromptBody, fields: Fields) -> ChatBody:
    """The same request as a chat, but for `thinking`. Raises `RequestError` by the names of this route."""
    refuse_unsupported(body, fields)
    messages = _messages(body.messages)
    if body.system is not None:
        messages = [Message(role="system", content=_text(body.system, "system")), *messages]
    parallel: bool | None = None
    if body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use:
        parallel = False
    chat = ChatBody(
        model=body.model,
        messages=messages,
        tools=None if body.tools is None else [_tool(tool, number) for number, tool in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=parallel,
        response_format=_response_format(body.output_config),
        reasoning_effort=None if body.output_config is None else body.output_config.effort,
        continue_final_message=True if body.messages and body.messages[-1].role == "assistant" else None,
    )
    if not isinstance(body, MessagesBody):
        return chat
    return msgspec.structs.replace(
        chat,
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences,
        stream=body.stream,
        # So that the end of a stream is written with the usage.
        stream_options=StreamOptions(include_usage=True) if body.stream else None,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        teneral=body.teneral,
    )


def _messages(turns: Sequence[Turn]) -> list[Message]:
    """Turns of one role that follow one another are one. A tool's results come before what the user says with them."""
    if not turns:
        raise RequestError("messages is empty", param="messages")
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        where = f"messages[{number}].content"
        own = [Message(role=turn.role, content=turn.content)] if isinstance(turn.content, str) else None
        if own is None:
            own = _of_assistant(turn, where) if turn.role == "assistant" else _of_user(turn, where)
        if messages and own and messages[-1].role == own[0].role != "tool":
            messages[-1:] = [_joined(messages[-1], own[0])]
            own = own[1:]
        messages += own
    return messages


def _joined(first: Message, second: Message) -> Message:
    calls = [*(first.tool_calls or []), *(second.tool_calls or [])]
    return msgspec.structs.replace(
        first, content=[*_parts(first), *_parts(second)] or None, tool_calls=calls or None
    )


def _parts(message: Message) -> list[ContentPart]:
    content = message.content
    return [ContentPart("text", content)] if isinstance(content, str) else content or []


def _of_assistant(turn: Turn, where: str) -> list[Message]:
    texts: list[ContentPart] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for number, block in enumerate(turn.content):
        assert isinstance(block, Block)
        place = f"{where}[{number}]"
        match block.type:
            case "text":
                texts.append(ContentPart("text", _given(block.text, f"{place}.text")))
            case "thinking":
                thoughts.append(_given(block.thinking, f"{place}.thinking"))
            case "tool_use":
                if block.id is None or block.name is None:
                    raise RequestError(f"{place} needs id, name and input", param=place)
                function = FunctionCall(name=block.name, arguments=encode(block.input or {}).decode())
                calls.append(ToolCall(id=block.id, function=function))
            case kind if kind not in _IDLE_BLOCKS:
                raise _unsupported(kind, place)
    reasoning = "".join(thoughts) or None
    return [
        Message(
            role="assistant",
            content=texts or ("" if not calls else None),
            tool_calls=calls or None,
            reasoning_content=reasoning,
        )
    ]


def _of_user(turn: Turn, where: str) -> list[Message]:
    texts: list[ContentPart] = []
    results: list[Message] = []
    for number, block in enumerate(turn.content):
        assert isinstance(block, Block)
        place = f"{where}[{number}]"
        match block.type:
            case "text":
                texts.append(ContentPart("text", _given(block.text, f"{place}.text")))
            case "tool_result":
                if block.tool_use_id is None:
                    raise RequestError(f"{place}.tool_use_id is missing", param=f"{place}.tool_use_id")
                content = _text(block.content or "", f"{place}.content")
                results.append(Message(role="tool", content=content, tool_call_id=block.tool_use_id))
            case kind:
                raise _unsupported(kind, place)
    return [*results, Message(role=turn.role, content=texts)] if texts else results


def _text(content: str | list[Block], where: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts = []
    for number, block in enumerate(content):
        if block.type != "text":
            raise _unsupported(block.type, f"{where}[{number}]")
        parts.append(ContentPart("text", _given(block.text, f"{where}[{number}].text")))
    return parts


def _given(text: str | None, param: str) -> str:
    if text is None:
        raise RequestError(f"{param} is missing", param=param)
    return text


def _unsupported(kind: str, param: str) -> RequestError:
    return RequestError(f"{param} is of type {kind[:50]!r}; this model takes text only", param=param)


def _tool(tool: Tool, number: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"tools[{number}] is of type {tool.type[:50]!r}; only functions are supported",
            param=f"tools[{number}].type",
        )
    given = {"description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    function = {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": {"name": tool.name, **function}}


def _tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    names = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type not in names:
        raise RequestError(
            f"tool_choice of type {choice.type[:50]!r} is not supported", param="tool_choice.type"
        )
    return names[choice.type]


def _response_format(config: OutputConfig | None) -> ResponseFormat | None:
    if config is None or config.format is None:
        return None
    if config.format.type != "json_schema" or config.format.schema_ is None:
        raise RequestError(
            "output_config.format must be a json_schema with its schema", param="output_config.format"
        )
    return ResponseFormat("json_schema", JsonSchemaFormat(schema_=config.format.schema_))
