"""Models that several test files of this folder are about."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.packing_rig import SHAPE
from tests.support.tiny_models import save_tiny

from teneral import cli
from teneral.runtime.models.build import build_model
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.weights import DictWeights


@pytest.fixture(scope="module")
def quantised_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Configurations and tensors, by how they are quantised."""
    found = {}
    for kind in ("int8", "int4", "int4 --asymmetric", "int4 --group-size 128"):
        folder = tmp_path_factory.mktemp("quantised")
        save_tiny("qwen2", folder / "plain", dtype=torch.bfloat16, **SHAPE)
        packed, unpacked = str(folder / "packed"), str(folder / "unpacked")
        assert cli.run(["pack", str(folder / "plain"), packed, "--quiet", "--quantize", *kind.split()]) == 0
        assert cli.run(["unpack", packed, unpacked, "--quiet"]) == 0
        config = json.loads((folder / "unpacked" / "config.json").read_text())
        found[kind] = config, load_file(folder / "unpacked" / "model.safetensors")
    return found


@pytest.fixture
def quantised(quantised_models: dict[str, tuple[Any, Any]]) -> Any:
    def build(kind: str = "int4") -> Decoder:
        config, tensors = quantised_models[kind]
        built = build_model(config, DictWeights(tensors))
        assert isinstance(built, Decoder)
        return built

    return build
