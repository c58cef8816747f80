"""What a server without a function of its user's does with an event that is no HTTP request of OpenAI's API: text for
a prompt or messages, vectors for an input. The events are those of `generate.py` and `embed.py`.
"""

from __future__ import annotations

from typing import Any

from ..runtime.errors import RequestError
from .function.context import Context
from .generate import handler as generate


def handler(event: Any, context: Context) -> Any:
    """Of `{"prompt": …}`, `{"messages": …}` or `{"input": …}`; the first two with options beside it. Raises
    `RequestError` for anything else.
    """
    if not isinstance(event, dict) or "input" not in event:
        return generate(event, context)
    if len(event) > 1:
        others = ", ".join(sorted(map(str, event.keys() - {"input"})))[:200]
        raise RequestError(f"an event with an input has nothing beside it, but this has {others}")
    vectors = context.model.embed(event["input"])
    return {"model": context.model.name, "dimensions": vectors.shape[1], "embeddings": vectors.tolist()}
