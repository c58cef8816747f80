"""The conversion between tensors and the values of the user's function: an event of plain Python
values, and JSON results.

The rules are in docs/kserve.md. Pure; every result can be converted to tensors, so no conversion
fails.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ....runtime.errors import RequestError
from .tensors import BYTES, MAX_DIMENSIONS, Tensor

SINGLE_OUTPUT = "output"  # the name of a result that is no dict
PARAMETERS = "parameters"  # the event's key for the request's
_INT64 = np.iinfo(np.int64)


def event_of(tensors: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """`{name: numbers, nested like the shape}`, with the request's parameters if there are any.
    Raises `RequestError` for a tensor of their name.
    """
    event = {name: _nested(tensor) for name, tensor in tensors.items()}
    if parameters:
        if PARAMETERS in event:
            raise RequestError(
                f"an input may not be named {PARAMETERS!r} if there are parameters", param="inputs"
            )
        event[PARAMETERS] = dict(parameters)
    return event


def tensors_of(result: Any) -> list[Tensor]:
    """One output for each key of a dict, for anything else the one output `SINGLE_OUTPUT`."""
    if isinstance(result, dict):
        return [_tensor(str(name), value) for name, value in result.items()]
    return [_tensor(SINGLE_OUTPUT, result)]


def _nested(tensor: Tensor) -> Any:
    if not isinstance(tensor.elements, list):
        return tensor.elements.reshape(tensor.shape).tolist()
    texts = np.empty(len(tensor.elements), dtype=object)
    texts[:] = [_text_or_bytes(element) for element in tensor.elements]
    return texts.reshape(tensor.shape).tolist()


def _text_or_bytes(element: bytes) -> str | bytes:
    """The element of BYTES as text; as bytes if it is not UTF-8, as an image never is."""
    try:
        return element.decode()
    except UnicodeDecodeError:
        return element


def _tensor(name: str, value: Any) -> Tensor:
    """A number, text or bytes has the shape [1]; evenly nested lists of numbers or texts have
    theirs; everything else becomes its JSON, as one text.
    """
    elements, shape = _leaves(value) if isinstance(value, list | tuple) else ([value], (1,))
    kinds = set(map(type, elements))
    if kinds == {bool}:
        return Tensor(name, "BOOL", shape, np.array(elements, dtype=np.bool_))
    if kinds == {int} and _INT64.min <= min(elements) <= max(elements) <= _INT64.max:
        return Tensor(name, "INT64", shape, np.array(elements, dtype=np.int64))
    if kinds in ({float}, {int, float}) and not _is_huge(elements):
        return Tensor(name, "FP64", shape, np.array(elements, dtype=np.float64))
    if kinds == {bytes}:
        return Tensor(name, BYTES, shape, list(elements))
    if kinds == {str}:
        return Tensor(name, BYTES, shape, [element.encode() for element in elements])
    return Tensor(name, BYTES, (1,), [json.dumps(value, ensure_ascii=False).encode()])


def _leaves(value: list[Any] | tuple[Any, ...]) -> tuple[list[Any], tuple[int, ...]]:
    """The elements of evenly nested lists, and their shape; ([None], ()) if they are uneven, or
    partly empty.
    """
    level: list[Any] = list(value)
    shape = [len(level)]
    while level and isinstance(level[0], list | tuple):
        if len(shape) == MAX_DIMENSIONS or not all(
            isinstance(item, list | tuple) and len(item) == len(level[0]) for item in level
        ):
            return [None], ()
        shape.append(len(level[0]))
        level = [leaf for item in level for leaf in item]
    return (level, tuple(shape)) if level else ([None], ())


def _is_huge(elements: list[Any]) -> bool:
    """Whether there is an integer beyond the range of floats."""
    try:
        return any(not np.isfinite(float(element)) for element in elements)
    except OverflowError:
        return True
