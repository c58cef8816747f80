"""Moments of a decoder's inputs, and what `pack --calibrate` makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tiny_models import save_tiny

from teneral import cli
from teneral.loader.sources.file.store import FileStore
from teneral.runtime.quality.calibration import calibrate
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
    calibration = calibrate(FileStore(model), read_text(str(text)), max_tokens=TOKENS)
    assert calibration.moments("model.norm.weight") is None
    for name in sorted(expected, key=lambda name: int(name.split(".")[2])):
        found = calibration.moments(name)
        assert found is not None
        np.testing.assert_allclose(found, expected[name].numpy(), rtol=2e-3, atol=2e-4, err_msg=name)


def test_a_layer_that_is_long_done_is_asked_for_in_vain(model: Path, text: Path) -> None:
    calibration = calibrate(FileStore(model), read_text(str(text)), max_tokens=64)
    last = len(calibration._executor.layers_of) - 1
    assert last >= 2
    assert calibration.moments(f"model.layers.{last}.mlp.down_proj.weight") is not None
    with pytest.raises(ValueError, match="layer 0"):
        calibration.moments("model.layers.0.mlp.down_proj.weight")


def test_calibrated_integers_are_nearer_to_the_original(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for name, flags in (
        ("plain", []),
        ("calibrated", ["--calibrate", str(text), "--calibrate-tokens", "1024"]),
    ):
        artifact = str(tmp_path / name)
        assert cli.run(["pack", str(model), artifact, "--quantize", "int4", *flags, "--quiet"]) == 0
        assert cli.run(["verify", artifact, "--quiet"]) == 0
        capsys.readouterr()
        arguments = [artifact, "--against", str(model), "--max-tokens", "512", "--json", "--quiet"]
        assert cli.run(["eval", *arguments]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, calibrated = found
    assert calibrated["artifact"]["weight_bytes"] == plain["artifact"]["weight_bytes"]
    assert calibrated["quality"]["kl_nats"] < plain["quality"]["kl_nats"]
