"""The products that the kernel computes are chosen by a table of shapes, and by nothing that a run
can change.
"""

from __future__ import annotations

import pytest
import torch
from tests.support.device_engine import DeviceRig, Repeater, decoder_of
from tests.support.reference_kernels import ReferenceKernels

from teneral.runtime.backends.cuda import decoder as products_module
from teneral.runtime.backends.cuda.decoder import RowProducts
from teneral.runtime.backends.torch.layers import Linear

PROMPT = (7, 11, 13, 17)


def test_shapes_in_the_table_go_to_the_kernel_and_others_to_torch(monkeypatch):
    monkeypatch.setattr(products_module, "KERNEL_SHAPES", frozenset({(32, 64)}))
    launch = ReferenceKernels()
    products = RowProducts(launch, "fp32")
    row = torch.randn(1, 64)
    for num_out, num_launched in ((32, 1), (48, 1)):
        projection = Linear(torch.randn(num_out, 64), None)
        torch.testing.assert_close(products(projection, row), projection(row))
        assert launch.launched.total() == num_launched


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
        shapes = decoder.executor.kernels.products.shapes
        rig.backend.work_when_idle()
        assert rig.backend.statistics().num_graphs == 1
        assert decoder.executor.kernels.products.shapes is shapes
        assert rig.say([PROMPT], 12) == before
