"""Request bodies as values: what a client may send, and what it is told when it sends something else.

As OpenAI-compatible servers do, a field that nobody here knows is ignored, a known one of a wrong type is
refused by name, and null means the default. Teneral's own extras, under `teneral`, are strict: there an
unknown field is a mistake. These are shapes only: ranges and combinations are checked where the values are
used.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...runtime.step.requests import FirstToken, Priority

Prompt = str | list[str | int | list[int]]
"""A text, tokens, or several of either; which one a list is, its items say (`prompts.py`)."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class Extras(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Teneral's own fields of a generation."""

    first_token: FirstToken | None = None  # None: as the server is set
    cache_salt: str | None = None  # shares keys and values only with requests that give the same
    session: str | None = None  # keeps what was computed for the next request that names the same
    tenant: str | None = None  # shares its turns in the queue with requests that give the same
    priority: Priority | None = None  # None: interactive


class NoExtras(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where there are none: vectors are always those of the exact weights."""


class GenerationBody(msgspec.Struct, kw_only=True, frozen=True):
    """What /v1/completions and /v1/chat/completions have in common."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    # What other servers take as well, beside OpenAI's own
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    teneral: Extras | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream is to end with its usage. Its other chunks then have it as null."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(GenerationBody, kw_only=True, frozen=True):
    prompt: Prompt
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON, as the model wrote it


class ToolCall(msgspec.Struct, kw_only=True, frozen=True):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(msgspec.Struct, kw_only=True, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str


class ChatBody(GenerationBody, kw_only=True, frozen=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None
    functions: list[Any] | None = None


class EmbeddingBody(msgspec.Struct, kw_only=True, frozen=True):
    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    teneral: NoExtras | None = None
