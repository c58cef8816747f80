"""The products that the kernel computes are chosen by the architecture, and by nothing that a run
can change.
"""

from __future__ import annotations

import pytest
import torch
from tests.runtime.models.test_quantized import quantized
from tests.support.decoding import Stepper
from tests.support.device_engine import DeviceRig, Repeater, decoder_of
from tests.support.models import DictWeights, build_model
from tests.support.reference_kernels import ReferenceKernels

from teneral.runtime.backends.cuda.decoder import DeviceKernels
from teneral.runtime.backends.cuda.executor import CudaModelBackend
from teneral.runtime.backends.cuda.launch import LaunchError
from teneral.runtime.backends.cuda.products import MIN_ROW_ARCHITECTURE, CudaProducts
from teneral.runtime.backends.cuda.variants import integer_variant
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.backends.torch.layers import Linear, QuantizedLinear, SideBySide
from teneral.runtime.backends.torch.tensors import ComputePolicy

PROMPT = (7, 11, 13, 17)


@pytest.mark.parametrize("by_kernel", [True, False])
def test_the_architecture_decides_which_rows_the_kernel_multiplies(by_kernel):
    architecture = MIN_ROW_ARCHITECTURE - (not by_kernel)
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
    products = CudaProducts(launch, "fp32", rows_by_kernel=True)
    row = torch.randn(1, 64)
    numbers = torch.randn(1 + 32 * 64)
    aligned, unaligned = numbers[:-1].view(32, 64), numbers[1:].view(32, 64)
    for weight, bias in ((unaligned, None), (aligned, torch.randn(33)[1:])):
        projection = Linear(weight, bias)
        torch.testing.assert_close(products(projection, row), projection(row))
    assert launch.launched.total() == 0


def test_a_product_with_a_bias_is_added():
    products = CudaProducts(ReferenceKernels(), "fp32", rows_by_kernel=True)
    projection = Linear(torch.randn(32, 64), torch.randn(32))
    row, x = torch.randn(1, 64), torch.randn(1, 32)
    expected = x + projection(row)
    torch.testing.assert_close(products.add_(x, projection, row), expected)


@pytest.mark.parametrize(
    ("bits", "has_zero", "group_size"), [(4, False, 32), (4, True, 64), (8, False, 128), (8, True, 64)]
)
def test_few_rows_go_to_the_kernel_of_the_integers_and_many_to_torch(bits, has_zero, group_size):
    torch.manual_seed(0)
    launch = ReferenceKernels()
    products = CudaProducts(launch, "fp32", rows_by_kernel=True)
    num_groups = 128 // group_size
    low, high, dtype, width = (0, 256, torch.uint8, 64) if bits == 4 else (-128, 128, torch.int8, 128)
    levels = torch.randint(low, high, (40, width), dtype=dtype)
    scale, bias = torch.rand(40, num_groups).bfloat16() / 100, torch.randn(40)
    zero = torch.randint(0, 16, (40, num_groups)).to(torch.uint8 if bits == 4 else torch.int16)
    own = QuantizedLinear(levels, scale, zero if has_zero else None, bias, torch.randperm(128))
    for num_rows in (1, 16, 17, 64, 150, 513):
        x = torch.randn(num_rows, 128)
        torch.testing.assert_close(products(own, x), own(x), atol=1e-4, rtol=1e-4)
        together = SideBySide([own, own])
        torch.testing.assert_close(products(together, x), together(x), atol=1e-4, rtol=1e-4)
        summed = torch.randn(num_rows, 40)
        torch.testing.assert_close(
            products.add_(summed.clone(), own, x), summed + own(x), atol=1e-4, rtol=1e-4
        )
    is_ours = bits == 4 or not has_zero
    assert launch.launched.total() == (4 * (4 + 3) if is_ours else 0)


def test_groups_and_rows_that_the_kernels_do_not_take_are_torchs():
    shape = {"bits": 4, "num_rows": 1, "num_in": 128, "num_out": 8, "group_size": 32}
    assert integer_variant("bf16", "bf16", **shape) is not None
    for other in ({"group_size": 16}, {"num_in": 96}, {"num_rows": 65}, {"bits": 8, "group_size": 16}):
        assert integer_variant("bf16", "bf16", **{**shape, **other}) is None
    for group_size, piece in ((128, 128), (64, 64), (32, 32), (1024, 256)):
        variant = integer_variant(
            "bf16", "bf16", **{**shape, "bits": 8, "num_in": 1024, "group_size": group_size}
        )
        assert variant is not None
        assert dict(variant.constants)["PIECE"] == piece
    assert integer_variant("bf16", "float64", **shape) is None


class NoIntegers(ReferenceKernels):
    """A launcher from whose folder they are missing."""

    def prepare(self, variants):
        if any(variant.kernel.startswith("int") for variant in variants):
            raise LaunchError("it was not compiled ahead of time")


@pytest.mark.parametrize("make_launch", [ReferenceKernels, NoIntegers])
def test_a_model_of_integers_says_what_it_says_on_a_cpu(tmp_path, make_launch, caplog):
    config, tensors = quantized(tmp_path, "int4 --group-size 32", num_hidden_layers=2)
    on_cpu, on_device = (
        build_model(config, DictWeights(tensors), backends=[backend])
        for backend in (TorchBackend(ComputePolicy.of_this_machine("bfloat16")), CudaModelBackend())
    )
    launch = make_launch()
    with DeviceRig(on_device, launch, recorder=Repeater()) as rig:
        on_device.executor.kernels.products.prepare_integers(on_device.executor)
        rig.engine.start()
        answers = rig.say([PROMPT], 12)
    stepper, tokens = Stepper(on_cpu), list(PROMPT)
    logits = stepper.step({"a": tokens})["a"]
    for _ in range(12):
        tokens.append(int(logits[-1].argmax()))
        logits = stepper.step({"a": tokens[-1:]})["a"]
    assert answers == [tuple(tokens[len(PROMPT) :])]
    num_launched = sum(num for variant, num in launch.launched.items() if variant.kernel == "int4_product")
    assert (num_launched > 0) == (make_launch is ReferenceKernels)
    assert ("torch computes products with integers" in caplog.text) == (make_launch is NoIntegers)


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
        by_kernel = decoder.executor.kernels.products.rows_by_kernel
        rig.backend.work_when_idle()
        assert rig.backend.statistics().num_graphs == 1
        assert decoder.executor.kernels.products.rows_by_kernel is by_kernel
        assert rig.say([PROMPT], 12) == before
