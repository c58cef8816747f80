"""A handler that generates text: `teneral serve MODEL --handler teneral.handlers.generate:handler`.

An event is `{"prompt": "Once upon a time"}` or `{"messages": [{"role": "user", "content":
"Hello"}]}`, with any option of `context.model.generate`: max_tokens, temperature, stop, seed,
first_token and so on. With `"stream": true` the text comes in pieces. It is an ordinary handler
that uses only the public API: copy it and change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from teneral.handlers.function.context import Context
from teneral.handlers.function.options import check_options
from teneral.runtime.errors import RequestError


def handler(event: Any, context: Context) -> dict[str, Any] | Iterator[dict[str, Any]]:
    """The text, its finish reason and its tokens; as a stream, `{"text": piece}` many times, then
    the rest.
    """
    if not isinstance(event, dict):
        raise RequestError(f"the event must be an object, not {type(event).__name__}")
    if ("prompt" in event) == ("messages" in event):
        raise RequestError("give either a prompt or messages", param="prompt")
    name = "prompt" if "prompt" in event else "messages"
    prompt, streaming = event[name], event.get("stream", False)
    if not isinstance(prompt, str if name == "prompt" else list):
        raise RequestError(f"the {name} cannot be {type(prompt).__name__}", param=name)
    if not isinstance(streaming, bool):
        raise RequestError("stream must be true or false", param="stream")
    options = {key: value for key, value in event.items() if key not in (name, "stream")}
    check_options(options)
    context.logger.info("generating with %s", context.model.name)
    if streaming:
        return _stream(prompt, options, context)
    return context.model.generate(prompt, **options).to_dict()


def _stream(prompt: Any, options: Any, context: Context) -> Iterator[dict[str, Any]]:
    with context.model.stream(prompt, **options) as pieces:
        for text in pieces:
            yield {"text": text}
        yield {name: value for name, value in pieces.completion.to_dict().items() if name != "text"}
