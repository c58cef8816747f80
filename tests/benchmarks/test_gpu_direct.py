"""The benchmark of the path without torch runs to its end on the CPU: its figures mean nothing there."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu import direct, model_8b
from tests.support.direct_kernels import needs_double, open_device

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


@needs_double
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_it_measures_and_compares_bits(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_8b, "CONFIG", {**model_8b.CONFIG, **SMALL})
    for name, value in {
        "BATCHES": (1, 3), "CONTEXT": 40, "PROMPT_TOKENS": 200, "NUM_STEPS": 2, "GROUP_SIZE": 32, "FILL_BYTES": 4096,
    }.items():  # fmt: skip
        monkeypatch.setattr(direct, name, value)
    options = argparse.Namespace(layers=1, bits=bits, json=tmp_path / "out.json")
    assert direct.measure(open_device(), options, direct.Timer()) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["benchmark"] == "gpu_direct"
    assert report["claims"][0]["holds"]
    assert report["decode_3"]["tokens_s"] > 0
    assert report["prompt_s"] > 0


@needs_double
def test_without_a_device_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["direct"])
    assert direct.main() == 2
    assert "no device: " in capfd.readouterr().err + capfd.readouterr().out
