"""Quantised models are served like any others: from artifacts and directories, cold, checked to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.decoding import Stepper
from tests.support.load import patience_s
from tests.support.tiny_models import save_tiny

from teneral import cli
from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.sources.base import Source
from teneral.loader.sources.file.store import FileStore
from teneral.runtime.config import ServeConfig
from teneral.runtime.errors import ModelError
from teneral.runtime.instance.instance import Instance
from teneral.runtime.step.requests import GenerationRequest, SamplingParams

WAIT_S = patience_s(60)
PROMPT = (5, 6, 7, 200, 31)
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"), intermediate_size=128)


def quantized(original: Path, out: Path, *flags: str) -> FileStore:
    assert cli.run(["pack", str(original), str(out), "--quiet", "--quantize", *flags]) == 0
    return FileStore(out)


def generated(source: Source, **settings: bool) -> list[int]:
    """What an instance answers while its weights come."""
    config = ServeConfig(model="memory", kv_bytes=8 << 20, connections=2, **settings)
    request = GenerationRequest(
        request_id="test",
        prompt_tokens=PROMPT,
        max_tokens=NUM_TOKENS,
        sampling=SamplingParams(temperature=0.0),
        ignore_eos=True,
    )
    with Instance(config, source=source) as instance:
        generation = instance.engine.result(WAIT_S).submit(request)
        tokens = [token for event in generation.events(WAIT_S) for token in event.tokens]
        assert instance.wait_exact()
    return tokens


def greedy(folder: Path) -> list[int]:
    """The same by the model alone, over the safetensors of a folder."""
    import json

    from safetensors.torch import load_file
    from tests.support.models import DictWeights, build_model

    from teneral.runtime.models.decoder import Decoder

    weights = DictWeights(load_file(folder / "model.safetensors"))
    decoder = build_model(json.loads((folder / "config.json").read_text()), weights)
    assert isinstance(decoder, Decoder)
    return Stepper(decoder).greedy({"a": PROMPT}, NUM_TOKENS)["a"]


@pytest.mark.parametrize("flags", [("int8",), ("int4",), ("int4", "--asymmetric")])
@pytest.mark.parametrize("draft_ahead", [False, True])
def test_a_quantised_artifact_answers_while_it_arrives_and_is_what_was_packed(
    original, tmp_path, flags, draft_ahead
):
    artifact = quantized(original, tmp_path / "artifact", *flags)
    assert cli.run(["unpack", str(tmp_path / "artifact"), str(tmp_path / "plain"), "--quiet"]) == 0

    tokens = generated(artifact, draft_ahead=draft_ahead, verify_exact=True)

    assert tokens == greedy(tmp_path / "plain")
    assert tokens == generated(FileStore(tmp_path / "plain"))


def test_a_method_that_is_not_supported_fails_the_instance_by_name(original, tmp_path):
    artifact = quantized(original, tmp_path / "artifact", "int8")
    note = b'"quant_method": "teneral"'
    assert note in read_file(artifact, open_artifact(artifact), "config.json")
    assert cli.run(["unpack", str(tmp_path / "artifact"), str(tmp_path / "plain"), "--quiet"]) == 0
    config = tmp_path / "plain" / "config.json"
    config.write_bytes(config.read_bytes().replace(note, b'"quant_method": "modelopt"'))

    with pytest.raises(ModelError, match="modelopt"):
        generated(FileStore(tmp_path / "plain"))
