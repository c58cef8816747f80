"""Tensors of the Open Inference Protocol as values: from JSON or from bytes and back, and their
conversion to the values of a user's function.

Invariant: a parsed tensor has exactly the elements of its shape, each of its datatype, and nothing
was allocated for a claimed size. In bytes they are little-endian and row-major; an element of BYTES
has a prefix of four bytes with its length. References: the protocol's "Tensor Data Types", and
Triton's binary tensor data extension.

A function gets an event of plain Python values, and its JSON results become tensors, by the rules
in docs/kserve.md. Pure; every result can be converted, so no conversion fails.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from ....runtime.errors import RequestError
from ...http.json_bodies import MAX_JSON_ITEMS, JsonDecoder
from .schemas import RequestInput

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
    """True if there is an integer beyond the range of floats."""
    try:
        return any(not np.isfinite(float(element)) for element in elements)
    except OverflowError:
        return True


MAX_TENSORS = 64
MAX_DIMENSIONS = 8
# The body is bounded as well; this is for shapes with a 0 in them.
MAX_ELEMENTS = 1 << 24
# Of a shape such as [N, 0], which a function gets as N empty lists: no bytes of a body pay for them.
MAX_EMPTY_LISTS = 1 << 16
MAX_NAME_CHARS = 256

BYTES, BF16 = "BYTES", "BF16"
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    BF16: np.dtype("<u2"),  # numpy has none: its bits, until they are widened
}
DATATYPES = (*NUMPY_TYPES, BYTES)
_LENGTH = struct.Struct("<I")


class Tensor(Struct, frozen=True):
    """A tensor. `elements` are flat, in row-major order: an array of the datatype (BF16: of
    float32), or a list for BYTES. They may lie in the request's body: copy any that must outlive
    it.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    elements: np.ndarray[Any, Any] | list[bytes]

    def texts(self) -> list[str]:
        """The elements of BYTES as UTF-8 texts. Raises `RequestError`, naming an invalid one."""
        texts = []
        for index, element in enumerate(self.elements):
            try:
                texts.append(element.decode())
            except UnicodeDecodeError as error:
                raise _wrong(self.name, f"element {index} is not UTF-8: {error.reason}") from None
        return texts


def read_tensors(inputs: Sequence[RequestInput], binary: memoryview) -> dict[str, Tensor]:
    """The request's inputs by name; `binary` is the part of the body after the JSON. Raises
    `RequestError`, naming the tensor.
    """
    if len(inputs) > MAX_TENSORS:
        raise RequestError(f"{len(inputs)} inputs were given, more than {MAX_TENSORS}", param="inputs")
    tensors: dict[str, Tensor] = {}
    for given in inputs:
        _check_head(given)
        if given.name in tensors:
            raise _wrong(given.name, "it was given twice")
        size_bytes = _binary_size(given)
        if size_bytes is None:
            tensors[given.name] = _from_json(given)
            continue
        if size_bytes > len(binary):
            raise _wrong(given.name, f"binary_data_size is {size_bytes}, but {len(binary)} bytes are left")
        tensors[given.name] = _from_bytes(given, binary[:size_bytes])
        binary = binary[size_bytes:]
    if len(binary):
        raise RequestError(
            f"{len(binary)} bytes of the body belong to no input",
            param="inputs",
            hint="Inference-Header-Content-Length is the length of the JSON, binary_data_size that of an input.",
        )
    return tensors


def json_data(tensor: Tensor) -> list[Any]:
    """The elements for JSON. Raises `RequestError` for BYTES that are not text."""
    if not isinstance(tensor.elements, list):
        values: list[Any] = tensor.elements.tolist()
        return values
    try:
        return [element.decode() for element in tensor.elements]
    except UnicodeDecodeError:
        raise RequestError(
            f"the output {tensor.name!r} is not text, so JSON cannot hold it",
            param="outputs",
            hint="Request it with the parameter binary_data.",
        ) from None


def binary_data(tensor: Tensor) -> bytes:
    """The elements as bytes."""
    if isinstance(tensor.elements, list):
        return b"".join(
            chain.from_iterable((_LENGTH.pack(len(element)), element) for element in tensor.elements)
        )
    return tensor.elements.astype(NUMPY_TYPES[tensor.datatype], copy=False).tobytes()


def _check_head(given: RequestInput) -> None:
    """Raise `RequestError` for an invalid name, datatype or shape."""
    if not 0 < len(given.name) <= MAX_NAME_CHARS:
        raise RequestError(f"an input's name has 1 to {MAX_NAME_CHARS} characters", param="inputs")
    if given.datatype not in DATATYPES:
        raise _wrong(
            given.name,
            f"there is no datatype {given.datatype[:20]!r}",
            hint=f"There are {', '.join(DATATYPES)}.",
        )
    if len(given.shape) > MAX_DIMENSIONS or any(size < 0 for size in given.shape):
        raise _wrong(given.name, f"its shape must have up to {MAX_DIMENSIONS} sizes, none of them negative")
    if math.prod(max(size, 1) for size in given.shape) > MAX_ELEMENTS:
        raise _wrong(given.name, f"its shape says more than {MAX_ELEMENTS} elements")
    if 0 in given.shape and math.prod(given.shape[: given.shape.index(0)]) > MAX_EMPTY_LISTS:
        raise _wrong(given.name, f"its shape says more than {MAX_EMPTY_LISTS} lists of nothing")


