"""The whole session by another execution provider than the CPU's, where the installed onnxruntime has one.

`scripts/conformance-onnx` installs onnxruntime-openvino in place of onnxruntime and runs these tests.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from tests.support.inspection import executable_of
from tests.support.onnx_artifacts import pack_named
from tests.support.paced import WAIT_S

from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.instance import Instance
from teneral.runtime.onnx.sessions import PROVIDERS, WholeModel

OTHERS = [name for name in PROVIDERS if name != "cpu"]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("model", ["resnet", "bert", "vit", "tabular"])
def test_a_provider_computes_what_the_cpu_does(model: str, name: str, tmp_path: Path) -> None:
    if PROVIDERS[name] not in ort.get_available_providers():
        pytest.skip(f"the installed onnxruntime has no {PROVIDERS[name]}: scripts/conformance-onnx")
    packed = pack_named(model, tmp_path)
    config = ServeConfig(model=str(packed.artifact), threads=1, ort_providers=f"{name},cpu")
    with Instance(config) as instance:
        runner = instance.onnx.result(WAIT_S)
        early = runner.submit(packed.made.inputs).result(WAIT_S)
        deadline_s = time.monotonic() + WAIT_S
        while not runner.statistics().is_whole and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert isinstance(executable_of(runner), WholeModel)
        assert executable_of(runner).providers[0] == PROVIDERS[name]
        late = runner.submit(packed.made.inputs).result(WAIT_S)
    for output, array in early.items():
        np.testing.assert_allclose(late[output], array, rtol=1e-4, atol=1e-5)
