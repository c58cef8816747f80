"""Bodies of /v1/messages, and the chat that each comes to.

Each field of /v1/messages and its effect; docs/openai.md has the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ...runtime.errors import RequestError
from ..function.images import IMAGE_PART
from ..http.json_bodies import encode
from ..openai.fields import CHAT, ROUTER, Effect, Fields, refuse_unsupported
from ..openai.schemas import (
    ChatBody,
    ContentPart,
    Extras,
    FunctionCall,
    JsonSchemaFormat,
    Message,
    PlacedChat,
    PlacedPart,
    ResponseFormat,
    StreamOptions,
    Thinking,
    ToolCall,
)

_YES, _NO, _IDLE = Effect.HONOURED, Effect.REFUSED, Effect.WITHOUT_EFFECT

_PROMPT: Fields = {
    "model": (_YES, "the served model's name"),
    "messages": (
        _YES,
        "`text`, `image`, `tool_use`, `tool_result`, `thinking`, `document` of text and `search_result` blocks; those "
        "of Anthropic's own tools are left out with a warning; a last assistant's is gone on from",
    ),
    "system": (_YES, "a text, or blocks of text"),
    "tools": (
        _YES,
        "functions; others are left out with a warning, or refused where `tool_choice` needs one",
    ),
    "tool_choice": (_YES, "`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`"),
    "thinking": (
        _YES,
        "`enabled`, `adaptive`, `disabled`, where the model reasons and its template can switch it; `budget_tokens`: "
        "the end of the reasoning is forced then; else a warning",
    ),
    "context_management": (
        _YES,
        "`clear_thinking_20251015` and `clear_tool_uses_20250919`; others are left out with a warning",
    ),
    "output_config": (
        _YES,
        "`format`: `json_schema`; `effort` where the model's template takes it, else a warning; `task_budget` is "
        "without effect",
    ),
    "output_format": (_YES, "the older name of `output_config.format`"),
    "reasoning_effort": (_YES, "LiteLLM's name of `output_config.effort`"),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "mcp_servers": (_YES, "left out with a warning: this server calls no others"),
    "cache_control": (_IDLE, "prompts are found by their content, here and in blocks"),
    "betas": (_IDLE, "as the header `anthropic-beta`: what is supported needs none"),
    "litellm_metadata": (_IDLE, "LiteLLM's: nothing is reported"),
    "user": (_IDLE, "no users are distinguished by it: `teneral.tenant` does"),
    "fallbacks": (_IDLE, "OpenRouter's, of a router: `model` is served"),
    **ROUTER,
    "speed": (_NO, "there is one speed, `standard`"),
    "user_profile_id": (_NO, "there are no profiles"),
    "workspace_id": (_NO, "there are no workspaces"),
    **{name: CHAT[name] for name in ("kv_transfer_params", "plugins")},
}

MESSAGES: Fields = {
    **_PROMPT,
    "max_tokens": (_YES, ""),
    "stop_sequences": (_YES, ""),
    "stream": (_YES, ""),
    "temperature": (_YES, ""),
    "top_p": (_YES, ""),
    "top_k": (_YES, ""),
    "session_id": CHAT["session_id"],
    "teneral": (_YES, "`first_token`, `cache_salt`, `session`, `tenant`, `priority`"),
    "metadata": (_IDLE, "no users are distinguished by it: `teneral.tenant` does"),
    "service_tier": (_IDLE, "there is one tier; `teneral.priority` is ours"),
    "container": (_IDLE, "of tools that do not run here"),
    "diagnostics": (_NO, "there are none"),
    "inference_geo": (_NO, "this server is where it is"),
}

COUNT_TOKENS: Fields = {**_PROMPT}

ROUTES = {"/v1/messages": MESSAGES, "/v1/messages/count_tokens": COUNT_TOKENS}


# Accepted without effect: there is no text in them.
_IDLE_BLOCKS = frozenset({"redacted_thinking", "container_upload", "compaction"})
# Of tools that Anthropic runs, in histories.
_SERVER_BLOCKS = frozenset(
    {
        *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
        *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "mcp_tool_use"),
        *("mcp_tool_result", "tool_search_tool_result", "tool_reference"),
    }
)


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
    source: Any = None  # of a document; of a search result, where it was found
    title: str | None = None
    context: str | None = None


class Turn(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "ctx", "msg"]  # the last two are Claude Code's, of users
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


class OutputFormat(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    type: str
    schema_: dict[str, Any] | None = msgspec.field(name="schema", default=None)


class OutputConfig(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: Any = None  # without effect


class Threshold(msgspec.Struct, kw_only=True, frozen=True):
    type: str
    value: int


class ContextEdit(msgspec.Struct, kw_only=True, frozen=True):
    """Any edit; `type` says which of the fields count."""

    type: str
    keep: Threshold | str | None = None
    trigger: Threshold | None = None
    clear_at_least: Threshold | None = None
    clear_tool_inputs: bool | list[str] | None = None
    exclude_tools: list[str] | None = None


class ContextManagement(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    edits: list[ContextEdit] | None = None


class PromptBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The fields that make a prompt."""

    messages: list[Turn]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    mcp_servers: list[Any] | None = None
    # Without effect
    cache_control: Any = None
    betas: Any = None
    litellm_metadata: Any = None
    user: str | None = None
    fallbacks: Any = None
    models: list[str] | None = None
    provider: Any = None
    route: str | None = None
    stop_server_tools_when: Any = None
    trace: Any = None
    # Refused, unless null
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    kv_transfer_params: Any = None
    plugins: Any = None


