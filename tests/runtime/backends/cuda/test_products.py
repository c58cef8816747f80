"""The products that the kernel computes are chosen by the architecture, and by nothing that a run
can change.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.device_engine import DeviceRig, Repeater, decoder_of
from tests.support.reference_kernels import ReferenceKernels

from teneral.runtime.backends.cuda.decoder import MIN_PRODUCT_ARCHITECTURE, DeviceKernels, RowProducts
from teneral.runtime.backends.torch.layers import Linear

PROMPT = (7, 11, 13, 17)


@pytest.mark.parametrize("by_kernel", [True, False])
def test_the_architecture_decides_which_rows_the_kernel_multiplies(by_kernel):
    architecture = MIN_PRODUCT_ARCHITECTURE - (not by_kernel)
    launch = ReferenceKernels()
    kernels = DeviceKernels(
        decoder_of("llama").executor, launch, block_size=4, max_context=96, architecture=architecture
    )
    row = torch.randn(1, 64)
    for bias in (None, torch.randn(32)):
        projection = Linear(torch.randn(32, 64), bias)
        torch.testing.assert_close(kernels.products(projection, row), projection(row))
    assert launch.launched.total() == 2 * by_kernel


def test_matrices_and_biases_that_are_not_aligned_are_torchs():
    launch = ReferenceKernels()
    products = RowProducts(launch, "fp32", by_kernel=True)
    row = torch.randn(1, 64)
    numbers = torch.randn(1 + 32 * 64)
    aligned, unaligned = numbers[:-1].view(32, 64), numbers[1:].view(32, 64)
    for weight, bias in ((unaligned, None), (aligned, torch.randn(33)[1:])):
        projection = Linear(weight, bias)
        torch.testing.assert_close(products(projection, row), projection(row))
    assert launch.launched.total() == 0


def test_a_product_with_a_bias_is_added_by_torch():
    launch = ReferenceKernels()
    products = RowProducts(launch, "fp32", by_kernel=True)
    projection = Linear(torch.randn(32, 64), torch.randn(32))
    row, x = torch.randn(1, 64), torch.randn(1, 32)
    expected = x + projection(row)
    torch.testing.assert_close(products.add_(x, projection, row), expected)
    assert launch.launched.total() == 0


@pytest.mark.parametrize("has_events", [True, False])
def test_no_product_changes_its_kernel_while_a_server_runs(monkeypatch, has_events):
    """Steps of one row were measured before they were recorded: tokens depended on which was faster that day."""

    class Event:
        def __init__(self, **_):
            pytest.fail("a product was timed")

    if has_events:
        monkeypatch.setattr(torch.cuda, "Event", Event)
    launch = ReferenceKernels()
    decoder = decoder_of("llama")
    with DeviceRig(decoder, launch, recorder=Repeater(), max_running=1) as rig:
        rig.engine.start()
        before = rig.say([PROMPT], 12)
        by_kernel = decoder.executor.kernels.products.by_kernel
        rig.backend.work_when_idle()
        assert rig.backend.statistics().num_graphs == 1
        assert decoder.executor.kernels.products.by_kernel is by_kernel
        assert rig.say([PROMPT], 12) == before