def _binary_size(given: RequestInput) -> int | None:
    """The size of the input's bytes after the JSON; None: its data are in the JSON."""
    parameters = given.parameters or {}
    for name in ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"):
        if name in parameters:
            raise _wrong(given.name, "shared memory is not supported", hint="Send the data in the request.")
    size_bytes = parameters.get("binary_data_size")
    if size_bytes is None:
        return None
    if isinstance(size_bytes, bool) or not isinstance(size_bytes, int) or size_bytes < 0:
        raise _wrong(given.name, "binary_data_size must be a number of bytes")
    if given.data is not msgspec.UNSET:
        raise _wrong(given.name, "it has both data and binary_data_size")
    return size_bytes


def _from_bytes(given: RequestInput, data: memoryview) -> Tensor:
    shape, count = tuple(given.shape), math.prod(given.shape)
    if given.datatype == BYTES:
        return Tensor(given.name, BYTES, shape, _split(given.name, data, count))
    kind = NUMPY_TYPES[given.datatype]
    if len(data) != count * kind.itemsize:
        raise _wrong(
            given.name,
            f"{count} elements of {given.datatype} are {count * kind.itemsize} bytes, but {len(data)} were sent",
        )
    elements: np.ndarray[Any, Any] = np.frombuffer(data, dtype=kind)
    if given.datatype == "BOOL" and count and elements.view(np.uint8).max() > 1:
        raise _wrong(given.name, "a byte of BOOL is 0 or 1")
    if given.datatype == BF16:
        elements = (elements.astype(np.uint32) << 16).view(np.float32)
    return Tensor(given.name, given.datatype, shape, elements)


def _split(name: str, data: memoryview, count: int) -> list[bytes]:
    """The elements of BYTES, each with its length as a prefix."""
    if count * _LENGTH.size > len(data):
        raise _wrong(name, f"{count} elements of BYTES take more than the {len(data)} bytes that were sent")
    elements, start = [], 0
    for index in range(count):
        if start + _LENGTH.size > len(data):
            raise _wrong(name, f"its bytes end before element {index}")
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        if length > len(data) - start:
            raise _wrong(name, f"element {index} says {length} bytes, but {len(data) - start} are left")
        elements.append(bytes(data[start : start + length]))
        start += length
    if start != len(data):
        raise _wrong(name, f"{len(data) - start} bytes are left behind its last element")
    return elements


def _from_json(given: RequestInput) -> Tensor:
    if given.datatype == BF16:
        raise _wrong(given.name, "BF16 has no form in JSON", hint="Send it as binary data, or as FP32.")
    if given.data is msgspec.UNSET:
        raise _wrong(given.name, "its data are missing")
    try:
        data = JsonDecoder(Any).decode(bytes(given.data))
    except RequestError as error:
        raise _wrong(given.name, f"its data cannot be read: {error.message}") from None
    values = _flat(given, data)
    shape = tuple(given.shape)
    if given.datatype == BYTES:
        return Tensor(given.name, BYTES, shape, _encoded(given.name, values))
    return Tensor(given.name, given.datatype, shape, _numbers(given.name, given.datatype, values))


def _flat(given: RequestInput, data: Any) -> list[Any]:
    """The elements of data that are nested like the shape, or flat."""
    count = math.prod(given.shape)
    wrong = _wrong(given.name, f"its data must be a list of {count} elements, flat or nested like its shape")
    if count > MAX_JSON_ITEMS or not isinstance(data, list):
        raise wrong
    if len(data) == count and not any(isinstance(item, list) for item in data):
        return data
    level = [data]
    for size in given.shape:
        if not all(isinstance(item, list) and len(item) == size for item in level):
            raise wrong
        level = list(chain.from_iterable(level))
    if not given.shape or any(isinstance(item, list) for item in level):
        raise wrong
    return level


def _encoded(name: str, values: list[Any]) -> list[bytes]:
    if not set(map(type, values)) <= {str}:
        raise _wrong(name, "the data of BYTES are strings")
    return [value.encode() for value in values]


def _numbers(name: str, datatype: str, values: list[Any]) -> np.ndarray[Any, Any]:
    kind, found = NUMPY_TYPES[datatype], set(map(type, values))
    if kind.kind == "b":
        if not found <= {bool}:
            raise _wrong(name, "the data of BOOL are true and false")
        return np.array(values, dtype=kind)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        if not found <= {int} or (values and not limits.min <= min(values) <= max(values) <= limits.max):
            raise _wrong(name, f"the data of {datatype} are whole numbers from {limits.min} to {limits.max}")
        return np.array(values, dtype=kind)
    if not found <= {int, float}:
        raise _wrong(name, f"the data of {datatype} are numbers")
    try:
        with np.errstate(over="ignore"):
            elements = np.array(values, dtype=np.float64).astype(kind)
    except OverflowError:
        elements = np.array([np.inf])
    if not np.isfinite(elements).all():
        raise _wrong(name, f"a number is too large for {datatype}")
    return elements


def _wrong(name: str, problem: str, *, hint: str = "") -> RequestError:
    return RequestError(f"input {name[:MAX_NAME_CHARS]!r}: {problem}", param="inputs", hint=hint)
