"""Tensors from JSON and from bytes, and back: every datatype, every bound, and invalid ones."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from teneral.handlers.platforms.kserve.schemas import RequestInput
from teneral.handlers.platforms.kserve.tensors import (
    DATATYPES,
    MAX_DIMENSIONS,
    MAX_TENSORS,
    NUMPY_TYPES,
    Tensor,
    binary_data,
    json_data,
    read_tensors,
)
from teneral.runtime.errors import RequestError

IN_JSON = [name for name in NUMPY_TYPES if name != "BF16"]


def an_input(datatype: str, shape: list[int], data: Any = None, *, name: str = "x", **parameters: Any) -> Any:
    given_data = {} if data is None else {"data": data}
    head = {"name": name, "datatype": datatype, "shape": shape, "parameters": parameters, **given_data}
    return msgspec.json.decode(json.dumps(head), type=RequestInput)


def read(one: Any, binary: bytes = b"") -> Tensor:
    (tensor,) = read_tensors([one], memoryview(binary)).values()
    return tensor


def refusal(*inputs: Any, binary: bytes = b"") -> str:
    with pytest.raises(RequestError) as caught:
        read_tensors(inputs, memoryview(binary))
    assert caught.value.param == "inputs"
    return caught.value.message


def elements_of(datatype: str) -> Any:
    kind = NUMPY_TYPES[datatype]
    options = {"allow_nan": False, "allow_infinity": False} if kind.kind == "f" else {}
    return hnp.arrays(
        kind, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4), elements=options or None
    )


@pytest.mark.parametrize("datatype", IN_JSON)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_an_array_comes_back_by_both_ways_flat_and_nested(datatype: str, data: st.DataObject) -> None:
    array = data.draw(elements_of(datatype))
    shape = list(array.shape)
    blob = array.tobytes()
    ways = [
        read(an_input(datatype, shape, binary_data_size=len(blob)), blob),
        read(an_input(datatype, shape, array.ravel().tolist())),
        read(an_input(datatype, shape, array.tolist())),
    ]
    for tensor in ways:
        assert (tensor.datatype, tensor.shape) == (datatype, array.shape)
        assert np.asarray(tensor.elements).dtype == NUMPY_TYPES[datatype]
        assert np.array_equal(np.asarray(tensor.elements), array.ravel())
        assert binary_data(tensor) == blob
        assert json_data(tensor) == array.ravel().tolist()


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_bytes_come_back(elements: list[bytes]) -> None:
    blob = b"".join(struct.pack("<I", len(element)) + element for element in elements)
    tensor = read(an_input("BYTES", [len(elements)], binary_data_size=len(blob)), blob)
    assert tensor.elements == elements
    assert binary_data(tensor) == blob


def test_texts_are_bytes_in_utf_8_however_they_are_nested() -> None:
    for data in (["a", "ü", "", "語"], [["a", "ü"], ["", "語"]]):
        tensor = read(an_input("BYTES", [2, 2], data))
        assert tensor.texts() == ["a", "ü", "", "語"]
        assert json_data(tensor) == ["a", "ü", "", "語"]


def test_bf16_is_widened_and_only_comes_as_bytes() -> None:
    values = np.array([1.0, -2.5, 3e38], dtype=np.float32)
    blob = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    tensor = read(an_input("BF16", [3], binary_data_size=6), blob)
    assert np.allclose(np.asarray(tensor.elements), values, rtol=0.01)
    assert "BF16" in refusal(an_input("BF16", [1], [1.0]))


def test_the_bytes_of_several_inputs_follow_one_another_whatever_is_between_them() -> None:
    tensors = read_tensors(
        [
            an_input("UINT32", [2], name="a", binary_data_size=8),
            an_input("BOOL", [1], [True], name="b"),
            an_input("BOOL", [3], name="c", binary_data_size=3),
        ],
        memoryview(struct.pack("<II", 7, 8) + b"\1\0\1"),
    )
    assert {name: np.asarray(tensor.elements).tolist() for name, tensor in tensors.items()} == {
        "a": [7, 8],
        "b": [True],
        "c": [True, False, True],
    }


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("BOOL", [0]),
        ("BOOL", ["true"]),
        ("UINT8", [-1]),
        ("UINT8", [256]),
        ("INT8", [128]),
        ("INT64", [1 << 63]),
        ("UINT64", [1 << 64]),
        ("UINT64", [-1]),
        ("INT32", [1.0]),
        ("INT32", [True]),
        ("INT32", ["1"]),
        ("INT32", [None]),
        ("FP16", [1e5]),
        ("FP32", [1e39]),
        ("FP64", [10**400]),
        ("FP32", ["1"]),
        ("FP32", [True]),
        ("FP32", [{}]),
        ("BYTES", [1]),
        ("BYTES", [None]),
    ],
)
def test_an_element_of_another_kind_or_size_is_refused(datatype: str, data: list[Any]) -> None:
    assert "x" in refusal(an_input(datatype, [1], data))


def test_a_number_beyond_all_floats_is_refused() -> None:
    raw = RequestInput("x", [1], "FP64", data=msgspec.Raw(b"[" + b"9" * 400 + b"]"))
    refusal(raw)
    refusal(RequestInput("x", [1], "FP64", data=msgspec.Raw(b"[" + b"9" * 9000 + b"]")))
    refusal(RequestInput("x", [1], "FP64", data=msgspec.Raw(b"[1e999]")))


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ([2], [1]),
        ([2], [1, 2, 3]),
        ([2, 2], [[1, 2], [3]]),
        ([2, 2], [[1, 2], 3, 4]),
        ([2, 2], [[1, 2, 3, 4]]),
        ([4], [[1, 2], [3, 4]]),
        ([2, 2], [[[1, 2], [3, 4]]]),
        ([1], [[1]]),
        ([1], 1),
        ([], []),
        ([0], [[]]),
        ([1, 0], [1]),
        ([1 << 20], []),
        ([2], {"a": 1, "b": 2}),
    ],
)
def test_data_that_are_not_of_the_shape_are_refused(shape: list[int], data: Any) -> None:
    assert "elements" in refusal(an_input("INT64", shape, data))


def test_a_scalar_has_no_dimensions() -> None:
    assert np.asarray(read(an_input("INT64", [], [7])).elements).tolist() == [7]


@pytest.mark.parametrize(
    "shape", [[-1], [1] * (MAX_DIMENSIONS + 1), [1 << 25], [0, 1 << 62], [1 << 62, 1 << 62], [1 << 20, 0]]
)
def test_a_shape_that_cannot_be_is_refused_before_anything_is_made_of_it(shape: list[int]) -> None:
    assert "shape" in refusal(an_input("FP32", shape, []))
    assert "shape" in refusal(an_input("BYTES", shape, binary_data_size=0))


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
def test_bytes_must_be_as_many_as_shape_and_datatype_say(datatype: str) -> None:
    itemsize = NUMPY_TYPES[datatype].itemsize
    for size_bytes in {0, 3 * itemsize - 1, 3 * itemsize + 1, 6 * itemsize}:
        message = refusal(an_input(datatype, [3], binary_data_size=size_bytes), binary=bytes(size_bytes))
        assert f"are {3 * itemsize} bytes" in message


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\1\0\0",
        struct.pack("<I", 1),
        struct.pack("<I", 2) + b"a",
        struct.pack("<I", 0xFFFFFFFF) + b"a",
        struct.pack("<I", 1) + b"a",
        struct.pack("<I", 1) + b"a" + struct.pack("<I", 5) + b"bcd",
        (struct.pack("<I", 1) + b"a") * 3,
    ],
)
def test_bytes_whose_lengths_do_not_fit_are_refused(blob: bytes) -> None:
    assert "x" in refusal(an_input("BYTES", [2], binary_data_size=len(blob)), binary=blob)


def test_a_byte_of_bool_is_0_or_1() -> None:
    assert "BOOL" in refusal(an_input("BOOL", [2], binary_data_size=2), binary=b"\1\2")


@pytest.mark.parametrize("size_bytes", [-1, 1.0, "4", True, 5])
def test_a_size_that_cannot_be_is_refused(size_bytes: Any) -> None:
    assert "binary_data_size" in refusal(an_input("INT32", [1], binary_data_size=size_bytes), binary=bytes(4))


def test_bytes_that_belong_to_no_tensor_are_refused() -> None:
    assert "3 bytes" in refusal(an_input("INT32", [1], binary_data_size=4), binary=bytes(7))


def test_what_is_there_twice_or_not_at_all_is_refused() -> None:
    assert "twice" in refusal(an_input("INT32", [1], [1]), an_input("INT32", [1], [1]))
    assert "both" in refusal(an_input("INT32", [1], [1], binary_data_size=4), binary=bytes(4))
    assert "missing" in refusal(an_input("INT32", [1]))
    assert "shared memory" in refusal(an_input("INT32", [1], shared_memory_region="r"))
    assert "FP8" in refusal(an_input("FP8", [1], [1]))
    refusal(an_input("INT32", [1], [1], name=""))
    refusal(*(an_input("INT32", [1], [1], name=f"x{n}") for n in range(MAX_TENSORS + 1)))


def test_an_output_that_is_no_text_asks_for_bytes() -> None:
    with pytest.raises(RequestError, match="not text"):
        json_data(Tensor("image", "BYTES", (1,), [b"\xff\xd8"]))


@given(st.sampled_from(DATATYPES), st.lists(st.integers(-2, 5), max_size=5), st.binary(max_size=64))
def test_no_bytes_do_anything_else_than_become_a_tensor_or_an_error(
    datatype: str, shape: list[int], blob: bytes
) -> None:
    try:
        tensor = read(an_input(datatype, shape, binary_data_size=len(blob)), blob)
    except RequestError:
        return
    assert len(tensor.elements) == math.prod(shape)
