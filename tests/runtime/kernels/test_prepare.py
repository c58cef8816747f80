"""Compiling beside the serving ends with who wanted it, and begins when nobody waits for a first token."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny_models import config_json, tensors_of, tiny_model

from teneral.loader.timeline import Timeline
from teneral.runtime.kernels import prepare
from teneral.runtime.kernels.choice import SIZES, LinearBackend
from teneral.runtime.kernels.kinds import products_of
from teneral.runtime.kernels.prepare import compile_elsewhere, prepare_kernels
from teneral.runtime.models.build import build_model
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.quantized import QuantizedLinear
from teneral.runtime.weights import DictWeights

pytest.importorskip("numba", reason="kernels are compiled with numba")


def test_what_nobody_wants_any_more_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    ended = threading.Event()
    ended.set()
    compile_elsewhere(["heads:64"], ended)
    assert not list(tmp_path.rglob("*.nbi"))


class Waiting:
    """Whether somebody waits for a first token, as each question finds it."""

    def __init__(self, *answers: bool) -> None:
        self._answers = list(answers)
        self.num_asked = 0

    def __call__(self) -> bool:
        self.num_asked += 1
        return self._answers.pop(0) if self._answers else False


def test_nothing_is_prepared_while_somebody_waits_for_a_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "POLL_S", 0.001)
    monkeypatch.setattr(prepare, "QUIET_S", 0.05)
    waiting = Waiting(*[False] * 3, *[True] * 40)
    prepare._wait_until_quiet(waiting, threading.Event())
    assert waiting.num_asked > 43


def test_who_is_asked_without_a_pause_prepares_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "POLL_S", 0.001)
    monkeypatch.setattr(prepare, "MAX_BUSY_S", 0.05)
    waiting = Waiting(*[True] * 100_000)
    prepare._wait_until_quiet(waiting, threading.Event())
    assert 0 < waiting.num_asked < 100_000


def test_an_instance_that_is_closed_waits_for_nobody() -> None:
    ended = threading.Event()
    ended.set()
    waiting = Waiting(*[True] * 100)
    prepare._wait_until_quiet(waiting, ended)
    assert waiting.num_asked <= 1


def quantised() -> Decoder:
    """A model of int8 that kernels take."""
    model = tiny_model("qwen2", hidden_size=128, intermediate_size=256).to(torch.bfloat16)
    tensors = {}
    for name, tensor in tensors_of(model).items():
        tensors[name] = tensor.to(torch.bfloat16)
        if name.endswith("_proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 127
            tensors[name] = (tensor / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale.float()
    built = build_model(config_json(model), DictWeights(tensors))
    assert isinstance(built, Decoder)
    return built


def test_torch_is_measured_with_the_products_of_integers_that_it_is_left_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = quantised()
    integers = [each.linear for each in products_of(model) if isinstance(each.linear, QuantizedLinear)]
    seen = []

    def measure(kernels: Any) -> dict[int, dict[LinearBackend, int]]:
        seen.append(all(linear.expand is not None for linear in integers))
        seen.append(not any(kernels.is_used_for(num_rows) for num_rows in range(1, 33)))
        return {size: {LinearBackend.KERNELS: 1, LinearBackend.TORCH: 2} for size in SIZES}

    monkeypatch.setattr(prepare, "measure_layer", measure)
    assert prepare_kernels(model, num_threads=1, timeline=Timeline())
    assert len(integers) == 7 * model.num_layers  # none lies behind another here
    assert seen == [True, True]
    assert model.kernels is not None
    assert model.kernels.is_used_for(1)


@pytest.mark.parametrize("place", ["_try_expanding", "measure_layer"])
def test_kernels_that_cannot_be_tried_leave_the_decoder_without_any(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantised()

    def fail(_: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(prepare, place, fail)
    timeline = Timeline()
    assert prepare_kernels(model, num_threads=1, timeline=timeline) is None
    assert model.kernels is None
    (span,) = timeline.spans()
    assert "no such instruction" in span.attributes["outcome"]


@pytest.mark.parametrize("imports_numba_first", [False, True])
def test_numba_takes_openmps_threads_even_where_openvino_has_brought_others(
    imports_numba_first: bool,
) -> None:
    pytest.importorskip("openvino", reason="it brings TBB's threads")
    program = f"""
import sys
if {imports_numba_first}:
    import numba
import torch
from teneral.runtime.kernels.libraries.openvino import Product
from teneral.runtime.kernels.prepare import keep_somewhere
from teneral.runtime.models.quantized import QuantizedLinear
keep_copy = Product(QuantizedLinear(torch.zeros(64, 64, dtype=torch.int8), torch.ones(64, 1)), num_threads=2)
keep_somewhere()
import numba
from teneral.runtime.kernels.expand import expand_int8
import numpy as np
expand_int8(np.zeros((8, 128), np.int8), np.ones((8, 1), np.float32), np.zeros((8, 128), np.uint16))
print(numba.threading_layer())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=110
    )
    assert done.stdout.strip() == "omp"
