"""The default handler, for a server without a user's function: text for a prompt or messages,
vectors for an input, and an ONNX model's outputs for its inputs.

It handles events other than HTTP requests of OpenAI's API. The events of texts are those of
`generate.py` and `embed.py`.
"""

from __future__ import annotations

from typing import Any

from ..runtime.errors import RequestError
from .function.context import Context
from .generate import handler as generate

MAX_JSON_ELEMENTS = 1 << 20


def handler(event: Any, context: Context) -> Any:
    """Answer `{"prompt": …}`, `{"messages": …}`, `{"input": …}` or `{"inputs": {NAME: …}}`; the
    first two may have options.

    Raises `RequestError` for anything else.
    """
    kind = context.host.kind
    if (isinstance(event, dict) and "inputs" in event) or (
        kind.done() and not kind.exception() and kind.result() == "onnx"
    ):
        return _run(event, context)
    if not isinstance(event, dict) or "input" not in event:
        return generate(event, context)
    if len(event) > 1:
        others = ", ".join(sorted(map(str, event.keys() - {"input"})))[:200]
        raise RequestError(f"an event with an input may have no other fields, but this has {others}")
    vectors = context.model.embed(event["input"])
    return {"model": context.model.name, "dimensions": vectors.shape[1], "embeddings": vectors.tolist()}


def _run(event: Any, context: Context) -> Any:
    """The outputs of an ONNX model as nested lists: those named in `outputs`, or all."""
    inputs, wanted = (event.get("inputs"), event.get("outputs")) if isinstance(event, dict) else (None, None)
    if not isinstance(inputs, dict) or event.keys() - {"inputs", "outputs"}:
        raise RequestError(
            'an event for an ONNX model is {"inputs": {NAME: nested lists, …}, "outputs": [NAME, …]}',
            param="inputs",
        )
    outputs = context.model.run(inputs)
    if wanted is not None:
        if not isinstance(wanted, list) or not all(
            isinstance(name, str) and name in outputs for name in wanted
        ):
            raise RequestError(f"outputs are some of {', '.join(outputs)[:500]}", param="outputs")
        outputs = {name: outputs[name] for name in wanted}
    num_elements = sum(array.size for array in outputs.values())
    if num_elements > MAX_JSON_ELEMENTS:
        raise RequestError(
            f"the outputs have {num_elements} elements, but JSON may have up to {MAX_JSON_ELEMENTS}",
            param="outputs",
            hint="Use /v2/models/NAME/infer with binary_data_output, or name fewer outputs.",
        )
    return {"model": context.model.name, "outputs": {name: array.tolist() for name, array in outputs.items()}}
