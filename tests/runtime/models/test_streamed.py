"""A model over weights that a load still brings: built before the first byte, equal to the finished one."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
import torch
from tests.support.decoding import Stepper, prompt_of
from tests.support.tiny_models import config_json, save_tiny, tensors_of, tiny_model

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.stream.load import WeightLoad
from teneral.loader.tools.pack import pack
from teneral.runtime.models.build import build_model
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.linear import Linear
from teneral.runtime.weights import DictWeights, StreamedWeights


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoder_built_before_its_load_starts_computes_what_a_finished_one_does(tmp_path, dtype, packed):
    folder = save_tiny("qwen2", tmp_path / "plain", dtype=dtype)
    if packed:
        pack(open_source(str(folder)), open_store(str(tmp_path / "packed")))
        folder = tmp_path / "packed"
    source = open_source(str(folder))
    manifest = open_artifact(source)
    config = json.loads(read_file(source, manifest, "config.json"))

    with closing(source), WeightLoad(source, manifest) as load:
        decoder = build_model(config, StreamedWeights(load))
        assert isinstance(decoder, Decoder)
        load.start()
        ours = Stepper(decoder).step({"a": prompt_of(40)})["a"]

    finished = tiny_model("qwen2", dtype=dtype)
    expected = Stepper(build_model(config_json(finished), DictWeights(tensors_of(finished)))).step(
        {"a": prompt_of(40)}
    )["a"]
    # The load's adjacent matrices are multiplied as one, the others one by one, which rounds differently.
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


def test_what_the_loader_puts_side_by_side_is_used_as_one_matrix(tmp_path):
    folder = save_tiny("qwen2", tmp_path, dtype=torch.bfloat16)
    source = open_source(str(folder))
    manifest = open_artifact(source)
    config = json.loads(read_file(source, manifest, "config.json"))

    with closing(source), WeightLoad(source, manifest) as load:
        decoder = build_model(config, StreamedWeights(load))

    assert len(decoder._layers) == 3
    for layer in decoder._layers:
        assert isinstance(layer.attention.qkv, Linear)
        assert isinstance(layer.mlp.gate_up, Linear)
