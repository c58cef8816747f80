"""The prompt of a chat: the model's chat template, as the server's settings and the request's own fields have it.

A field that the template has no variable for is refused: it would be ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...runtime.errors import RequestError
from .schemas import ChatBody

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer

MAX_VARIABLES = 64
# Variables that the request gives in fields of their own, or that are the server's to give.
_OTHERS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """The server's settings of chats."""

    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    trusts_templates: bool = False  # whether a request may bring its own


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
        self._continues = bool(body.continue_final_message)
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
        text = tokenizer.chat_template.render(
            messages,
            tools=tools,
            add_generation_prompt=self._adds_prompt,
            variables=self._variables,
            source=self._source,
        )
        return _up_to(text, messages[-1]["content"]) if self._continues else text


def mentions(templates: Mapping[str, str], name: str) -> bool:
    """True if a template uses a variable of this name."""
    return any(re.search(rf"\b{re.escape(name)}\b", text) for text in templates.values())


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
    for name in ("documents", "reasoning_effort"):
        if (value := getattr(body, name)) is not None:
            variables[name] = value
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
