"""Bodies of /v1/responses, and the chat that each comes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ...runtime.errors import RequestError
from .fields import RESPONSES, refuse_unsupported
from .response_items import CUSTOM_INPUT, InputItem, messages_of
from .schemas import ChatBody, Extras, JsonSchemaFormat, Message, ResponseFormat, StreamOptions

OWN_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "messages[].content[]": "input",  # whose items have other numbers than the messages made of them
    "messages[].content[].image_url": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "tools[].function.name": "tools[].name",
    "tools[].function.parameters": "tools[].parameters",
    "tools[].function.strict": "tools[].strict",
}
LOGPROBS = "message.output_text.logprobs"
# Of `include`, without effect: reasoning is never encrypted, and these tools do not run.
_IDLE_INCLUDES = frozenset(
    {
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "message.input_image.image_url",
    }
)


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


class ConversationName(msgspec.Struct, kw_only=True, frozen=True):
    id: str


class CountTokensBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The fields of a request that make its prompt."""

    input: str | list[InputItem] | None = None
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    truncation: str | None = None
    personality: str | None = None  # without effect

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation


class ResponsesBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    input: str | list[InputItem] | None = None
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
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    teneral: Extras | None = None
    # Without effect on an answer
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
    client_metadata: Any = None
    context_management: Any = None
    # Refused, unless null
    prompt: Any = None
    access_programs: Any = None
    background_options: Any = None
    image: Any = None
    moderation: Any = None

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation


class ResponseTools(NamedTuple):
    """The tools of a request that can be called, as a chat has them."""

    functions: list[dict[str, Any]] | None
    custom: frozenset[str]  # names of tools whose input is a text
    choice: str | dict[str, Any] | None


def chat_of(
    body: ResponsesBody, history: Sequence[InputItem], tools: ResponseTools, warnings: list[str]
) -> ChatBody:
    """The same request as a chat, behind the items of its history. Adds warnings of what is without effect.

    Raises `RequestError` for what is not supported, by the names of this route.
    """
    given = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input or []
    messages = messages_of([*history, *given], warnings, first=len(history))
    if not messages:
        raise RequestError("input is empty", param="input")
    if body.instructions is not None:
        messages = [Message(role="system", content=body.instructions), *messages]
    logprobs = _wants_logprobs(body)
    reasoning = body.reasoning or Reasoning()
    if reasoning.summary or reasoning.generate_summary:
        warnings.append("reasoning.summary is without effect: reasoning is given as it is")
    return ChatBody(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=logprobs or None,
        top_logprobs=body.top_logprobs if logprobs else None,
        tools=tools.functions,
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.text),
        verbosity=None if body.text is None else body.text.verbosity,
        reasoning_effort=reasoning.effort,
        stream=body.stream,
        # So that the end of a stream is written with the usage.
        stream_options=StreamOptions(include_usage=True) if body.stream else None,
        teneral=body.teneral,
    )


def check_fields(body: ResponsesBody) -> None:
    """Raise `RequestError` for fields that are not supported, or contradict one another."""
    refuse_unsupported(body, RESPONSES)
    if body.truncation not in (None, "auto", "disabled"):
        raise RequestError("truncation must be 'auto' or 'disabled'", param="truncation")
    if body.background and body.store is False:
        raise RequestError("background needs store: the answer is found by its id", param="background")
    if body.previous_response_id is not None and body.conversation is not None:
        raise RequestError(
            "previous_response_id and conversation contradict one another", param="previous_response_id"
        )


def _wants_logprobs(body: ResponsesBody) -> bool:
    for number, name in enumerate(body.include or []):
        if name != LOGPROBS and name not in _IDLE_INCLUDES:
            raise RequestError(f"include {name[:100]!r} is not supported", param=f"include[{number}]")
    return LOGPROBS in (body.include or []) or bool(body.top_logprobs)


def tools_of(body: ResponsesBody, warnings: list[str]) -> ResponseTools:
    """The functions and custom tools; others are left out with a warning. Raises `RequestError` where one of those
    must be called.
    """
    functions: list[dict[str, Any]] = []
    custom: set[str] = set()
    skipped: list[int] = []
    for number, tool in enumerate(body.tools or []):
        match tool.get("type"):
            case "function":
                names = ("name", "description", "parameters", "strict")
                functions.append({name: tool[name] for name in names if tool.get(name) is not None})
            case "custom":
                functions.append(_custom(tool, number, warnings))
                custom.add(str(tool.get("name")))
            case kind:
                skipped.append(number)
                warnings.append(
                    f"tools[{number}] is left out: this server does not run tools of type {str(kind)[:50]!r}"
                )
    choice = _tool_choice(body.tool_choice)
    if choice == "required" and skipped and not functions:
        number = skipped[0]
        kind = str((body.tools or [])[number].get("type"))[:50]
        raise RequestError(
            f"tools[{number}] is of type {kind!r}, which this server does not run, and tool_choice requires a call",
            param=f"tools[{number}].type",
        )
    nested = None if body.tools is None else [{"type": "function", "function": each} for each in functions]
    return ResponseTools(nested, frozenset(custom), choice)


def _custom(tool: dict[str, Any], number: int, warnings: list[str]) -> dict[str, Any]:
    """A tool whose input is a text, as a function of one argument. A regular expression guides it."""
    text: dict[str, Any] = {"type": "string"}
    description = str(tool.get("description") or "")
    fmt = tool.get("format")
    is_regex = False
    if isinstance(fmt, dict) and fmt.get("type") == "grammar":
        definition, syntax = fmt.get("definition"), fmt.get("syntax")
        if not isinstance(definition, str) or syntax not in ("lark", "regex"):
            param = f"tools[{number}].format"
            raise RequestError(f"{param} needs syntax 'lark' or 'regex' and a definition", param=param)
        is_regex = syntax == "regex"
        if is_regex:
            text["pattern"] = f"^(?:{definition})$"
        else:
            description += f"\n\nIts input follows this grammar (Lark):\n{definition}"
            warnings.append(f"tools[{number}].format is given to the model, and does not guide it")
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


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    match choice.get("type"):
        case "function" | "custom":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case "allowed_tools":
            return choice
        case kind:
            raise RequestError(
                f"tool_choice of type {str(kind)[:50]!r} is not supported: this server does not run such tools",
                param="tool_choice.type",
            )


def _response_format(text: TextConfig | None) -> ResponseFormat | None:
    fmt = None if text is None else text.format
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
