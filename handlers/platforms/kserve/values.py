"""Between tensors and what the user's function takes and gives: an event of plain Python values, and JSON results.

The rules stand in docs/kserve.md. Pure; every result has a form as tensors, so nothing here fails for one.
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
    """`{name: numbers, nested as the shape says}`, with the request's parameters where there are any. Raises
    `RequestError` for a tensor that has their name.
    """
    event = {name: _nested(tensor) for name, tensor in tensors.items()}
    if parameters:
        if PARAMETERS in event:
            raise RequestError(f"an input may not be called {PARAMETERS!r} beside parameters", param="inputs")
        event[PARAMETERS] = dict(parameters)
    return event


def tensors_of(result: Any) -> list[Tensor]:
    """A dict gives one output a key, anything else the one output `SINGLE_OUTPUT`."""
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
    """BYTES are what texts are sent as; what is not UTF-8, as an image never is, was not meant as one."""
    try:
        return element.decode()
    except UnicodeDecodeError:
        return element


def _tensor(name: str, value: Any) -> Tensor:
    """A number, text or bytes has the shape [1]; lists that are nested evenly, and hold numbers or texts, have theirs;
    all else is its JSON, as one text.
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
    """What evenly nested lists hold, and their shape; ([None], ()) when they are not even, or empty somewhere."""
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
    """Whether there is a whole number that no float comes near."""
    try:
        return any(not np.isfinite(float(element)) for element in elements)
    except OverflowError:
        return True
