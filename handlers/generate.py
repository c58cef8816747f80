"""A handler that generates text: `teneral serve MODEL --handler teneral.handlers.generate:handler`.

An event is `{"prompt": "Once upon a time"}` or `{"messages": [{"role": "user", "content": "Hello"}]}`, with
any option of `context.model.generate` beside it: max_tokens, temperature, top_p, stop, seed and so on. With
`"stream": true` the text comes in pieces. It is an ordinary handler, made of nothing but the public API: copy
it and change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..runtime.errors import RequestError
from .context import Context


def handler(event: Any, context: Context) -> dict[str, Any] | Iterator[dict[str, Any]]:
    """The text, why it ended, and its tokens; streaming, `{"text": piece}` again and again and then the other
    two.
    """
    if not isinstance(event, dict):
        raise RequestError(f"the event must be an object, not {type(event).__name__}")
    options = {key: value for key, value in event.items() if key not in ("prompt", "messages", "stream")}
    if ("prompt" in event) == ("messages" in event):
        raise RequestError("give either a prompt or messages", param="prompt")
    prompt = event["prompt"] if "prompt" in event else event["messages"]
    context.logger.info("generating with %s", context.model.name)
    if event.get("stream"):
        return stream(prompt, options, context)
    return context.model.generate(prompt, **options).to_dict()


def stream(prompt: Any, options: Any, context: Context) -> Iterator[dict[str, Any]]:
    with context.model.stream(prompt, **options) as pieces:
        for text in pieces:
            yield {"text": text}
        yield {name: value for name, value in pieces.completion.to_dict().items() if name != "text"}
