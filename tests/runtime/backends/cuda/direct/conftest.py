"""The device of these tests: the driver's library and the kernels, both compiled for the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.cuda_driver import COMPILER
from tests.support.direct_kernels import ON_DEVICE, Device, needs_double

from teneral.runtime.tensors import DType


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out, on a device, what only the double can do: there a skipped test counts as failed."""
    if ON_DEVICE:
        items[:] = [item for item in items if needs_double.mark not in item.iter_markers("skipif")]


@pytest.fixture(params=[DType.BF16, pytest.param(DType.F16, marks=pytest.mark.slow)], ids=["bf16", "fp16"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if COMPILER is None and not ON_DEVICE:
        pytest.skip("no C++ compiler")
    made = Device(request.param)
    yield made
    made.close()
