"""Matrices that lie back to back are used as one, others one by one, with the same result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.models import DictWeights, arrays_of, product

from teneral.runtime.backends.torch.layers import Linear, SideBySide
from teneral.runtime.backends.torch.tensors import stacked_view
from teneral.runtime.models.parameters import Parameters
from teneral.runtime.models.projections import take_stacked
from teneral.runtime.tensors import DType, Tensor

SIZES = [("q", 6), ("k", 2), ("v", 2)]
NUM_IN = 4


def in_one_slab(names_and_shapes: list[tuple[str, tuple[int, ...]]], gap: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors one behind another in one storage, `gap` elements apart."""
    counts = [torch.Size(shape).numel() for _, shape in names_and_shapes]
    slab = torch.randn(sum(counts) + gap * len(counts))
    tensors, at = {}, 0
    for (name, shape), count in zip(names_and_shapes, counts, strict=True):
        tensors[name] = slab[at : at + count].view(shape)
        at += count + gap
    return tensors


def shapes(*, bias: bool) -> list[tuple[str, tuple[int, ...]]]:
    weights = [(f"{name}.weight", (size, NUM_IN)) for name, size in SIZES]
    return weights + [(f"{name}.bias", (size,)) for name, size in SIZES] if bias else weights


def stacked(tensors: dict[str, torch.Tensor], *, bias: bool) -> Linear | SideBySide:
    parameters = Parameters(DictWeights(tensors), "")
    projection = product(take_stacked(parameters, SIZES, NUM_IN, bias=bias))
    assert isinstance(projection, Linear | SideBySide)
    return projection


@pytest.mark.parametrize("bias", [False, True])
def test_adjacent_matrices_become_one_view_of_the_same_memory(bias):
    tensors = in_one_slab(shapes(bias=bias))

    projection = stacked(tensors, bias=bias)

    assert isinstance(projection, Linear)
    assert projection.weight.data_ptr() == tensors["q.weight"].data_ptr()
    assert torch.equal(projection.weight, torch.cat([tensors[f"{name}.weight"] for name, _ in SIZES]))


@pytest.mark.parametrize("bias", [False, True])
def test_scattered_matrices_give_the_result_of_adjacent_ones(bias):
    tensors = in_one_slab(shapes(bias=bias))
    scattered = {name: tensor.clone() for name, tensor in tensors.items()}
    x = torch.randn(3, NUM_IN)

    projection = stacked(scattered, bias=bias)

    assert isinstance(projection, SideBySide)
    torch.testing.assert_close(projection(x), stacked(tensors, bias=bias)(x))


def test_a_view_sees_what_is_written_later():
    tensors = in_one_slab(shapes(bias=False))
    projection = stacked(tensors, bias=False)

    tensors["v.weight"].fill_(0.0)

    assert projection(torch.randn(1, NUM_IN))[:, 8:].abs().max() == 0


def test_what_does_not_lie_back_to_back_is_no_view():
    first, second = in_one_slab([("a", (2, 4)), ("b", (2, 4))]).values()
    gapped = list(in_one_slab([("a", (2, 4)), ("b", (2, 4))], gap=1).values())

    assert stacked_view([first, second]) is not None
    assert stacked_view([second, first]) is None
    assert stacked_view([first, second.clone()]) is None
    assert stacked_view([first.t(), second.t()]) is None
    assert stacked_view([first, second.view(4, 2)]) is None
    assert stacked_view([first, second.view(torch.int32)]) is None
    assert stacked_view(gapped) is None


def test_arrays_that_do_not_lie_back_to_back_are_no_view_either():
    first, second = arrays_of(in_one_slab([("a", (2, 4)), ("b", (2, 4))])).values()
    gapped = list(arrays_of(in_one_slab([("a", (2, 4)), ("b", (2, 4))], gap=1)).values())

    whole = first.stacked_with([second])
    assert whole is not None
    assert whole.array.ctypes.data == first.array.ctypes.data
    assert whole.shape == (4, 4)
    assert second.stacked_with([first]) is None
    assert first.stacked_with([Tensor(DType.F32, second.array.copy())]) is None
    assert first.stacked_with([Tensor(DType.F32, second.array.reshape(4, 2))]) is None
    assert first.stacked_with([Tensor(DType.I32, second.array.view(np.int32))]) is None
    assert gapped[0].stacked_with([gapped[1]]) is None
