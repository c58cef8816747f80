"""Products on the device: right, and the same bits in any company."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.direct_kernels import Device
from tests.support.quantized import compressed, stored_matrix

from teneral.loader.tools.pack.quantize import quantize_int4, quantize_int8
from teneral.runtime.backends.cuda.direct.arguments import Product
from teneral.runtime.backends.cuda.direct.memory import Array
from teneral.runtime.backends.cuda.direct.products import (
    MAX_FEW_ROWS,
    Mode,
    Output,
    format_of,
    product_launch,
    stretch_length,
)
from teneral.runtime.models.gptq_awq import GptqAwqMatrix
from teneral.runtime.models.matrices import DenseMatrix, IntegerMatrix, Matrix
from teneral.runtime.tensors import DType, Tensor, from_float32, to_float32

FORMATS = ("float", "wide", "int8", "int4", "int4 with zeros")
_GPTQ = {"quant_method": "gptq", "bits": 4, "sym": False}
# Checkpoints' own words of 4 bits, by the names of their formats
WORDS: dict[str, dict[str, Any]] = {
    "gptq": _GPTQ,
    "gptq v2": {**_GPTQ, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4},
    "packed": compressed("pack-quantized", num_bits=4, strategy="group"),
    "packed with zeros": compressed("pack-quantized", num_bits=4, strategy="group", symmetric=False),
}
GROUP = 64


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def matrix_of(
    device: Device, kind: str, num_out: int, num_in: int, *, bias: bool = False, group: int = GROUP
) -> tuple[Matrix, np.ndarray]:
    """A matrix on the device, and its weights and bias in fp64, (num_out, num_in + 1)."""
    dtype, numbers = device.kernels.dtype, random(num_out, num_in) * 0.1

    def tensor(array: Any, kind: DType) -> Tensor:
        return Tensor(kind, device.put(array, kind), "cuda:0")

    added = from_float32(random(num_out, seed=5), dtype) if bias else None
    own_bias = None if added is None else tensor(added, dtype)
    exact_bias = np.zeros(num_out) if added is None else to_float32(added, dtype)
    made: Matrix
    if kind in WORDS:
        return words_of(device, kind, num_out, num_in, own_bias, exact_bias, group=group)
    if kind == "float":
        stored = from_float32(numbers, dtype)
        made, exact = DenseMatrix(tensor(stored, dtype), own_bias), to_float32(stored, dtype)
    elif kind == "wide":  # rounded as it is read
        made = DenseMatrix(tensor(numbers, DType.F32), own_bias)
        exact = to_float32(from_float32(numbers, dtype), dtype)
    elif kind == "int8":
        packed = quantize_int8(numbers, group)
        scale = packed.scale.view(np.uint16)
        weight = tensor(packed.weight.view(np.int8), DType.I8)
        made = IntegerMatrix(weight, tensor(scale, DType.BF16), bias=own_bias)
        exact = packed.weight.view(np.int8) * np.repeat(to_float32(scale, DType.BF16), group, 1)
    else:
        packed = quantize_int4(numbers, group)
        runs = packed.weight.view(np.uint8).reshape(num_out, -1, 32)
        levels = np.concatenate([runs & 15, runs >> 4], axis=2).reshape(num_out, num_in).astype(np.int64)
        zeros = np.full((num_out, num_in // group), 8, np.uint8)
        if kind == "int4 with zeros":
            zeros = np.random.default_rng(3).integers(0, 16, zeros.shape, np.uint8)
        scale = packed.scale.view(np.uint16)
        weight = tensor(packed.weight.view(np.uint8), DType.U8)
        zero = None if kind == "int4" else tensor(zeros, DType.U8)
        made = IntegerMatrix(weight, tensor(scale, DType.BF16), zero, own_bias)
        exact = (levels - np.repeat(zeros, group, 1)) * np.repeat(to_float32(scale, DType.BF16), group, 1)
    return made, np.concatenate([exact.astype(np.float64), exact_bias[:, None]], axis=1)


def words_of(
    device: Device,
    kind: str,
    num_out: int,
    num_in: int,
    bias: Tensor | None,
    exact: np.ndarray,
    *,
    group: int,
) -> tuple[Matrix, np.ndarray]:
    note = copy.deepcopy(WORDS[kind])
    if "config_groups" in note:
        note["config_groups"]["group_0"]["weights"]["group_size"] = group
    stored = stored_matrix(num_out, num_in, {"group_size": group, **note})

    def put(name: str) -> Tensor | None:
        found = stored.tensors("x").get(f"x.{name}")
        if found is None:
            return None
        bits = found.view(torch.int16) if found.dtype is torch.bfloat16 else found
        array = bits.numpy().view(np.uint16) if found.dtype is torch.bfloat16 else bits.numpy()
        kinds = {torch.int32: DType.I32, torch.float16: DType.F16, torch.bfloat16: DType.BF16}
        return Tensor(kinds[found.dtype], device.put(array, kinds[found.dtype]), "cuda:0")

    is_packed = kind.startswith("packed")
    names = (
        ("weight_packed", "weight_zero_point", "weight_scale")
        if is_packed
        else ("qweight", "qzeros", "scales")
    )
    weight, zeros, scales = map(put, names)
    assert weight is not None
    assert scales is not None
    packing: Any = {"g": "gptq", "a": "awq", "p": "rows"}[kind[0]]
    matrix = GptqAwqMatrix("x", weight, zeros, scales, None, 4, packing, kind == "gptq", bias=bias)
    return matrix, np.concatenate([stored.weight().double().numpy(), exact[:, None]], axis=1)


class Multiplier:
    """Multiplies rows on the device, with buckets of any size."""

    def __init__(self, device: Device, matrix: Matrix) -> None:
        self.device, self.matrix = device, matrix

    def __call__(
        self, rows: np.ndarray, *, bucket: int | None = None, mode: Mode = Mode.STORE_WIDE
    ) -> np.ndarray:
        """`rows` (R, num_in) in the device's dtype; fp32 results (R, num_out)."""
        device, matrix = self.device, self.matrix
        kind = DType.F32 if mode is Mode.STORE_WIDE else device.kernels.dtype
        out = device.put(np.full((len(rows), matrix.num_out), 1, np.float32).astype(kind.numpy), kind)
        counts = device.put(np.array([0, len(rows)], np.uint32))
        x = device.put(rows, device.kernels.dtype)
        launch = product_launch(
            device.kernels, matrix, x, out, counts,
            bucket=bucket or len(rows), mode=mode, output=Output.LOGITS,
        )  # fmt: skip
        device.driver.launch(launch, device.stream)
        return device.get(out)


