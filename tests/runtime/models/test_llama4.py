"""Llama 4: how its files say it, and experts as they are published; test_families.py compares all else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.support.decoding import Stepper, oracle_logits, prompt_of
from tests.support.models import DictWeights, build_model
from tests.support.reference.backend import ReferenceBackend
from tests.support.tiny_models import config_json, tensors_of, tiny_model

from teneral.loader.native.library import library
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions
from teneral.loader.tools.unpack import unpack
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.errors import ModelError
from teneral.runtime.models.decoder_config import DecoderConfig, LayerRotary, QueryScaling
from teneral.runtime.models.rotary import query_factors

BACKENDS: list[Any] = [TorchBackend(), ReferenceBackend()]
if library() is not None:
    BACKENDS.append(NativeBackend())
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}


def logits_of(config: Any, tensors: Any, backend: Any) -> torch.Tensor:
    decoder = build_model(config, DictWeights(tensors), backends=[backend])
    return Stepper(decoder).step({"a": prompt_of(40)})["a"]


@each_backend
def test_experts_of_one_tensor_are_those_that_are_stored_apart(backend: Any) -> None:
    """With the inputs first, as they are published, and with the outputs first."""
    model = tiny_model("llama4_text")
    published = {name: each.detach() for name, each in model.state_dict().items()}
    rows = {
        name: each.transpose(1, 2).contiguous() if ".experts." in name else each
        for name, each in published.items()
    }
    first, *others = (
        logits_of(config_json(model), tensors, backend) for tensors in (tensors_of(model), published, rows)
    )

    assert "model.layers.0.feed_forward.experts.gate_up_proj" in published
    assert all(torch.equal(first, other) for other in others)


def with_tower(text: Any) -> Any:
    """The model of which this is the text model."""
    config = transformers.Llama4Config(text_config=text.config.to_dict(), vision_config=_VISION)
    whole = transformers.Llama4ForConditionalGeneration(config).eval()
    whole.language_model.load_state_dict(text.state_dict())
    return whole


def test_the_text_model_of_files_with_a_tower_becomes_the_same_integers(tmp_path: Path) -> None:
    text = tiny_model("llama4_text")
    made, sizes = [], []
    for name, model in (("text", text), ("whole", with_tower(text))):
        model.save_pretrained(tmp_path / name)
        packed = open_store(str(tmp_path / f"{name}-packed"))
        pack(open_source(str(tmp_path / name)), packed, quantize=QuantizeOptions(8))
        unpack(open_source(str(tmp_path / f"{name}-packed")), tmp_path / f"{name}-integers")
        config = json.loads((tmp_path / f"{name}-integers" / "config.json").read_text())
        tensors = load_file(tmp_path / f"{name}-integers" / "model.safetensors")
        sizes.append(sum(each.dtype == torch.int8 for each in tensors.values()))
        made.append(logits_of(config, tensors, BACKENDS[-1]))

    assert torch.equal(*made)
    assert sizes[0] == sizes[1] > 30


@each_backend
def test_the_text_model_of_files_with_a_tower_is_computed(backend: Any) -> None:
    text = tiny_model("llama4_text")
    whole = with_tower(text)
    given = config_json(whole)

    decoder = build_model(given, DictWeights(whole.state_dict()), backends=[backend])
    ours = Stepper(decoder).step({"a": prompt_of(40)})["a"]

    assert given["model_type"] == "llama4"
    assert any(name.startswith("vision_model.") for name in whole.state_dict())
    assert decoder.vision is None, "the engine refuses images of such models"
    torch.testing.assert_close(ours, oracle_logits(text, prompt_of(40)), atol=1e-4, rtol=1e-4)


@each_backend
def test_experts_are_chosen_by_scores_where_their_sigmoids_are_all_1(backend: Any) -> None:
    model = tiny_model("llama4_text")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                parameter.mul_(25.0)

    ours = logits_of(config_json(model), tensors_of(model), backend)

    assert torch.sigmoid(torch.tensor(17.5)) == 1.0, "of which there are several in a row"
    torch.testing.assert_close(ours, oracle_logits(model, prompt_of(40)), atol=1e-4, rtol=1e-4)


def test_queries_are_scaled_as_transformers_scales_them() -> None:
    positions = np.arange(1 << 16, dtype=np.int64) * 160
    ours = query_factors(QueryScaling(8_192, 0.1, (True,)), positions)
    wide = torch.from_numpy(positions).float()
    theirs = torch.log1p(torch.floor((wide + 1.0) / 8_192)) * 0.1 + 1.0

    np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-7)


def test_files_that_leave_all_out_are_read_by_transformers_defaults() -> None:
    config = DecoderConfig.from_json({"model_type": "llama4_text"})

    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (5_120, 16_384, 48)
    assert config.experts is not None
    assert (config.experts.num, config.experts.size, config.experts.shared_size) == (16, 8_192, 8_192)
    assert all(config.experts.layers)
    assert config.windows == (8_192, 8_192, 8_192, None) * 12
    assert config.layer_rotary == ((LayerRotary.MAIN,) * 3 + (LayerRotary.NONE,)) * 12


def test_what_published_files_say_is_read() -> None:
    stated = {
        "no_rope_layers": [],
        "attn_temperature_tuning": 4,
        "moe_layers": [1, 3],
        "num_hidden_layers": 4,
    }
    config = DecoderConfig.from_json(
        {"model_type": "llama4_text", **stated, "max_position_embeddings": 10_485_760}
    )

    assert config.experts is not None
    assert config.experts.layers == (False, True, False, True)
    assert config.query_scaling == QueryScaling(8_192, 0.1, (False, False, False, True))
    assert config.max_context == 10_485_760


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_chunk_size", 0),
        ("attention_chunk_size", "8192"),
        ("floor_scale", 0),
        ("attn_scale", -0.1),
        ("attn_scale", float("nan")),
        ("attn_temperature_tuning", "yes"),
        ("attn_temperature_tuning", 5),
        ("use_qk_norm", 1),
        ("moe_layers", "all"),
        ("moe_layers", [True]),
        ("interleave_moe_layer_step", 0),
        ("num_experts_per_tok", 5),
        ("num_local_experts", 1 << 20),
        ("intermediate_size_mlp", 0),
        ("no_rope_layers", [1, 0]),
        ("layer_types", ["sliding_attention"] * 3),
        ("layer_types", ["chunked_attention"] * 2),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(key: str, value: Any) -> None:
    data = config_json(tiny_model("llama4_text"))
    with pytest.raises(ModelError, match=key):
        DecoderConfig.from_json({**data, key: value})


def test_chunks_without_a_size_are_refused() -> None:
    data = config_json(tiny_model("llama4_text"))
    stated = {"layer_types": ["chunked_attention"] * 3, "attention_chunk_size": None}
    with pytest.raises(ModelError, match="there is no attention_chunk_size"):
        DecoderConfig.from_json({**data, **stated})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "the family 'llama4' needs a text_config"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type is 'llama'"),
        ({"text_config": {"floor_scale": -1}}, "text_config.floor_scale is -1"),
    ],
)
def test_a_wrong_text_config_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        DecoderConfig.from_json({"model_type": "llama4", **change})
