"""Bodies of /v1/responses, and the chat that each comes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ...runtime.errors import RequestError
from .fields import RESPONSES, SHARED_GENERATION, refuse_unsupported
from .response_items import TOOL_SEARCH, CallableTool, InputItem, messages_of
from .schemas import (
    ChatBody,
    Extras,
    JsonSchemaFormat,
    Message,
    PlacedChat,
    ReasoningOptions,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
)
from .tools.custom import custom_function

OWN_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "tools[].function.name": "tools[].name",
    "tools[].function.parameters": "tools[].parameters",
    "tools[].function.strict": "tools[].strict",
}
_AS_IN_CHATS = (*SHARED_GENERATION, "chat_template_kwargs", "enable_thinking", "modalities")
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
    max_tokens: int | None = None  # OpenRouter's
    enabled: bool | None = None  # OpenRouter's


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
    # Of other servers' APIs, as chats have them
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    priority: int | None = None
    session_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    modalities: list[str] | None = None
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
    request_id: str | None = None
    models: list[str] | None = None
    provider: Any = None
    route: str | None = None
    stop_server_tools_when: Any = None
    trace: Any = None
    # Refused, unless null
    prompt: Any = None
    access_programs: Any = None
    background_options: Any = None
    image: Any = None
    moderation: Any = None
    multi_agent: Any = None
    enable_response_messages: Any = None
    previous_input_messages: Any = None
    previous_response: Any = None
    mm_processor_kwargs: Any = None
    vllm_xargs: Any = None
    image_config: Any = None
    plugins: Any = None
    transforms: Any = None

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation


class ResponseTools(NamedTuple):
    """The tools of a request that can be called, as a chat has them."""

    functions: list[dict[str, Any]] | None
    places: list[str]  # of those, in the request
    callable: Mapping[str, CallableTool]  # by their names in a chat
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
    return PlacedChat(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=logprobs or None,
        top_logprobs=body.top_logprobs if logprobs else None,
        tools=tools.functions,
        tool_places=tools.places,
        tool_choice=tools.choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body.text),
        verbosity=None if body.text is None else body.text.verbosity,
        reasoning_effort=reasoning.effort,
        reasoning=ReasoningOptions(max_tokens=reasoning.max_tokens, enabled=reasoning.enabled),
        stream=body.stream,
        # So that the end of a stream is written with the usage.
        stream_options=StreamOptions(include_usage=True) if body.stream else None,
        teneral=body.teneral,
        **{name: getattr(body, name) for name in _AS_IN_CHATS},
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


def tools_of(body: ResponsesBody, history: Sequence[InputItem], warnings: list[str]) -> ResponseTools:
    """The functions and custom tools, also those of items; others are left out with a warning. Raises `RequestError`
    where one of those must be called.
    """
    given = body.input if isinstance(body.input, list) else []
    lists = [("tools", body.tools)]
    lists += [("previous_response_id", item.tools) for item in history]
    lists += [(f"input[{number}].tools", item.tools) for number, item in enumerate(given)]
    # Those by their names in a chat, with their places; a second one of `tools` by its place
    functions: dict[str, tuple[str, dict[str, Any]]] = {}
    tools: dict[str, CallableTool] = {}
    skipped: list[tuple[str, str]] = []
    for where, tool, namespace in (found for place, each in lists for found in _each_tool(each or [], place)):
        match tool.get("type"):
            case "function":
                names = ("name", "description", "parameters", "strict")
                function = {name: tool[name] for name in names if tool.get(name) is not None}
            case "custom":
                function = custom_function(tool, where, warnings)
            case "tool_search" if tool.get("execution") == "client":
                function = _search(tool)
            case kind:
                skipped.append((where, str(kind)[:50]))
                warnings.append(
                    f"{where} is left out: this server does not run tools of type {str(kind)[:50]!r}"
                )
                continue
        called = CallableTool(str(function["name"]), namespace, tool["type"])
        if namespace is not None:
            function["name"] = called.full_name
        is_second = called.full_name in tools and where.startswith("tools[")  # an item's goes before
        functions[where if is_second else called.full_name] = (where, function)
        tools[called.full_name] = called
    choice = _tool_choice(body.tool_choice, tools)
    if choice == "required" and skipped and not functions:
        where, kind = skipped[0]
        raise RequestError(
            f"{where} is of type {kind!r}, which this server does not run, and tool_choice requires a call",
            param=f"{where}.type",
        )
    has_tools = any(each is not None for _, each in lists)
    nested = [{"type": "function", "function": function} for _, function in functions.values()]
    places = [where for where, _ in functions.values()]
    return ResponseTools(nested if has_tools else None, places, tools, choice)


def _each_tool(
    tools: Sequence[dict[str, Any]], param: str
) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Each tool with its place and its namespace. The first tool of a namespace has the namespace's description too."""
    for number, tool in enumerate(tools):
        where = f"{param}[{number}]"
        if tool.get("type") != "namespace":
            yield where, tool, None
            continue
        namespace, members = tool.get("name"), tool.get("tools")
        if not isinstance(namespace, str) or not isinstance(members, list):
            raise RequestError(f"{where} is a namespace, and needs a name and tools", param=where)
        for index, member in enumerate(members):
            place = f"{where}.tools[{index}]"
            if not isinstance(member, dict) or not isinstance(member.get("name"), str):
                raise RequestError(f"{place} needs a type and a name", param=place)
            description = member.get("description") or ""
            if index == 0 and tool.get("description"):
                description = f"{namespace}: {tool['description']}\n\n{description}"
            yield place, {**member, "description": description}, namespace


def _search(tool: dict[str, Any]) -> dict[str, Any]:
    """A search of tools that the client runs, as a function."""
    parameters = tool.get("parameters")
    return {
        "name": TOOL_SEARCH,
        "description": str(tool.get("description") or "Find tools"),
        "parameters": {"type": "object"} if parameters is None else parameters,
    }


def _tool_choice(
    choice: str | dict[str, Any] | None, tools: Mapping[str, CallableTool]
) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    match choice.get("type"):
        case "function" | "custom":
            return _named(choice, tools)
        case "allowed_tools" if isinstance(allowed := choice.get("tools"), list):
            named = [each for tool in allowed for each in _allowed(tool, tools)]
            only_others = allowed and not named and choice.get("mode") == "auto"
            return "none" if only_others else {**choice, "tools": named}
        case "allowed_tools":
            return choice
        case kind:
            raise RequestError(
                f"tool_choice of type {str(kind)[:50]!r} is not supported: this server does not run such tools",
                param="tool_choice.type",
            )


def _allowed(tool: Any, tools: Mapping[str, CallableTool]) -> list[Any]:
    """The functions of a chat that an entry of allowed tools names: none for a tool that this server does not run."""
    if not isinstance(tool, dict):
        return [tool]
    match tool.get("type"):
        case "namespace":
            names = [name for name, each in tools.items() if each.namespace == tool.get("name")]
            return [{"type": "function", "name": name} for name in names]
        case "function" | "custom" | None:
            return [_named(tool, tools)]
        case _:
            return []


def _named(tool: dict[str, Any], tools: Mapping[str, CallableTool]) -> dict[str, Any]:
    """A function of a chat. One in a namespace may be named without that, where no other has its name."""
    name = tool.get("name")
    if isinstance(name, str):
        full_name = CallableTool(name, tool.get("namespace")).full_name
        found = [each for each, called in tools.items() if called.name == name]
        name = found[0] if full_name not in tools and len(found) == 1 else full_name
    return {"type": "function", "function": {"name": name}}


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
