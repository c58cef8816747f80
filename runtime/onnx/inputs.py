"""The inputs of a call as arrays of the model's types and shapes, or an error that names the one that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import RequestError
from .spec import NUMPY_TYPES, Value

Array = np.ndarray[Any, Any]

_DTYPES = {kind: np.dtype(name) for kind, name in NUMPY_TYPES.items()}


def as_input(value: Value, inputs: Mapping[str, Any]) -> Array:
    """The input as an array of the model's type. Raises `RequestError` for one that does not fit."""
    name = value.name
    if name not in inputs:
        raise RequestError(f"the input {name!r} is missing", param=name)
    wanted = _DTYPES[value.type]
    given = inputs[name]
    try:
        array = np.asarray(given)
    except ValueError:
        raise RequestError(f"the input {name!r} is not evenly nested", param=name) from None
    if array.dtype != wanted:
        array = _converted(name, array, wanted, exact=isinstance(given, np.ndarray))
    shape = value.shape
    if shape is not None:
        fits = len(shape) == array.ndim and all(
            not isinstance(size, int) or size == have for size, have in zip(shape, array.shape, strict=True)
        )
        if not fits:
            shown = ", ".join("?" if size is None else str(size) for size in shape)
            raise RequestError(
                f"the input {name!r} has the shape {list(array.shape)}, but the model takes [{shown}]",
                param=name,
            )
    return np.asarray(array, order="C")  # `ascontiguousarray` would give a single number a dimension


def _converted(name: str, array: Array, wanted: np.dtype[Any], *, exact: bool) -> Array:
    """Python's numbers as the model's type, where it holds them; of arrays only what loses nothing."""
    detail = f"the input {name!r} is {array.dtype}, but the model takes {wanted}"
    if wanted.kind == "O":
        if array.dtype.kind not in "UO" or not all(isinstance(item, str) for item in array.flat):
            raise RequestError(detail, param=name)
        return array.astype(object)
    if array.size == 0 and not exact:
        return array.astype(wanted)
    if array.dtype.kind not in "biuf" or (wanted.kind == "b") != (array.dtype.kind == "b"):
        raise RequestError(detail, param=name)
    if exact and not np.can_cast(array.dtype, wanted, "safe"):
        raise RequestError(detail, param=name, hint=f"Convert it: array.astype({wanted.name!r}).")
    if wanted.kind in "iu":
        limits = np.iinfo(wanted)
        if array.dtype.kind == "f" or array.min() < limits.min or array.max() > limits.max:
            raise RequestError(f"{detail}, from {limits.min} to {limits.max}", param=name)
    with np.errstate(over="ignore"):
        made = array.astype(wanted)
    if wanted.kind == "f" and not np.isfinite(made).all() and np.isfinite(array).all():
        raise RequestError(f"a number in the input {name!r} is too large for {wanted}", param=name)
    return made
