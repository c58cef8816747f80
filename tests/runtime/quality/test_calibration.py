"""Moments of a decoder's inputs, and what `pack --calibrate` makes of them."""

from __future__ import annotations

import ctypes
import json
import os
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.decoding import prompt_of
from tests.support.gptq_awq_checkpoints import is_projection
from tests.support.inspection import meters_of
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import DECODERS, config_json, save_tiny, tensors_of, tiny_model
from transformers.pytorch_utils import Conv1D

from teneral import cli
from teneral.loader.memory import limits as memory
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.quantize import InputMoments
from teneral.runtime.quality.calibration import (
    Calibration,
    calibrate,
    limit_blas_threads,
    own_text_tokens,
)
from teneral.runtime.quality.text import read_text

TOKENS = 700  # two windows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "original"
    save_tiny("llama", path, dtype=torch.float32, intermediate_size=128)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text"
    path.write_text(read_text(None).content * 2)
    return path


def inputs_by_transformers(model: Path, tokens: list[int]) -> dict[str, torch.Tensor]:
    """The mean of x xᵀ over the inputs of each projection."""
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in oracle.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(
                lambda _, given, __, name=name: seen.setdefault(f"{name}.weight", []).append(given[0][0])
            )
    with torch.inference_mode():
        for begin in range(0, len(tokens), 512):
            oracle(torch.tensor([tokens[begin : begin + 512]]))
    rows = {name: torch.cat(inputs) for name, inputs in seen.items()}
    return {name: x.T @ x / len(x) for name, x in rows.items()}


