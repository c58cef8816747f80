"""What stands between the products rounds where torch rounds: the same bf16 comes out, or at times its neighbour."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("numba", reason="kernels need the extra [cpu]")

from numba import njit

from teneral.runtime.kernels.attention import attend
from teneral.runtime.kernels.rows import ACTIVATIONS, add_, exp, gate, place_heads, rms_norm
from teneral.runtime.kernels.sizes import size_of
from teneral.runtime.kernels.vectors import narrowed
from teneral.runtime.models.activations import activation
from teneral.runtime.models.norm import HeadRMSNorm, RMSNorm
from teneral.runtime.models.rope import rotate_

NONE = np.empty(0, np.uint16)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint16).numpy()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def same_but_for_neighbours(own: torch.Tensor, expected: torch.Tensor, share: float = 0.01) -> None:
    """Equal, but for at most this share, which are off by one rounding."""
    torch.testing.assert_close(own.float(), expected.float(), rtol=2**-7, atol=1e-6)
    assert (own != expected).float().mean() <= share


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_a_norm_is_that_of_the_model(weight_dtype):
    x, weight = torch.randn(3, 200).bfloat16() * 5, torch.randn(200).to(weight_dtype)
    out = torch.empty_like(x)

    given = bits(weight) if weight_dtype is torch.bfloat16 else weight.numpy()
    rms_norm(bits(x), given, 1e-6, bits(out), 0, 2)
    rms_norm(bits(x), given, 1e-6, bits(out), 2, 3)

    same_but_for_neighbours(out, RMSNorm(weight, 1e-6)(x))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gate_is_that_of_the_model(name, has_bias):
    product, bias = torch.randn(4, 2 * 300) * 4, torch.randn(2 * 300).bfloat16()
    out = torch.empty(3, 300, dtype=torch.bfloat16)

    for begin, end in ((0, 130), (130, 300)):
        gate(product.numpy(), bits(bias) if has_bias else NONE, ACTIVATIONS[name], bits(out), begin, end)

    gates, ups = (product[:3] + (bias.float() if has_bias else 0)).bfloat16().chunk(2, dim=-1)
    same_but_for_neighbours(out, activation(name)(gates) * ups, share=0.02)


def test_a_product_and_its_bias_are_added_as_torch_adds_them():
    x, product, bias = torch.randn(3, 100).bfloat16(), torch.randn(4, 100), torch.randn(100).bfloat16()
    expected = x + (product[:3] + bias.float()).bfloat16()

    add_(bits(x), product.numpy(), bits(bias), 0, 33)
    add_(bits(x), product.numpy(), bits(bias), 33, 100)

    assert torch.equal(x, expected)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_heads_are_normed_turned_and_put_where_they_belong(has_norms, rotary_dim):
    num_heads, num_kv_heads, head_dim, slots = 6, 2, 64, torch.tensor([5, 0, 17])
    product, bias = torch.randn(4, 10 * head_dim), torch.randn(10 * head_dim).bfloat16()
    cos, sin = torch.rand(3, 1, rotary_dim).bfloat16(), torch.rand(3, 1, rotary_dim).bfloat16()
    norms = torch.randn(2, head_dim).bfloat16()
    cache = torch.zeros(2, num_kv_heads, 20, head_dim, dtype=torch.bfloat16)
    queries = torch.empty(3, num_heads, head_dim, dtype=torch.bfloat16)

    given_norms = bits(norms) if has_norms else np.empty((0, 0), np.uint16)
    turns = bits(cos.squeeze(1)), bits(sin.squeeze(1))
    where = slots.numpy(), bits(cache), bits(queries)
    for begin, end in ((0, 13), (13, 30)):
        place_heads(product.numpy(), bits(bias), given_norms, 1e-6, *turns, *where, begin, end)

    heads = (product[:3] + bias.float()).bfloat16().view(3, 10, head_dim)
    turned = heads[:, : num_heads + num_kv_heads]
    if has_norms:
        HeadRMSNorm(norms[0], norms[1], num_heads, 1e-6).apply_(turned)
    rotate_(turned, cos, sin)
    same_but_for_neighbours(queries, heads[:, :num_heads])
    same_but_for_neighbours(cache[0][:, slots], turned[:, num_heads:].transpose(0, 1))
    assert torch.equal(cache[1][:, slots], heads[:, num_heads + num_kv_heads :].transpose(0, 1))
    untouched = [slot for slot in range(20) if slot not in slots.tolist()]
    assert (cache[:, :, untouched] == 0).all()


@njit
def attend_64(queries, cache, tables, firsts, ends, block_size, scale, out, begin, end):
    attend(size_of(64), queries, cache, tables, firsts, ends, block_size, scale, out, begin, end)


def test_attention_sees_its_own_tokens_and_no_others():
    num_heads, num_kv_heads, head_dim, block_size, num_blocks = 6, 2, 64, 16, 60
    cache = torch.full((2, num_kv_heads, num_blocks * block_size, head_dim), float("nan")).bfloat16()
    queries = torch.randn(3, num_heads, head_dim).bfloat16()
    firsts, ends = np.array([0, 5, 100]), np.array([1, 50, 290])
    tables = torch.randperm(num_blocks)[:57].view(3, 19).numpy()
    tokens = [np.arange(first, end) for first, end in zip(firsts, ends, strict=True)]
    slots = [
        table[each // block_size] * block_size + each % block_size
        for table, each in zip(tables, tokens, strict=True)
    ]
    for each in slots:  # all else is NaN, which would show
        cache[:, :, each] = torch.randn(2, num_kv_heads, len(each), head_dim).bfloat16()
    out = torch.empty_like(queries)

    for begin, end in ((0, 7), (7, 18)):
        attend_64(bits(queries), bits(cache), tables, firsts, ends, block_size, 0.125, bits(out), begin, end)

    for row, each in enumerate(slots):
        keys, values = cache[:, :, each].float().repeat_interleave(num_heads // num_kv_heads, dim=1)
        expected = F.scaled_dot_product_attention(
            queries[row].float().unsqueeze(1), keys, values, scale=0.125
        )
        torch.testing.assert_close(out[row].float(), expected.squeeze(1), rtol=2**-7, atol=1e-4)


@njit
def narrow(numbers, out):
    for i in range(numbers.size):
        out[i] = narrowed(numbers[i])


def test_numbers_are_rounded_to_bf16_as_torch_rounds_them():
    some = torch.randn(5000) * 10.0 ** torch.randint(-38, 38, (5000,))
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1.0 + 2**-8, 1.0 + 3 * 2**-8, 3.4e38])
    numbers = torch.cat([some, special, torch.tensor([float("nan")])])
    out = torch.empty(len(numbers), dtype=torch.bfloat16)

    narrow(numbers.numpy(), bits(out))

    assert torch.equal(out[:-1], numbers[:-1].bfloat16())
    assert out[-1].isnan()


def test_the_exponential_is_right_to_a_few_units_in_the_last_place():
    numbers = np.linspace(-86, 86, 5001, dtype=np.float32)
    own = np.array([exp(number) for number in numbers], np.float64)
    np.testing.assert_allclose(own, np.exp(numbers.astype(np.float64)), rtol=6e-6)
    assert exp(np.float32(-np.inf)) < 1e-37