class CountBody(PromptBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A prompt alone."""


class MessagesBody(PromptBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    session_id: str | None = None
    teneral: Extras | None = None
    # Without effect on an answer
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    container: Any = None
    # Refused, unless null
    diagnostics: Any = None
    inference_geo: Any = None


def chat_of(body: PromptBody, fields: Fields, warnings: list[str]) -> ChatBody:
    """The same request as a chat. Adds warnings of what is left out. Raises `RequestError` by the names of this
    route.
    """
    refuse_unsupported(body, fields)
    messages = _messages(body.messages, warnings)
    if body.mcp_servers:
        warnings.append("mcp_servers are left out: this server calls no others")
    if body.system is not None:
        messages = [Message(role="system", content=_text(body.system, "system")), *messages]
    parallel: bool | None = None
    if body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use:
        parallel = False
    functions = _functions(body.tools or [], body.tool_choice, warnings)
    chat = PlacedChat(
        model=body.model,
        messages=messages,
        tools=None if body.tools is None else list(map(_tool, functions.values())),
        tool_places=list(functions),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=parallel,
        response_format=_response_format(body),
        thinking=body.thinking,
        reasoning_effort=_effort(body),
        chat_template_kwargs=body.chat_template_kwargs,
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
        session_id=body.session_id,
        teneral=body.teneral,
    )


def _effort(body: PromptBody) -> str | None:
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None and body.reasoning_effort not in (None, effort):
        raise RequestError(
            "output_config.effort and reasoning_effort contradict one another", param="output_config.effort"
        )
    return body.reasoning_effort if effort is None else effort


def _messages(turns: Sequence[Turn], warnings: list[str]) -> list[Message]:
    """Turns of one role that follow one another are one. A tool's results come before what the user says with them."""
    if not turns:
        raise RequestError("messages is empty", param="messages")
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        where = f"messages[{number}].content"
        own = [Message(role=_role(turn), content=turn.content)] if isinstance(turn.content, str) else None
        if own is None:
            of_role = _of_assistant if turn.role == "assistant" else _of_user
            own = of_role(turn, where, warnings)
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


def _of_assistant(turn: Turn, where: str, warnings: list[str]) -> list[Message]:
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
            case kind if kind in _SERVER_BLOCKS:
                warnings.append(_left_out(place, kind))
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


def _of_user(turn: Turn, where: str, warnings: list[str]) -> list[Message]:
    texts: list[ContentPart] = []
    results: list[Message] = []
    for number, block in enumerate(turn.content):
        assert isinstance(block, Block)
        place = f"{where}[{number}]"
        match block.type:
            case "tool_result":
                if block.tool_use_id is None:
                    raise RequestError(f"{place}.tool_use_id is missing", param=f"{place}.tool_use_id")
                content = _text(block.content or "", f"{place}.content", warnings)
                results.append(Message(role="tool", content=content, tool_call_id=block.tool_use_id))
            case kind if kind in _SERVER_BLOCKS or kind in _IDLE_BLOCKS:
                warnings.append(_left_out(place, kind))
            case _:
                texts.append(_part(block, place))
    return [*results, Message(role=_role(turn), content=texts)] if texts else results


def _role(turn: Turn) -> Literal["user", "assistant", "system"]:
    match turn.role:
        case "ctx" | "msg":
            return "user"
        case role:
            return role


def _text(
    content: str | list[Block], where: str, warnings: list[str] | None = None
) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts = []
    for number, block in enumerate(content):
        place = f"{where}[{number}]"
        if warnings is not None and block.type in _SERVER_BLOCKS:
            warnings.append(_left_out(place, block.type))
        else:
            parts.append(_part(block, place))
    return parts


def _part(block: Block, place: str) -> ContentPart:
    """An image, or a text."""
    if block.type != "image":
        return ContentPart("text", _block_text(block, place))
    source = block.source if isinstance(block.source, dict) else {}
    url, data, media_type = (source.get(name) for name in ("url", "data", "media_type"))
    if source.get("type") == "base64" and isinstance(data, str) and isinstance(media_type, str):
        return PlacedPart(IMAGE_PART, image_url=f"data:{media_type};base64,{data}", place=place)
    if source.get("type") == "url" and isinstance(url, str):
        return PlacedPart(IMAGE_PART, image_url=url, place=place)
    raise RequestError(f"{place}.source must be base64 with a media_type, or a url", param=f"{place}.source")


def _block_text(block: Block, place: str) -> str:
    """The text of a block of text, of a document that is text, or of a search result."""
    source = block.source
    match block.type:
        case "text":
            return _given(block.text, f"{place}.text")
        case "document" if isinstance(source, dict) and source.get("type") == "text":
            data = source.get("data")
            if not isinstance(data, str):
                raise RequestError(f"{place}.source.data is missing", param=f"{place}.source.data")
            return "\n".join(part for part in (block.title, block.context, data) if part)
        case "search_result":
            found = _text(block.content or [], f"{place}.content")
            texts = [found] if isinstance(found, str) else [part.text or "" for part in found]
            head = [part for part in (block.title, source) if isinstance(part, str)]
            return "\n".join([*head, *texts])
    raise _unsupported(block.type, place)


def _left_out(place: str, kind: str) -> str:
    return f"{place} is left out: this server does not run tools of type {kind[:50]!r}"


def _given(text: str | None, param: str) -> str:
    if text is None:
        raise RequestError(f"{param} is missing", param=param)
    return text


def _unsupported(kind: str, param: str) -> RequestError:
    return RequestError(
        f"{param} is of type {kind[:50]!r}; texts are taken, and images by models that see", param=param
    )


def _functions(tools: Sequence[Tool], choice: ToolChoice | None, warnings: list[str]) -> dict[str, Tool]:
    """The functions by their places; tools that Anthropic knows or runs are left out. Raises `RequestError` where one
    of those must be called.
    """
    functions = {
        f"tools[{number}]": tool for number, tool in enumerate(tools) if tool.type in (None, "custom")
    }
    for number, tool in enumerate(tools):
        if tool.type in (None, "custom"):
            continue
        is_wanted = choice is not None and (
            (choice.type == "any" and not functions) or (choice.type == "tool" and choice.name == tool.name)
        )
        if is_wanted:
            raise RequestError(
                f"tools[{number}] is of type {tool.type[:50]!r}, which is not supported, and tool_choice requires it",
                param=f"tools[{number}].type",
            )
        warnings.append(_left_out(f"tools[{number}]", tool.type))
    return functions


def _tool(tool: Tool) -> dict[str, Any]:
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


def _response_format(body: PromptBody) -> ResponseFormat | None:
    fmt, param = body.output_format, "output_format"
    if body.output_config is not None and body.output_config.format is not None:
        fmt, param = body.output_config.format, "output_config.format"
    if fmt is None:
        return None
    if fmt.type != "json_schema" or fmt.schema_ is None:
        raise RequestError(f"{param} must be a json_schema with its schema", param=param)
    return ResponseFormat("json_schema", JsonSchemaFormat(schema_=fmt.schema_))
