"""The choice of a backend: the requested one, the model's needs, the installed ones, and the log."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tests.support.decoding import Stepper, oracle_greedy, prompt_of
from tests.support.models import DictWeights, arrays_of
from tests.support.tiny_models import config_json, tensors_of, tiny_model

import teneral
from teneral.loader.errors import UsageError
from teneral.runtime import torch_import
from teneral.runtime.backends import choose
from teneral.runtime.backends.choose import BackendChoice
from teneral.runtime.backends.native import backend as native
from teneral.runtime.errors import ModelError
from teneral.runtime.models.build import build_model


def built(choice: BackendChoice, family: str = "llama", **overrides: Any) -> Any:
    oracle = tiny_model(family, **overrides)
    return build_model(config_json(oracle), DictWeights(tensors_of(oracle)), choice.model_backends())


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda name: None if name == "torch" else find_spec(name))


@pytest.mark.skipif(native.library() is None, reason="there is no native library for this processor")
@pytest.mark.parametrize(("asked", "name"), [("auto", "native"), ("native", "native"), ("torch", "torch")])
@pytest.mark.parametrize("family", ["qwen2", "bert"])
def test_the_native_core_computes_unless_torch_is_asked_for(asked: str, name: str, family: str) -> None:
    assert built(BackendChoice(asked), family).executor.name == name


@pytest.mark.usefixtures("no_library")
def test_without_a_library_torch_computes_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert built(BackendChoice()).executor.name == "torch"
    assert "native has no library for this processor: torch computes instead" in caplog.text


@pytest.mark.usefixtures("no_library", "no_torch")
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_without_either_numpy_computes_and_says_so(family: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert built(BackendChoice(), family).executor.name == "numpy"
    assert "numpy computes, very slowly" in caplog.text


@pytest.mark.usefixtures("no_library", "no_torch")
def test_numpy_says_what_transformers_says() -> None:
    oracle, prompt = tiny_model("qwen3"), prompt_of(20)
    with torch.no_grad():
        expected = oracle_greedy(oracle, prompt, 12)
    assert Stepper(built(BackendChoice(), "qwen3")).greedy({"a": prompt}, 12)["a"] == expected


@pytest.mark.usefixtures("no_torch")
def test_what_the_core_lacks_and_nothing_else_has_is_an_error_that_says_what_to_install() -> None:
    choice = BackendChoice(compute_dtype="float16")
    with pytest.raises(ModelError, match="does not implement dtype = F16") as caught:
        built(choice)
    assert "pip install 'teneral[torch]'" in caught.value.hint


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("choice", [BackendChoice("torch"), BackendChoice("auto", "cuda:0")])
def test_torch_that_is_not_installed_is_missed_at_once(choice: BackendChoice) -> None:
    with pytest.raises(UsageError, match="torch is not installed") as caught:
        choice.check()
    assert caught.value.key == "backend"
    assert "teneral[torch]" in caught.value.hint


def test_load_into_without_torch_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_import, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"teneral\.load_into needs torch"):
        _ = teneral.load_into


def test_the_native_core_computes_on_no_gpu() -> None:
    with pytest.raises(UsageError, match="runs on the CPU only, but the weights are on cuda:0"):
        BackendChoice("native", "cuda:0").check()


def test_arrays_of_tensors_share_their_memory() -> None:
    tensors = {"a": torch.zeros(4), "b": torch.ones(2)}
    arrays = arrays_of(tensors)
    tensors["a"].fill_(7.0)
    assert arrays["a"].array.tolist() == [7.0] * 4
