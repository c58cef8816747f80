"""Checkpoints of fp8 and compressed-tensors are read as they lie: what is computed is what their numbers mean."""

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
from tests.support.quantized import (
    FP8,
    FP8_ROWS,
    INT8_ROWS,
    PACKED_INT4,
    CompressedMatrix,
    Float8Matrix,
    compressed,
    stored_matrix,
)
from tests.support.tiny_models import tiny_model

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
from teneral.runtime.models.matrices import IntegerMatrix
from teneral.runtime.models.parameters import Parameters
from teneral.runtime.models.quantization_config import QuantizationConfig
from teneral.runtime.tensors import DType
from teneral.runtime.weights import StreamedWeights

PROMPTS = {"a": prompt_of(20), "b": prompt_of(7)}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
NOTES = {
    "fp8 blocks": FP8,
    "fp8 matrices": STATIC,
    "fp8 rows": FP8_ROWS,
    "int8 rows": INT8_ROWS,
    "packed int8": compressed("pack-quantized", symmetric=False),
    "packed int4 rows": compressed("pack-quantized", num_bits=4),
    "packed int4": PACKED_INT4,
}


def parameters_of(tensors: dict[str, torch.Tensor], note: dict[str, Any]) -> Parameters:
    config = QuantizationConfig.from_fields(Fields({"quantization_config": note}))
    return Parameters(DictWeights(tensors), "", config)


@pytest.mark.parametrize("kind", NOTES)
@pytest.mark.parametrize("shape", [(24, 64), (40, 96), (16, 256)])
def test_a_product_means_what_the_numbers_do(kind: str, shape: tuple[int, int]) -> None:
    matrix = stored_matrix(*shape, NOTES[kind])
    x = torch.randn(3, shape[1])

    taken = projections.take_linear(
        parameters_of(matrix.tensors("x"), NOTES[kind]), "x", shape[1], shape[0], bias=False
    )

    torch.testing.assert_close(product(taken)(x), x @ matrix.weight().T, atol=1e-3, rtol=1e-4)


def test_columns_in_the_order_of_their_activation_are_put_into_groups() -> None:
    note = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, actorder="group")
    matrix = CompressedMatrix(16, 128, note, act_order=True)
    x = torch.randn(3, 128)

    taken = projections.take_linear(parameters_of(matrix.tensors("x"), note), "x", 128, 16, bias=False)

    assert taken.may_reorder_columns
    torch.testing.assert_close(product(taken)(x), x @ matrix.weight().T, atol=1e-3, rtol=1e-4)


def test_unpacked_integers_are_the_product_s_own_form() -> None:
    matrix = CompressedMatrix(16, 128, INT8_ROWS)
    tensors = matrix.tensors("x")

    (found,) = projections.take_linear(parameters_of(tensors, INT8_ROWS), "x", 128, 16, bias=False).matrices()

    assert isinstance(found, IntegerMatrix)
    assert (found.bits, found.group_size, found.scale.dtype) == (8, 128, DType.BF16)
    assert found.weight.array.ctypes.data == tensors["x.weight"].data_ptr()


@pytest.mark.parametrize(("sizes", "number"), [((32, 16, 16), 1), ((24, 16, 16), 3)])
def test_q_k_and_v_are_one_matrix_where_blocks_end_with_their_rows(
    sizes: tuple[int, ...], number: int
) -> None:
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    matrices = [Float8Matrix(rows, 128, FP8, seed=rows) for rows in sizes]
    tensors, at = {}, 0
    for kind in ("weight", "weight_scale_inv"):  # as a loader places them
        for name, matrix in zip("qkv", matrices, strict=True):
            own = matrix.tensors(name)[f"{name}.{kind}"].contiguous()
            place = memory[at : at + own.numel() * own.element_size()].view(own.dtype).view(own.shape)
            tensors[f"{name}.{kind}"] = place.copy_(own)
            at += own.numel() * own.element_size()
    x = torch.randn(4, 128)

    taken = projections.take_stacked(
        parameters_of(tensors, FP8), list(zip("qkv", sizes, strict=True)), 128, bias=False
    )

    assert len(taken.matrices()) == number
    expected = torch.cat([x @ matrix.weight().T for matrix in matrices], dim=1)
    torch.testing.assert_close(product(taken)(x), expected, atol=1e-3, rtol=1e-4)


# -- refusals

