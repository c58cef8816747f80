"""The choice of a backend: the requested one, the model's needs, the installed ones, and the log."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.models import DictWeights, arrays_of
from tests.support.tiny_models import config_json, save_tiny, tensors_of, tiny_model

import teneral
from teneral import cli
from teneral.loader.errors import NativeLibraryError, UsageError
from teneral.loader.native import library as libraries
from teneral.runtime import torch_import
from teneral.runtime.backends import choose
from teneral.runtime.backends.choose import BackendChoice
from teneral.runtime.errors import ModelError
from teneral.runtime.models.build import build_model


def built(choice: BackendChoice, family: str = "llama", **overrides: Any) -> Any:
    oracle = tiny_model(family, **overrides)
    return build_model(config_json(oracle), DictWeights(tensors_of(oracle)), choice.model_backends())


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_opened", lambda: None)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda name: None if name == "torch" else find_spec(name))


@pytest.mark.skipif(libraries.library() is None, reason="there is no native library for this processor")
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
@pytest.mark.parametrize("asked", ["auto", "native"])
def test_without_either_the_error_says_how_to_get_a_library(asked: str) -> None:
    with pytest.raises(NativeLibraryError, match="there is no native library for this processor") as caught:
        BackendChoice(asked).check()
    assert "install a wheel of Teneral for this platform" in caught.value.hint
    assert "python build_native.py" in caught.value.hint


@pytest.mark.usefixtures("no_library")
def test_torch_and_devices_do_without_a_library() -> None:
    for choice in (BackendChoice(), BackendChoice("torch"), BackendChoice("auto", "cuda:0")):
        choice.check()
    with pytest.raises(NativeLibraryError):
        BackendChoice("native").check()


@pytest.mark.usefixtures("no_library", "no_torch")
def test_a_server_without_either_ends_at_once_with_that_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny("llama", tmp_path)
    assert cli.run(["serve", str(tmp_path), "--port", "0"]) == 12
    assert "there is no native library for this processor" in capsys.readouterr().err


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
