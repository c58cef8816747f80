"""A handler that embeds texts: `teneral serve MODEL --handler teneral.handlers.embed:handler`.

An event is `{"input": "a text"}` or `{"input": ["some", "texts"]}`. It is an ordinary handler that
uses only the public API: copy it and change it.
"""

from __future__ import annotations

from typing import Any

from teneral.handlers.function.context import Context
from teneral.runtime.errors import RequestError


async def handler(event: Any, context: Context) -> dict[str, Any]:
    """One vector for each text, in order."""
    if not isinstance(event, dict) or set(event) != {"input"}:
        raise RequestError('the event must be {"input": text or list of texts}', param="input")
    vectors = await context.model.aembed(event["input"])
    return {"model": context.model.name, "dimensions": vectors.shape[1], "embeddings": vectors.tolist()}
