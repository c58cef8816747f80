"""A model with wider rows says what it said before, and the new numbers are zeros in every group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.widened import widen
from safetensors.torch import load_file
from tests.support.decoding import Stepper
from tests.support.models import DictWeights, build_model

from teneral.runtime.models.decoder import Decoder

DEMO = Path(__file__).parents[2] / "demo" / "model"


def in_fp32(folder: Path) -> Decoder:
    tensors = {name: each.float() for name, each in load_file(folder / "model.safetensors").items()}
    decoder = build_model(json.loads((folder / "config.json").read_text()), DictWeights(tensors))
    assert isinstance(decoder, Decoder)
    return decoder


def test_it_says_what_it_said_before(tmp_path):
    widen(DEMO, tmp_path)
    tokens = torch.randint(1, 3000, (200,), generator=torch.Generator().manual_seed(1)).tolist()

    narrow, wide = (Stepper(in_fp32(folder)).step({"a": tokens})["a"] for folder in (DEMO, tmp_path))

    assert (wide - narrow).abs().mean() < 0.01 * narrow.std()  # norms were rounded
    assert (wide.argmax(-1) == narrow.argmax(-1)).float().mean() > 0.98


def test_every_64_columns_hold_48_of_the_models(tmp_path):
    widen(DEMO, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")

    assert (config["hidden_size"], config["num_attention_heads"]) == (256, 8)
    for name in ("embed_tokens", "layers.3.self_attn.q_proj", "layers.3.mlp.up_proj"):
        columns = (tensors[f"model.{name}.weight"] != 0).any(0).view(-1, 64)
        assert columns.sum(1).tolist() == [48] * 4
        assert not columns[:, 48:].any()
    output = tensors["model.layers.3.self_attn.o_proj.weight"]
    assert (output != 0).any(0).view(-1, 128).sum(1).tolist() == [96, 96]
    assert output.shape == (256, 256)
    assert config["rms_norm_eps"] == pytest.approx(0.75e-5)
