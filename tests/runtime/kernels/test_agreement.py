"""A product over a copy must agree with torch's, or it is not used."""

from __future__ import annotations

import pytest
import torch
from tests.support.packing_rig import integers, needs_onednn

from teneral.runtime.kernels import onednn
from teneral.runtime.kernels.choice import PRODUCT_SIZES
from teneral.runtime.kernels.copies import MAX_ERROR, objection
from teneral.runtime.models.linear import Linear
from teneral.runtime.models.packed import Copy
from teneral.runtime.models.quantized import QuantizedLinear


@needs_onednn
@pytest.mark.parametrize("shape", [(1152, 896), (64, 64), (96, 100), (7, 3)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_packed_by_onednn_is_torchs_to_the_bit(shape, has_bias):
    torch.manual_seed(0)
    weight = torch.randn(shape).to(torch.bfloat16)
    linear = Linear(weight, torch.randn(shape[0]).to(torch.bfloat16) if has_bias else None)
    compute = onednn.Product(linear, num_threads=1)
    assert objection(linear, compute, PRODUCT_SIZES, torch.bfloat16) is None
    assert compute.packed.nbytes <= onednn.packed_bytes(linear)
    with torch.inference_mode():
        for num_rows in (0, 1, 33, 100, 128, 129, 300):
            x = torch.randn(num_rows, shape[1]).to(torch.bfloat16)
            expected = linear(x)
            linear.packed = Copy(compute, bytes([1]))
            assert torch.equal(linear(x), expected)
            assert torch.equal(linear(x.t().contiguous().t()), expected)
            linear.packed = None


@needs_onednn
def test_a_packed_product_of_other_weights_does_not_pass_for_the_same():
    weight = torch.randn(64, 64).to(torch.bfloat16)
    other = weight.clone()
    other[5, 7] += 1
    compute = onednn.Product(Linear(other), num_threads=1)
    assert "differs" in str(objection(Linear(weight), compute, (8,), torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_inputs_in_8_bits_for_each_row_is_accepted(dtype):
    linear = integers(torch.randn(96))

    def rounded(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        step = x.float().abs().amax(1, keepdim=True) / 127
        own = (x.float() / step).round() * step
        product = linear.in_torch(own) - linear.bias
        return (product if bias is None else product + bias).to(x.dtype)

    assert objection(linear, rounded, PRODUCT_SIZES, dtype) is None


def test_a_product_that_rounds_one_row_by_the_measure_of_another_is_refused():
    linear = integers()

    def rounded(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        step = x.abs().max() / 127
        return linear.in_torch((x / step).round() * step)

    assert objection(linear, rounded, (1,), torch.float32) is None
    assert "may be 2%" in str(objection(linear, rounded, (8,), torch.float32))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda product: product * (1 + 2 * MAX_ERROR),
        lambda product: product.index_fill(0, torch.tensor([3]), 0.0),
        lambda product: product * float("nan"),
        lambda product: product[:, :-1],
        lambda product: product.double(),
    ],
)
def test_a_product_that_is_off_is_refused(wrong):
    linear = integers()
    assert objection(linear, lambda x, bias: wrong(linear.in_torch(x)), (8,), torch.float32) is not None
    assert objection(linear, lambda x, bias: linear.in_torch(x), (8,), torch.float32) is None


def test_a_product_that_forgets_its_bias_or_takes_it_twice_is_refused():
    linear = integers(torch.full((96,), 1000.0))
    bare = integers()
    assert objection(linear, lambda x, bias: bare.in_torch(x), (1,), torch.float32) is not None
    assert objection(linear, lambda x, bias: linear.in_torch(x), (1,), torch.float32) is not None


def test_a_matrix_of_zeros_agrees_with_itself():
    zeros = QuantizedLinear(torch.zeros(8, 64, dtype=torch.int8), torch.ones(8, 1))
    assert objection(zeros, lambda x, bias: zeros.in_torch(x), (1, 8), torch.float32) is None
