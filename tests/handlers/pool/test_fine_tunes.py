"""`teneral pool run` of fine-tunes, stored as differences and as adapters: real packs, real servers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.adapters import save_adapter
from tests.support.pool_runs import PoolRun
from tests.support.tiny_models import save_tiny, tiny_model

from teneral import cli

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are watched as Linux does it"),
    pytest.mark.slow,
]


def packed(model: Path, artifact: Path, *flags: str) -> None:
    assert cli.run(["pack", str(model), str(artifact), "--quiet", *flags]) == 0


def test_fine_tunes_of_one_base_answer_as_whole_ones_do(tmp_path: Path) -> None:
    base = save_tiny("llama", tmp_path / "base-plain")
    packed(base, tmp_path / "base")
    for version in ("1", "2"):
        model = save_tiny("llama", tmp_path / f"plain-{version}")
        chance = torch.Generator().manual_seed(int(version))
        weights = {
            name: tensor * (1 + 0.05 * torch.randn(tensor.shape, generator=chance))
            for name, tensor in load_file(model / "model.safetensors").items()
        }
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        packed(model, tmp_path / "tuned" / version, "--base", str(tmp_path / "base"))
        packed(model, tmp_path / "whole" / version)
    file = """
version = 1
[defaults.serve]
kv_bytes = "8MiB"
threads = 1
[models.tuned]
source = "tuned/{version}"
base = "base"
versions = "all"
[models.whole]
source = "whole/{version}"
versions = "all"
[models.base]
source = "base"
[node]
memory = "8GiB"
"""
    with PoolRun(tmp_path, file) as run:
        texts = {}
        for version in ("1", "2"):
            texts[version] = run.complete(f"tuned@{version}", max_tokens=16).text
            assert texts[version] == run.complete(f"whole@{version}", max_tokens=16).text
        texts["base"] = run.complete("base", max_tokens=16).text
        assert len(set(texts.values())) == 3


def test_adapters_are_named_after_models_versions_and_aliases(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "plain")
    packed(model, tmp_path / "base" / "1")
    save_adapter(tmp_path / "adapters" / "legal", tiny_model("llama"), seed=1)
    file = """
version = 1
[models.base]
source = "base/{version}"
[models.base.serve]
adapters = "adapters/{name}"
kv_bytes = "8MiB"
threads = 1
[models.other]
source = "base/1"
[aliases]
short = "base"
[node]
memory = "8GiB"
"""
    with PoolRun(tmp_path, file) as run:
        plain = run.complete("base", max_tokens=16)
        expected = run.complete("base", max_tokens=16, lora="legal")
        assert expected.status == 200, expected.body
        assert expected.text != plain.text
        for name in ("base:legal", "BASE:legal", "base@1:legal", "short:legal"):
            answer = run.complete(name, max_tokens=16)
            assert (answer.status, answer.text) == (200, expected.text), (name, answer.body)
            assert answer.json["model"] == "base:legal"
        for name in ("base:none", "base@2:legal", "nothing:legal", "base:", ":legal", "other:legal"):
            missing = run.complete(name)
            assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found"), name
        assert "none" in run.complete("base:none").json["error"]["message"]
