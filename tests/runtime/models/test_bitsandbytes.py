"""Checkpoints of bitsandbytes are read as they lie: what is computed is what their codes and integers mean."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.support.decoding import Stepper, prompt_of
from tests.support.gptq_awq_checkpoints import foreign_checkpoint
from tests.support.models import DictWeights, product
from tests.support.quantized import FP4, LLM_INT8, NF4, BitsandbytesMatrix, stored_matrix
from tests.support.reference.backend import ReferenceBackend
from tests.support.tiny_models import tiny_model, with_tensors

from teneral.loader.artifact import open_artifact
from teneral.loader.load.load import WeightLoad
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.unpack import unpack
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.errors import ModelError
from teneral.runtime.models import projections
from teneral.runtime.models.build import build_model
from teneral.runtime.models.fields import Fields
from teneral.runtime.models.matrices import CodeMatrix
from teneral.runtime.models.parameters import Parameters
from teneral.runtime.models.quantization_config import QuantizationConfig
from teneral.runtime.weights import StreamedWeights

PROMPTS = {"a": prompt_of(20), "b": prompt_of(7)}
NOTES = {"nf4": NF4, "fp4": FP4, "int8": LLM_INT8}
BACKENDS = [NativeBackend(), ReferenceBackend(), TorchBackend()]


def parameters_of(tensors: dict[str, torch.Tensor], note: dict[str, Any]) -> Parameters:
    config = QuantizationConfig.from_fields(Fields({"quantization_config": note}))
    return Parameters(DictWeights(tensors), "", config)


@pytest.mark.parametrize("kind", NOTES)
@pytest.mark.parametrize("shape", [(24, 64), (40, 128), (130, 256)])
def test_a_product_means_what_the_numbers_do(kind: str, shape: tuple[int, int]) -> None:
    matrix = stored_matrix(*shape, NOTES[kind])
    tensors = matrix.tensors("x") | {"x.bias": torch.randn(shape[0])}
    x = torch.randn(3, shape[1])

    taken = projections.take_linear(parameters_of(tensors, NOTES[kind]), "x", shape[1], shape[0], bias=True)

    expected = x @ matrix.weight().T + tensors["x.bias"]
    torch.testing.assert_close(product(taken)(x), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("block", [128, 256])
def test_blocks_may_be_longer(block: int) -> None:
    matrix = BitsandbytesMatrix(16, 512, NF4, block=block)
    taken = projections.take_linear(parameters_of(matrix.tensors("x"), NF4), "x", 512, 16, bias=False)
    x = torch.randn(3, 512)
    torch.testing.assert_close(product(taken)(x), x @ matrix.weight().T, atol=1e-3, rtol=1e-4)


def test_codes_stay_where_they_lie() -> None:
    tensors = BitsandbytesMatrix(16, 128, NF4).tensors("x")

    (found,) = projections.take_linear(parameters_of(tensors, NF4), "x", 128, 16, bias=False).matrices()

    assert isinstance(found, CodeMatrix)
    assert found.weight.array.ctypes.data == tensors["x.weight"].data_ptr()
    assert found.scale.shape == (16, 2)


def test_one_of_several_matrices_may_be_stored_as_it_was() -> None:
    """`llm_int8_skip_modules` and Unsloth's dynamic quantisation leave some out."""
    matrices = [BitsandbytesMatrix(32, 128, NF4), BitsandbytesMatrix(16, 128, LLM_INT8, seed=1)]
    plain = torch.randn(16, 128)
    tensors = matrices[0].tensors("q") | matrices[1].tensors("k") | {"v.weight": plain}
    x = torch.randn(4, 128)

    taken = projections.take_stacked(
        parameters_of(tensors, NF4), [("q", 32), ("k", 16), ("v", 16)], 128, bias=False
    )

    expected = x @ torch.cat([*(matrix.weight() for matrix in matrices), plain]).T
    torch.testing.assert_close(product(taken)(x), expected, atol=1e-3, rtol=1e-4)


# -- refusals


def state(**changes: Any) -> torch.Tensor:
    text = json.dumps(BitsandbytesMatrix(16, 128, NF4).state() | changes).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