def rows_of(device: Device, num: int, num_in: int) -> np.ndarray:
    return from_float32(random(num, num_in, seed=9), device.kernels.dtype)


@pytest.mark.parametrize("kind", [*FORMATS, *WORDS])
@pytest.mark.parametrize(("num_out", "num_in"), [(16, 64), (40, 320), (7, 1152)])
def test_products_are_right(device: Device, kind: str, num_out: int, num_in: int) -> None:
    num_out = -(-num_out // 8) * 8 if kind in WORDS else num_out
    matrix, exact = matrix_of(device, kind, num_out, num_in, bias=True)
    assert format_of(matrix, device.kernels.dtype) == kind.split(maxsplit=1)[0]
    rows = rows_of(device, 19, num_in)
    wide = to_float32(rows, device.kernels.dtype).astype(np.float64)
    expected = wide @ exact[:, :-1].T + exact[:, -1]
    size = np.abs(wide) @ np.abs(exact[:, :-1].T) + np.abs(exact[:, -1])
    found = Multiplier(device, matrix)(rows)
    np.testing.assert_array_less(np.abs(found - expected), 1e-6 * size)


@pytest.mark.parametrize("kind", [*FORMATS, "gptq", "awq", "packed"])
def test_a_row_has_the_same_bits_in_every_batch(device: Device, kind: str) -> None:
    """From one row to more than `MAX_FEW_ROWS`, by each kernel, at each place, in buckets of any size."""
    matrix, _ = matrix_of(device, kind, 40 if kind in WORDS else 35, 576, bias=True)
    multiply = Multiplier(device, matrix)
    rows = rows_of(device, 70, 576)
    alone = np.concatenate([multiply(rows[at : at + 1]) for at in range(12)])
    for first, end, bucket in (
        (0, 12, 12),
        (3, 11, 8),
        (0, 16, 16),
        (0, 20, 32),
        (0, 70, 70),
        (0, 12, 300),
        (0, 70, 300),
    ):
        found = multiply(rows[first:end], bucket=bucket)
        np.testing.assert_array_equal(
            found[: 12 - first], alone[first:end], err_msg=f"{first}:{end} of {bucket}"
        )
    turned = multiply(rows[::-1])
    np.testing.assert_array_equal(turned[::-1][:12], alone)
    assert MAX_FEW_ROWS < 300


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_products_of_any_shape_do_not_depend_on_the_batch(device: Device, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(FORMATS))
    group = data.draw(st.sampled_from([32, 64, 128]))
    num_in = 128 * data.draw(st.integers(1, 9))
    num_out = data.draw(st.integers(1, 50))
    num_rows = data.draw(st.integers(1, 40))
    matrix, exact = matrix_of(device, kind, num_out, num_in, group=group)
    multiply, rows = Multiplier(device, matrix), rows_of(device, num_rows, num_in)
    together = multiply(rows, bucket=data.draw(st.sampled_from([num_rows, 64, 300])))
    place = data.draw(st.integers(0, num_rows - 1))
    np.testing.assert_array_equal(multiply(rows[place : place + 1])[0], together[place])
    wide = to_float32(rows, device.kernels.dtype).astype(np.float64)
    size = np.abs(wide) @ np.abs(exact[:, :-1].T)
    np.testing.assert_array_less(np.abs(together - wide @ exact[:, :-1].T), 1e-6 * size + 1e-30)


def test_sums_are_rounded_once_and_added_after_rounding(device: Device) -> None:
    dtype = device.kernels.dtype
    matrix, _ = matrix_of(device, "float", 24, 96, bias=True)
    multiply, rows = Multiplier(device, matrix), rows_of(device, 5, 96)
    wide = multiply(rows)
    np.testing.assert_array_equal(multiply(rows, mode=Mode.STORE), from_float32(wide, dtype))
    one = to_float32(np.full((5, 24), 1, np.float32).astype(dtype.numpy), dtype)
    added = one + to_float32(from_float32(wide, dtype), dtype)
    np.testing.assert_array_equal(multiply(rows, mode=Mode.ADD), from_float32(added, dtype))


def test_matrices_side_by_side_write_their_own_columns(device: Device) -> None:
    dtype = device.kernels.dtype
    first, _ = matrix_of(device, "float", 20, 64)
    second, _ = matrix_of(device, "int8", 12, 64)
    rows = rows_of(device, 3, 64)
    x, counts = device.put(rows, dtype), device.put(np.array([3], np.uint32))
    out = device.put(np.zeros((3, 40), dtype.numpy), dtype)
    for matrix, column in ((first, 0), (second, 24)):
        launch = product_launch(device.kernels, matrix, x, out, counts, bucket=3, column=column)
        device.driver.launch(launch, device.stream)
    found = device.get(out)
    np.testing.assert_array_equal(found[:, :20], Multiplier(device, first)(rows, mode=Mode.STORE))
    np.testing.assert_array_equal(found[:, 24:36], Multiplier(device, second)(rows, mode=Mode.STORE))
    assert not found[:, 20:24].any()
    assert not found[:, 36:].any()


def e4m3(code: int) -> float:
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    size = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
    return -size if sign else size


E4M3 = np.array([e4m3(code) for code in range(256)])


@pytest.mark.parametrize("scale_rows", [1, 16])
def test_fp8_weights_with_a_scale_for_each_block(device: Device, scale_rows: int) -> None:
    """Every code but NaN's, in blocks of 16 x 64 and in rows."""
    num_out, num_in, num_rows, group = 32, 256, 9, 64
    codes = np.random.default_rng(0).permutation(np.tile(np.arange(256), 32)).reshape(num_out, num_in)
    codes[codes % 128 == 127] = 0
    scale = 0.5 + np.random.default_rng(1).random((num_out // scale_rows, num_in // group)).astype(np.float32)
    rows, outs = rows_of(device, num_rows, num_in), []
    weight, scales = device.put(codes.astype(np.uint8)), device.put(scale)
    for first, num, kernel, tile in ((0, 9, "16", 16), (0, 9, "64", 64), (4, 1, "8", 8), (0, 9, "many", 128)):
        x, counts = (
            device.put(rows[first : first + num], device.kernels.dtype),
            device.put(np.array([num], np.uint32)),
        )
        out = device.put(np.zeros((num, num_out), np.float32))
        arguments = Product(
            weight=weight.address, scale=scales.address, x=x.address, out=out.address, counts=counts.address,
            num_out=num_out, num_in=num_in, length=stretch_length(num_in, group_size=group), group=group,
            scale_rows=scale_rows, out_stride=num_out, scale_kind=2, mode=Mode.STORE_WIDE,
        )  # fmt: skip
        device.run(
            "product_fp8",
            f"product_fp8_{kernel}",
            (1, -(-num_out // (128 if tile == 128 else 16))),
            256,
            arguments,
        )
        outs.append(device.get(out))
    exact = E4M3[codes] * np.repeat(np.repeat(scale, scale_rows, 0), group, 1)
    wide = to_float32(rows, device.kernels.dtype).astype(np.float64)
    np.testing.assert_allclose(outs[0], wide @ exact.T, rtol=1e-5, atol=1e-3)
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0][4:5], outs[2])
    np.testing.assert_array_equal(outs[0], outs[3])


def test_the_matrix_alone_decides_its_stretches() -> None:
    assert stretch_length(4096, group_size=4096) == 512
    assert stretch_length(14336, group_size=128) == 1792
    assert stretch_length(896, group_size=896) == 128
    assert stretch_length(64, group_size=64) == 32
    assert stretch_length(1024, group_size=512) == 512
    for num_in in range(32, 5000, 32):
        assert 8 * stretch_length(num_in, group_size=num_in) >= num_in


def test_matrices_that_the_kernels_do_not_take() -> None:
    def tensor(dtype: DType, *shape: int, address: int = 0) -> Tensor:
        return Tensor(dtype, Array(address, shape, dtype), "cuda:0")

    scale = tensor(DType.BF16, 8, 4)
    bf16 = DType.BF16
    assert format_of(DenseMatrix(tensor(bf16, 8, 96)), bf16) == "float"
    assert format_of(DenseMatrix(tensor(bf16, 8, 96)), DType.F16) is None
    assert format_of(DenseMatrix(tensor(bf16, 8, 40)), bf16) is None
    assert format_of(DenseMatrix(tensor(bf16, 8, 96, address=8)), bf16) is None
    assert format_of(IntegerMatrix(tensor(DType.I8, 8, 128), scale), bf16) == "int8"
    assert format_of(IntegerMatrix(tensor(DType.I8, 8, 64), scale), bf16) is None  # groups of 16
    assert format_of(IntegerMatrix(tensor(DType.U8, 8, 64), scale), bf16) == "int4"
    assert format_of(IntegerMatrix(tensor(DType.U8, 8, 64, address=4), scale), bf16) is None
    assert format_of(IntegerMatrix(tensor(DType.I8, 8, 128), scale, tensor(DType.I16, 8, 4)), bf16) is None
    assert format_of(IntegerMatrix(tensor(DType.I8, 8, 128), scale, columns=np.arange(128)), bf16) is None