def test_moments_are_those_of_the_models_inputs(model: Path, text: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer(text.read_text(), add_special_tokens=False)["input_ids"][:TOKENS]
    expected = inputs_by_transformers(model, tokens)
    calibration = calibrate(FileStore(model), read_text(str(text)), expected, max_tokens=TOKENS)
    assert calibration.inputs_of("model.norm.weight") is None
    for name in sorted(expected, key=lambda name: int(name.split(".")[2])):
        found = calibration.inputs_of(name)
        assert found is not None
        oracle = InputMoments.of(expected[name].numpy())
        np.testing.assert_allclose(found.importance, oracle.importance, rtol=2e-3, err_msg=name)
        scale = np.abs(oracle.factor).max()
        np.testing.assert_allclose(found.factor, oracle.factor, atol=2e-2 * scale, err_msg=name)


@pytest.mark.parametrize("family", DECODERS)
def test_moments_of_every_family_are_those_of_its_models_inputs(family: str) -> None:
    oracle = tiny_model(family)
    seen: dict[str, torch.Tensor] = {}
    for name, module in oracle.named_modules():
        # What makes keys and values of latents has no moments.
        is_read = is_projection(f"{name}.weight") and not name.endswith("kv_b_proj")
        if isinstance(module, torch.nn.Linear | Conv1D) and is_read:
            module.register_forward_hook(
                lambda _, given, __, name=name: seen.update({f"{name}.weight": given[0].reshape(60, -1)})
            )
    tokens = prompt_of(60)
    with torch.inference_mode():
        oracle(torch.tensor([tokens]))
    decoder = build_model(config_json(oracle), DictWeights(tensors_of(oracle)))
    calibration = Calibration(decoder, [tokens], seen)

    assert len(seen) >= 3 * 2
    for name, x in sorted(seen.items(), key=lambda item: int(item[0].split(".")[2])):
        found = calibration.inputs_of(name)
        assert found is not None, name
        expected = InputMoments.of((x.T @ x / 60).numpy())
        np.testing.assert_allclose(found.importance, expected.importance, rtol=2e-3, err_msg=name)


def test_moments_are_kept_until_each_matrix_has_got_its_own(model: Path, text: Path) -> None:
    name = "model.layers.{}.self_attn.{}_proj.weight".format
    names = [name(layer, kind) for layer in range(3) for kind in "qk"]
    calibration = calibrate(FileStore(model), read_text(str(text)), names, max_tokens=64)
    assert calibration.inputs_of(name(2, "q")) is not None
    first = calibration.inputs_of(name(0, "q"))
    assert first is not None
    assert calibration.inputs_of(name(0, "k")) is first
    assert set(meters_of(calibration)) == {(1, "qkv"), (2, "qkv")}


def test_calibrated_integers_are_nearer_to_the_original(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for name, flags in (
        ("plain", ["--no-calibrate"]),
        ("calibrated", ["--calibrate", str(text), "--calibrate-tokens", "1024"]),
        ("by its own text", ["--calibrate-tokens", "1024"]),
    ):
        artifact = str(tmp_path / name)
        assert cli.run(["pack", str(model), artifact, "--quantize", "int4", *flags, "--quiet"]) == 0
        assert cli.run(["verify", artifact, "--quiet"]) == 0
        capsys.readouterr()
        arguments = [artifact, "--against", str(model), "--max-tokens", "512", "--json", "--quiet"]
        assert cli.run(["eval", *arguments]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, *calibrated = found
    for each in calibrated:
        assert each["artifact"]["weight_bytes"] == plain["artifact"]["weight_bytes"]
        assert each["quality"]["kl_nats"] < plain["quality"]["kl_nats"]


def test_a_models_own_text_is_the_same_each_time_and_in_independent_windows(model: Path) -> None:
    from teneral.loader.artifact import open_artifact
    from teneral.runtime.quality.evaluate import PartCounter, WholeDecoder
    from teneral.runtime.quality.sequences import sample_windows

    source = FileStore(model)
    decoder = WholeDecoder(source, open_artifact(source), threads=1, on_part=PartCounter(None, 0)).decoder
    windows = sample_windows(decoder, [3], 320)
    assert windows == sample_windows(decoder, [3], 320)
    assert {len(window) for window in windows} == {20}
    assert len(windows) == 16
    assert {window[0] for window in windows} == {3}
    assert len(set(map(tuple, windows))) == 16
    assert len({window[0] for window in sample_windows(decoder, [], 320)}) > 1


@pytest.mark.parametrize(
    ("columns", "num_tokens"), [(1, 1024), (128, 1024), (512, 4096), (1024, 8192), (4864, 8192)]
)
def test_a_models_own_text_is_as_long_as_its_matrices_need(columns: int, num_tokens: int) -> None:
    assert own_text_tokens(columns) == num_tokens


def test_the_work_is_announced(model: Path, text: Path) -> None:
    notes: list[str] = []
    calibrate(FileStore(model), None, [], note=notes.append)
    calibrate(FileStore(model), read_text(str(text)), [], max_tokens=64, note=notes.append)
    assert notes == [
        "calibrating: the model writes and reads 1,024 tokens",
        "calibrating: the model reads 64 tokens",
    ]


def test_a_narrow_model_is_calibrated_without_blas_threads_that_spin(model: Path) -> None:
    libraries = glob(f"{os.path.dirname(np.__file__)}.libs/libscipy_openblas64_*")
    if not libraries:
        pytest.skip("numpy has not brought OpenBLAS along")
    library = ctypes.CDLL(libraries[0])
    before = library.scipy_openblas_get_num_threads64_()
    try:
        limit_blas_threads(2)
        assert library.scipy_openblas_get_num_threads64_() == 2
        calibrate(FileStore(model), None, [])
        assert library.scipy_openblas_get_num_threads64_() == 1
    finally:
        limit_blas_threads(before)


def test_a_model_that_does_not_fit_is_packed_without_calibration(
    model: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "teneral.runtime.quality.calibration.available", lambda: memory.Available(100 * memory.MIB, "a test")
    )
    arguments = ["pack", str(model), str(tmp_path / "packed"), "--quantize", "int4", "--quiet"]
    assert cli.run([*arguments, "--calibrate", str(text)]) == 16
    assert cli.run(arguments) == 0
    assert "not calibrated: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen3_5_text", "gated delta nets"),
        ("bamba", "Mamba-2 layers"),
        ("gemma3n_text", "layers of different sizes"),
        ("gemma4_text", "layers of different sizes"),
    ],
)
def test_a_model_that_cannot_be_calibrated_is_packed_without_calibration(
    family: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = save_tiny(family, tmp_path / "original", dtype=torch.bfloat16)
    arguments = ["pack", str(original), str(tmp_path / "packed"), "--quantize", "int4", "--quiet"]
    assert cli.run(arguments) == 0
    assert f"has {kind}, which cannot be calibrated" in capsys.readouterr().err