STATE = "x.weight.quant_state.bitsandbytes__nf4"
MISFITS: dict[str, tuple[dict[str, Any], str, torch.Tensor]] = {
    "a row too many": (NF4, "x.weight", torch.zeros(17 * 64, 1, dtype=torch.uint8)),
    "codes in rows": (NF4, "x.weight", torch.zeros(16, 64, dtype=torch.uint8)),
    "blocks of 32": (NF4, "x.weight.absmax", torch.zeros(64, dtype=torch.uint8)),
    "no blocks": (NF4, "x.weight.absmax", torch.zeros(0, dtype=torch.uint8)),
    "scales of other numbers": (NF4, "x.weight.absmax", torch.zeros(32, dtype=torch.int8)),
    "a short table": (NF4, "x.weight.quant_map", torch.zeros(15)),
    "a short second table": (NF4, "x.weight.nested_quant_map", torch.zeros(255)),
    "a long state": (NF4, STATE, torch.zeros(5000, dtype=torch.uint8)),
    "no state": (NF4, STATE, torch.zeros(0, dtype=torch.uint8)),
    "scales of too few rows": (LLM_INT8, "x.SCB", torch.zeros(15)),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_tensors_that_do_not_fit_are_refused_by_name(kind: str) -> None:
    note, name, tensor = MISFITS[kind]
    tensors = stored_matrix(16, 128, note).tensors("x") | {name: tensor}

    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        projections.take_linear(parameters_of(tensors, note), "x", 128, 16, bias=False)


HOSTILE: dict[str, tuple[dict[str, Any], str, torch.Tensor, str]] = {
    "no JSON": (NF4, STATE, torch.zeros(9, dtype=torch.uint8), "no JSON"),
    "a list": (NF4, STATE, torch.frombuffer(bytearray(b"[1]"), dtype=torch.uint8), "must be an object"),
    "another shape": (NF4, STATE, state(shape=[128, 16]), "shape"),
    "another block": (NF4, STATE, state(blocksize=128), "blocksize"),
    "another kind": (NF4, STATE, state(quant_type="fp4"), "quant_type"),
    "an endless offset": (NF4, STATE, state(nested_offset=float("inf")), "nested_offset"),
    "a text for an offset": (NF4, STATE, state(nested_offset="0"), "nested_offset"),
    "blocks of no block": (NF4, STATE, state(nested_blocksize=0), "nested_blocksize"),
    "too few second scales": (NF4, STATE, state(nested_blocksize=16), "nested_absmax has 1"),
    "another table": (NF4, "x.weight.quant_map", torch.linspace(-1, 1, 16), "quant_map"),
    "no number in the table": (NF4, "x.weight.quant_map", torch.full((16,), torch.nan), "quant_map"),
    "no number for a scale": (NF4, "x.weight.nested_absmax", torch.tensor([torch.nan]), "not finite"),
    "an endless scale": (LLM_INT8, "x.SCB", torch.full((16,), torch.inf), "not finite"),
    "columns in tiles": (LLM_INT8, "x.weight_format", torch.tensor(2, dtype=torch.uint8), "weight_format"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_content_that_means_nothing_is_refused_at_its_first_use(kind: str) -> None:
    note, name, tensor, message = HOSTILE[kind]
    tensors = stored_matrix(16, 128, note).tensors("x") | {name: tensor}
    taken = projections.take_linear(parameters_of(tensors, note), "x", 128, 16, bias=False)

    with pytest.raises(ModelError, match=message):
        taken.matrices()


@pytest.mark.parametrize(
    ("note", "message"),
    [
        ({**NF4, "load_in_8bit": True}, "load_in_4bit"),
        ({**NF4, "load_in_4bit": False}, "load_in_4bit"),
        ({**NF4, "bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type is 'af4'"),
        ({**NF4, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        ({**LLM_INT8, "llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight"),
        ({**NF4, "rotation": True}, "unknown field quantization_config.rotation"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(note: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        QuantizationConfig.from_fields(Fields({"quantization_config": note}))


def test_codes_without_a_word_in_the_config_are_refused() -> None:
    tensors = DictWeights(BitsandbytesMatrix(16, 128, NF4).tensors("x"))
    with pytest.raises(ModelError, match=r"config\.json does not say so"):
        projections.take_linear(Parameters(tensors, ""), "x", 128, 16, bias=False)


# -- whole models


@pytest.mark.parametrize("kind", NOTES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_model_computes_what_its_numbers_mean(kind: str, family: str, backend: Any) -> None:
    sizes = {"moe_intermediate_size": 64} if "moe" in family else {"intermediate_size": 128}
    model = tiny_model(family, **sizes)
    config, checkpoint, floats = foreign_checkpoint(model, NOTES[kind])
    ours = Stepper(build_model(config, DictWeights(checkpoint), backends=[backend])).step(PROMPTS)
    oracle = with_tensors(model, floats)
    with torch.no_grad():
        for name, prompt in PROMPTS.items():
            right = oracle(input_ids=torch.tensor([prompt])).logits[0].numpy()
            np.testing.assert_allclose(ours[name], right, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kind", NOTES)
def test_a_checkpoint_is_packed_unpacked_and_served_bit_for_bit(tmp_path: Path, kind: str) -> None:
    model = tiny_model("qwen3", intermediate_size=128, num_hidden_layers=2)
    config, checkpoint, _ = foreign_checkpoint(model, NOTES[kind])
    (tmp_path / "plain").mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in checkpoint.items()},
        tmp_path / "plain" / "model.safetensors",
    )
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    pack(open_source(str(tmp_path / "plain")), open_store(str(tmp_path / "packed")))
    unpack(open_source(str(tmp_path / "packed")), tmp_path / "unpacked")
    backend = NativeBackend()
    expected = Stepper(build_model(config, DictWeights(checkpoint), backends=[backend])).step(PROMPTS)

    for folder in ("plain", "packed", "unpacked"):
        source = open_source(str(tmp_path / folder))
        with closing(source), WeightLoad(source, open_artifact(source)) as load:
            decoder = build_model(config, StreamedWeights(load), backends=[backend])
            load.start()
            ours = Stepper(decoder).step(PROMPTS)
        for name in PROMPTS:
            np.testing.assert_array_equal(ours[name], expected[name], err_msg=folder)


def test_scales_in_fp32_do_not_make_a_model_of_fp32() -> None:
    config, checkpoint, _ = foreign_checkpoint(tiny_model("llama", intermediate_size=128), FP4)
    few = {name: tensor.bfloat16() if "embed" in name else tensor for name, tensor in checkpoint.items()}
    model = build_model(config, DictWeights(few), backends=[NativeBackend()])
    assert model.computes.stored.label == "bfloat16"
