"""`evaluate_against` over a library's copies: what is measured goes through them, on a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from teneral import cli
from teneral.loader.errors import UsageError
from teneral.loader.sources.file import FileStore
from teneral.runtime.errors import ModelError
from teneral.runtime.kernels import onednn
from teneral.runtime.kernels.choice import PRODUCT_SIZES, LinearBackend
from teneral.runtime.kernels.copies import ROUNDING
from teneral.runtime.models.linear import Linear
from teneral.runtime.models.packed import Copy
from teneral.runtime.models.quantized import QuantizedLinear
from teneral.runtime.quality.against import AgainstReport, Candidate, evaluate_against
from teneral.runtime.quality.text import read_text

DEMO = Path(__file__).parents[3] / "demo" / "model"
NUM_TOKENS = 300
ONEDNN, ONNX, OPENVINO = LinearBackend.ONEDNN, LinearBackend.ONNX_RUNTIME, LinearBackend.OPENVINO


def needs(backend: LinearBackend) -> Any:
    if backend is ONEDNN:
        is_here = onednn.can_pack(Linear(torch.zeros(64, 64, dtype=torch.bfloat16)))
    else:
        weight = QuantizedLinear(torch.zeros(64, 64, dtype=torch.int8), torch.ones(64, 1))
        is_here = ROUNDING[backend].can_pack(weight)
    return pytest.param(backend, marks=pytest.mark.skipif(not is_here, reason=f"{backend} is not here"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model in integers. Its rows of 192 numbers have no compiled kernels, which these need not care for."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("int8", "int4"):
        command = ["pack", str(DEMO), str(folder / kind), "--quiet", "--quantize", kind]
        assert cli.run(command) == 0
    return folder


@pytest.fixture(scope="module")
def in_torch(folder: Path) -> dict[str, AgainstReport]:
    return {kind: evaluated(folder / kind) for kind in ("int8", "int4")}


def evaluated(artifact: Path, **settings: Any) -> AgainstReport:
    original = Candidate(FileStore(DEMO))
    return evaluate_against(
        Candidate(FileStore(artifact)), original, read_text(None), max_tokens=NUM_TOKENS, **settings
    )


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.01), ("int4", 0.02)])
@pytest.mark.parametrize("backend", [needs(ONNX), needs(OPENVINO)])
def test_integers_over_copies_cost_little_more_than_integers(folder, in_torch, backend, kind, bound):
    over_copies, plain = evaluated(folder / kind, copies=backend), in_torch[kind].quality

    assert over_copies.quality.perplexity == pytest.approx(plain.perplexity, rel=bound)
    assert over_copies.quality.kl_nats < plain.kl_nats + 0.002
    assert over_copies.quality.kl_nats != plain.kl_nats
    computed = over_copies.as_json()["computed"]
    assert (computed["layers"], computed["head"], computed["as_served"]) == (backend, backend, False)
    assert (
        f"over copies: layers by {backend}, head by {backend}; the original by torch" in over_copies.render()
    )


@pytest.mark.parametrize("backend", [needs(ONEDNN)])
def test_bf16_over_copies_says_the_same_to_the_bit(backend):
    report = evaluated(DEMO, copies=backend)
    assert report.quality.kl_nats == 0
    assert report.quality.agreement == 1
    assert report.computing.layers == "onednn"


@pytest.mark.parametrize("backend", [needs(ONNX), needs(OPENVINO)])
def test_all_products_of_all_steps_go_over_copies(folder, monkeypatch, backend):
    monkeypatch.setattr(QuantizedLinear, "in_torch", in_torch := Counted(QuantizedLinear.in_torch))
    monkeypatch.setattr(Copy, "__call__", over_copies := Counted(Copy.__call__))
    checked = evaluated(folder / "int8", copies=backend)
    assert checked.computing.layers == backend
    assert over_copies.count > 100
    # A few products of each of the five kinds, to see that they agree: none of a step.
    assert in_torch.count == 5 * 2 * len(PRODUCT_SIZES)


class Counted:
    """A method that counts its calls."""

    def __init__(self, method: Any) -> None:
        self.method = method
        self.count = 0

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        def call(*arguments: Any) -> Any:
            self.count += 1
            return self.method(instance, *arguments)

        return call


def test_what_cannot_be_meant_is_refused(folder):
    with pytest.raises(UsageError, match="either compiled kernels"):
        evaluated(folder / "int8", copies=ONNX, as_served=True)
    with pytest.raises(UsageError, match="has no weights that onednn is there for"):
        evaluated(folder / "int8", copies=ONEDNN)
    with pytest.raises(UsageError, match="has no weights that openvino is there for"):
        evaluated(DEMO, copies=OPENVINO)


@pytest.mark.parametrize("backend", [needs(ONNX)])
def test_a_library_that_is_off_is_no_measurement(folder, monkeypatch, backend):
    honest = ROUNDING[backend].Product.__call__
    monkeypatch.setattr(
        ROUNDING[backend].Product, "__call__", lambda self, x, bias: honest(self, x, bias) * 1.1
    )
    with pytest.raises(ModelError, match=r"onnxruntime cannot compute .* it is 1\d\.\d% off"):
        evaluated(folder / "int8", copies=backend)
