"""The prompt of a chat: its messages as chat templates take them, and the model's template, as the server's
settings and the request's own fields have it.

A field that the template has no variable for is refused: it would be ignored. Efforts, which many clients always send,
are ignored with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from ...runtime.errors import RequestError
from ...runtime.step.requests import FirstToken
from ...runtime.text.chat import mentions
from .schemas import ChatBody, ContentPart, Message, ToolCall, part_text

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer

MAX_VARIABLES = 64
# Variables that the request gives in fields of their own, or that are the server's to give.
_OTHERS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)
# The variable of DeepSeek's, Granite's and Kimi's templates, and neither prose nor a message's field.
_THINKING = re.compile(
    r"(?<![\w.'\"])thinking\s+is\s+(?:not\s+)?defined|\b(?:if|not|and)\s+thinking\b(?!\s*[.(\[])"
)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
# Of all tool calls that the conversation has: JSON in texts of the body, whose own bounds do not count it.
MAX_ARGUMENTS_CHARS = 1 << 20


class ChatSettings(Struct, frozen=True):
    """The server's settings of chats."""

    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    trusts_templates: bool = False  # whether a request may bring its own
    max_sequences: int = 1
    first_token: FirstToken = FirstToken.EXACT  # of requests that do not choose


class ChatPrompt:
    """A request's fields about its prompt, but for messages and tools."""

    def __init__(self, body: ChatBody, settings: ChatSettings) -> None:
        """Raises `RequestError` for fields that contradict one another, or that the server does not permit."""
        if body.chat_template is not None and not settings.trusts_templates:
            raise RequestError(
                "chat_template is not permitted on this server",
                param="chat_template",
                hint="Its operator can permit it with --trust-request-chat-template, or give --chat-template FILE.",
            )
        self._source = body.chat_template
        self._continues = bool(body.continue_final_message) or (
            bool(body.messages) and bool(body.messages[-1].prefix)
        )
        self._adds_prompt = (
            not self._continues if body.add_generation_prompt is None else body.add_generation_prompt
        )
        if self._continues and self._adds_prompt:
            raise RequestError(
                "add_generation_prompt and continue_final_message cannot both be true",
                param="continue_final_message",
            )
        if self._continues and (body.messages[-1].role != "assistant" or body.messages[-1].tool_calls):
            raise RequestError(
                "continue_final_message needs an assistant message without tool calls at the end",
                param="continue_final_message",
            )
        self._variables = _variables(body)
        self._efforts = {
            name: value
            for name, value in (("reasoning_effort", effort_of(body)), ("verbosity", body.verbosity))
            if value is not None
        }
        self._thinks = thinks_of(body)
        self._budget = budget_of(body)
        self.warnings: list[str] = []  # once it is rendered
        self._params = {name: f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs or {}}

    def templates(self, templates: Mapping[str, str]) -> Mapping[str, str]:
        """Those that this request is rendered by, of a model with these."""
        return templates if self._source is None else {"default": self._source}

    def render(
        self,
        tokenizer: TextTokenizer,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """Blocks for about a millisecond. Raises `RequestError` for what the template does not take."""
        templates = self.templates(tokenizer.templates)
        for name in self._variables if templates else ():
            if not mentions(templates, name):
                param = self._params.get(name, name)
                raise RequestError(
                    f"{param} is not supported: the model's chat template has no variable {name!r}",
                    param=param,
                )
        variables = {**self._effort_variables(templates), **self._variables}
        keeps_parts = tokenizer.images is not None and mentions(templates, "image")
        text = tokenizer.chat_template.render(
            [_for_template(message, keeps_parts=keeps_parts) for message in messages],
            tools=tools,
            add_generation_prompt=self._adds_prompt,
            variables=variables,
            source=self._source,
            keeps_parts=keeps_parts,
        )
        return _up_to(text, messages[-1]["content"]) if self._continues else text

    def _effort_variables(self, templates: Mapping[str, str]) -> dict[str, Any]:
        """Those of the fields that have an effect with this template; warns of the others."""
        variables: dict[str, Any] = {}
        self.warnings = []
        for name, value in self._efforts.items():
            if mentions(templates, name):
                variables[name] = value
            elif name != "reasoning_effort" or not thinking_switch(templates):
                self.warnings.append(
                    f"{name} is without effect: the model's chat template has no variable for it"
                )
        effort, switch = self._efforts.get("reasoning_effort"), thinking_switch(templates)
        if switch and self._thinks is not None:
            variables[switch] = self._thinks
        elif switch and effort is not None:
            variables[switch] = effort != "none"
        if self._budget is not None and mentions(templates, "thinking_budget"):
            variables["thinking_budget"] = self._budget
        return variables


def _for_template(message: Mapping[str, Any], *, keeps_parts: bool) -> dict[str, Any]:
    """The message as the template takes it: its text, or the parts that were sent."""
    result = {key: value for key, value in message.items() if key != "parts"}
    if not keeps_parts:
        return result
    parts = message.get("parts", [])
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if "\n".join(texts) == message["content"] and parts:
        return {**result, "content": parts}
    # The text is another one now, such as one with descriptions of tools.
    images = [part for part in parts if part["type"] == "image"]
    return {**result, "content": [*images, {"type": "text", "text": message["content"]}]}


def effort_of(body: ChatBody) -> str | None:
    """The effort, by any of its names."""
    if body.reasoning_effort is None and body.reasoning is not None:
        return body.reasoning.effort
    return body.reasoning_effort


def thinks_of(body: ChatBody) -> bool | None:
    """The switch of reasoning, by any of its fields; None: as the model does. Raises `RequestError`."""
    given = {
        "reasoning.enabled": None if body.reasoning is None else body.reasoning.enabled,
        "thinking": None if body.thinking is None else body.thinking.type != "disabled",
        "enable_thinking": body.enable_thinking,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if len(set(given.values())) > 1:
        raise RequestError(f"{' and '.join(given)} contradict one another", param=next(iter(given)))
    return next(iter(given.values()), None)


def budget_of(body: ChatBody) -> int | None:
    """The most tokens of reasoning; None: no limit. Raises `RequestError`."""
    given = {
        name: value
        for name in ("thinking_token_budget", "thinking_budget", "reasoning_budget_tokens")
        if (value := getattr(body, name)) is not None
    }
    if body.reasoning is not None and body.reasoning.max_tokens is not None:
        given["reasoning.max_tokens"] = body.reasoning.max_tokens
    thinking = body.thinking
    if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is not None:
        given["thinking.budget_tokens"] = thinking.budget_tokens
    for param, value in given.items():
        if not -1 <= value < 1 << 31:
            raise RequestError(f"{param} is {value}, but must be at least 0, or -1 for no limit", param=param)
    if len(set(given.values())) > 1:
        raise RequestError(f"{' and '.join(given)} contradict one another", param=next(iter(given)))
    budget = next(iter(given.values()), -1)
    return None if budget == -1 else budget


def thinking_switch(templates: Mapping[str, str]) -> str:
    """The template's variable that switches reasoning on and off; '' for none."""
    if mentions(templates, "enable_thinking"):
        return "enable_thinking"
    return "thinking" if any(_THINKING.search(text) for text in templates.values()) else ""


def _variables(body: ChatBody) -> dict[str, Any]:
    """The template's variables that the request gives. Raises `RequestError`."""
    variables = dict(body.chat_template_kwargs or {})
    if len(variables) > MAX_VARIABLES:
        raise RequestError(
            f"chat_template_kwargs may have {MAX_VARIABLES} entries", param="chat_template_kwargs"
        )
    for name in variables:
        if name in _OTHERS or name.endswith("_token") or not _NAME.fullmatch(name):
            raise RequestError(
                f"chat_template_kwargs cannot give {name[:64]!r}", param=f"chat_template_kwargs.{name[:64]}"
            )
    if body.documents is not None:
        variables["documents"] = body.documents
    return variables


def _up_to(text: str, content: str) -> str:
    """The prompt, up to the end of the last message's content. Raises `RequestError`."""
    for wanted in (content, content.strip()):
        if wanted and (start := text.rfind(wanted)) >= 0:
            return text[: start + len(wanted)]
    raise RequestError(
        "continue_final_message is not possible: the chat template changes the last message",
        param="continue_final_message",
    )


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
    """A message as chat templates want it, but for the arguments of tool calls, which are still text."""
    where = f"messages[{index}]"
    content = _text_content(message, where)
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise RequestError(f"{where}.content is missing", param=f"{where}.content")
    # Templates know the older name of the developer's role.
    result: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content or "",
    }
    if isinstance(message.content, list):
        result["parts"] = [
            {"type": "image"} if part.is_image else {"type": "text", "text": _text_of(part)}
            for part in message.content
        ]
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning_content or message.reasoning or _details(message, where):
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return result


def _text_of(part: ContentPart) -> str:
    return part.text or part.refusal or ""


def _details(message: Message, where: str) -> str:
    """The text of OpenRouter's `reasoning_details`."""
    texts = []
    for number, detail in enumerate(message.reasoning_details or []):
        text = detail.get("text") or detail.get("summary") or ""
        if not isinstance(text, str):
            param = f"{where}.reasoning_details[{number}].text"
            raise RequestError(f"{param} must be a text", param=param)
        texts.append(text)
    return "".join(texts)


def with_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the arguments of calls as objects. Takes as long as `arguments_object` does."""
    return [
        message
        if "tool_calls" not in message
        else {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        for message in messages
    ]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    from .tools.arguments import arguments_object  # of conversations with calls

    function = call["function"]
    return {**call, "function": {**function, "arguments": arguments_object(function["arguments"])}}


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
    """The message's text; several parts are joined by line breaks. A refusal is an assistant's text, too."""
    if message.content is None and message.role == "assistant":
        return message.refusal
    if message.content is None or isinstance(message.content, str):
        return message.content
    texts = []
    for number, part in enumerate(message.content):
        param = f"{where}.content[{number}]"
        if part.type == "refusal" and message.role == "assistant" and part.refusal is not None:
            texts.append(part.refusal)
            continue
        if part.is_image:
            from .images import image_url, place_of  # of few requests

            image_url(part, message.role, place_of(part, param))
            continue
        texts.append(part_text(part.type, part.text, param))
    return "\n".join(texts)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id is not None else {})