HOSTILE: dict[str, tuple[dict[str, Any], str, torch.Tensor]] = {
    "scales of other blocks": (FP8, "x.weight_scale_inv", torch.ones(2, 3)),
    "scales in three dimensions": (FP8, "x.weight_scale_inv", torch.ones(1, 2, 2)),
    "scales of other rows": (FP8_ROWS, "x.weight_scale", torch.ones(15, 1)),
    "integers for scales": (FP8_ROWS, "x.weight_scale", torch.ones(16, 1, dtype=torch.int32)),
    "powers of two for scales": (FP8_ROWS, "x.weight_scale", torch.ones(16, 1).to(torch.float8_e5m2)),
    "too few columns": (PACKED_INT4, "x.weight_packed", torch.zeros(16, 7, dtype=torch.int32)),
    "scales of five groups": (PACKED_INT4, "x.weight_scale", torch.ones(16, 5)),
    "zeros that are not packed": (PACKED_INT4, "x.weight_zero_point", torch.zeros(16, 2, dtype=torch.int8)),
    "an order of too few columns": (PACKED_INT4, "x.weight_g_idx", torch.zeros(9, dtype=torch.int32)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_tensors_that_do_not_fit_are_refused_by_name(kind: str) -> None:
    note, name, tensor = HOSTILE[kind]
    tensors = stored_matrix(16, 64, note).tensors("x") | {name: tensor}

    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        projections.take_linear(parameters_of(tensors, note), "x", 64, 16, bias=False)


@pytest.mark.parametrize(
    ("note", "name"),
    [
        (FP8, "x.weight_scale_inv"),
        (FP8_ROWS, "x.weight_scale"),
        (PACKED_INT4, "x.weight_scale"),
        (PACKED_INT4, "x.weight_zero_point"),
    ],
)
def test_a_missing_tensor_is_refused_by_name(note: dict[str, Any], name: str) -> None:
    tensors = stored_matrix(16, 64, note).tensors("x")
    del tensors[name]

    with pytest.raises(ModelError, match=name.removesuffix("_inv").replace(".", r"\.")):
        projections.take_linear(parameters_of(tensors, note), "x", 64, 16, bias=False)


@pytest.mark.parametrize(
    ("note", "message"),
    [
        ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype"),
        ({**FP8, "activation_scheme": "none"}, "activation_scheme"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": [0, 128]}, "weight_block_size"),
        ({**FP8, "rotation": True}, "unknown field quantization_config.rotation"),
        (compressed("nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'"),
        (compressed("pack-quantized", num_bits=3), "num_bits is 3"),
        (compressed("int-quantized", num_bits=4), "num_bits is 4"),
        (compressed("pack-quantized", type="float"), "type is 'float'"),
        (compressed("int-quantized", symmetric=False), "symmetric is False"),
        (compressed("float-quantized", type="float", strategy="tensor_group"), "tensor_group"),
        (compressed("float-quantized", type="float", dynamic=True), "dynamic is True"),
        (compressed("pack-quantized", actorder="other"), "actorder is 'other'"),
        (compressed("pack-quantized", dither=1), r"unknown field .*group_0\.weights\.dither"),
        ({**PACKED_INT4, "config_groups": {}}, "config_groups"),
        ({**PACKED_INT4, "config_groups": {"W4A16": ["Linear"]}}, r"config_groups\.W4A16 must be an object"),
        ({**PACKED_INT4, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({**PACKED_INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(note: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        QuantizationConfig.from_fields(Fields({"quantization_config": note}))


def test_the_older_name_of_the_settings_is_read_too() -> None:
    config = QuantizationConfig.from_fields(Fields({"compression_config": FP8_ROWS}))

    assert config is not None
    assert (config.method, config.bits, config.rounds_inputs) == ("compressed-tensors", 8, True)


# -- whole models


@pytest.mark.parametrize("kind", ["fp8 blocks", "fp8 rows", "packed int4"])
@pytest.mark.parametrize("backend", [TorchBackend(), NativeBackend()], ids=lambda backend: backend.name)
def test_a_checkpoint_is_packed_unpacked_and_served_bit_for_bit(
    tmp_path: Path, kind: str, backend: Any
) -> None:
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
    expected = Stepper(build_model(config, DictWeights(checkpoint), backends=[backend])).step(PROMPTS)

    for folder in ("plain", "packed", "unpacked"):
        source = open_source(str(tmp_path / folder))
        with closing(source), WeightLoad(source, open_artifact(source)) as load:
            stored = {tensor.name: tensor.dtype for tensor in load.manifest.tensors}
            assert (stored.get("model.layers.0.mlp.up_proj.weight") == "F8_E4M3") == kind.startswith("fp8")
            decoder = build_model(config, StreamedWeights(load), backends=[backend])
            load.start()
            ours = Stepper(decoder).step(PROMPTS)
        for name in PROMPTS:
            np.testing.assert_array_equal(ours[name], expected[name], err_msg=folder)
