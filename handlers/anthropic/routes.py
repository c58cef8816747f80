"""The routes of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping

from ..http.routes import STREAMED, Route, Schema

_MESSAGE: Schema = {
    "type": "object",
    "required": ["id", "type", "role", "model", "content", "stop_reason", "usage"],
    "properties": {
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "content": {"type": "array", "items": {"type": "object"}},
        "usage": {"type": "object"},
    },
}
_COUNT: Schema = {
    "type": "object",
    "required": ["input_tokens"],
    "properties": {"input_tokens": {"type": "integer", "minimum": 0}},
}
_TURNS = {"model": "my-model", "messages": [{"role": "user", "content": "Hello"}]}

ROUTES = (
    Route(
        "POST", "/v1/messages", ".anthropic.messages:MessageRoutes.post", "anthropic", "Answer messages",
        ".anthropic.bodies:MessagesBody", _MESSAGE, STREAMED, example={**_TURNS, "max_tokens": 16},
    ),
    Route(
        "POST", "/v1/messages/count_tokens", ".anthropic.messages:MessageRoutes.count_tokens", "anthropic",
        "Count the tokens of messages",
        ".anthropic.bodies:CountBody", _COUNT, example=_TURNS,
    ),
)  # fmt: skip


def is_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """True if errors have Anthropic's shape: by the path, or by the header that Anthropic's clients send to
    every path. `headers` ignores case.
    """
    return f"{path}/".startswith("/v1/messages/") or "anthropic-version" in headers
