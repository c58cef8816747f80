"""The values that a function gets for tensors, and the tensors that its results become."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from teneral.handlers.platforms.kserve.tensors import Tensor, event_of, json_data, tensors_of
from teneral.runtime.errors import RequestError


def shown(result: Any) -> list[tuple[str, str, tuple[int, ...], list[Any]]]:
    return [(each.name, each.datatype, each.shape, json_data(each)) for each in tensors_of(result)]


def test_an_event_has_each_tensor_nested_as_its_shape_says() -> None:
    tensors = {
        "matrix": Tensor("matrix", "INT32", (2, 3), np.arange(6, dtype=np.int32)),
        "number": Tensor("number", "FP64", (), np.array([0.5])),
        "flags": Tensor("flags", "BOOL", (2,), np.array([True, False])),
        "texts": Tensor("texts", "BYTES", (2, 1), ["ü".encode(), b""]),
        "image": Tensor("image", "BYTES", (1,), [b"\xff\xd8"]),
        "none": Tensor("none", "FP32", (2, 0), np.zeros(0, dtype=np.float32)),
        "no texts": Tensor("no texts", "BYTES", (0,), []),
    }
    assert event_of(tensors, {}) == {
        "matrix": [[0, 1, 2], [3, 4, 5]],
        "number": 0.5,
        "flags": [True, False],
        "texts": [["ü"], [""]],
        "image": [b"\xff\xd8"],
        "none": [[], []],
        "no texts": [],
    }


def test_parameters_have_a_key_of_their_own_and_never_replace_a_tensor() -> None:
    tensor = Tensor("parameters", "INT32", (1,), np.array([1]))
    assert event_of({}, {"top": 3}) == {"parameters": {"top": 3}}
    assert event_of({"parameters": tensor}, {}) == {"parameters": [1]}
    with pytest.raises(RequestError, match="parameters"):
        event_of({"parameters": tensor}, {"top": 3})


@pytest.mark.parametrize(
    ("result", "datatype", "shape", "data"),
    [
        (7, "INT64", (1,), [7]),
        (True, "BOOL", (1,), [True]),
        (0.5, "FP64", (1,), [0.5]),
        ("ü", "BYTES", (1,), ["ü"]),
        (b"raw", "BYTES", (1,), ["raw"]),
        ([1, 2], "INT64", (2,), [1, 2]),
        ([1, 2.5], "FP64", (2,), [1.0, 2.5]),
        ([[True, False], [True, True]], "BOOL", (2, 2), [True, False, True, True]),
        (((1, 2), (3, 4)), "INT64", (2, 2), [1, 2, 3, 4]),
        ([["a"], ["b"]], "BYTES", (2, 1), ["a", "b"]),
        # No even lists of one kind: their JSON
        (None, "BYTES", (1,), ["null"]),
        ([], "BYTES", (1,), ["[]"]),
        ([[]], "BYTES", (1,), ["[[]]"]),
        ([1, "a"], "BYTES", (1,), ['[1, "a"]']),
        ([1, True], "BYTES", (1,), ["[1, true]"]),
        ([1, None], "BYTES", (1,), ["[1, null]"]),
        ([[1], [2, 3]], "BYTES", (1,), ["[[1], [2, 3]]"]),
        ([[1], 2], "BYTES", (1,), ["[[1], 2]"]),
        ([{"a": "ü"}], "BYTES", (1,), ['[{"a": "ü"}]']),
        (1 << 63, "BYTES", (1,), [str(1 << 63)]),
        ([0.5, 10**400], "BYTES", (1,), [f"[0.5, {10**400}]"]),
    ],
)
def test_a_result_is_one_output(result: Any, datatype: str, shape: tuple[int, ...], data: list[Any]) -> None:
    assert shown(result) == [("output", datatype, shape, data)]


def test_lists_that_are_nested_too_deeply_are_their_json() -> None:
    deep: Any = 1
    for _ in range(20):
        deep = [deep]
    assert shown(deep) == [("output", "BYTES", (1,), ["[" * 20 + "1" + "]" * 20])]


def test_a_dict_is_an_output_a_key() -> None:
    result = {"text": "hi", "scores": [0.5, 1.0], "usage": {"tokens": 3}}
    assert shown(result) == [
        ("text", "BYTES", (1,), ["hi"]),
        ("scores", "FP64", (2,), [0.5, 1.0]),
        ("usage", "BYTES", (1,), ['{"tokens": 3}']),
    ]
    assert shown({}) == []
