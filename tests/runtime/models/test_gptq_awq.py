"""GPTQ and AWQ checkpoints are read as they are: what is computed is what their integers mean."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.support.decoding import Stepper, prompt_of
from tests.support.gptq_awq_checkpoints import foreign_checkpoint
from tests.support.models import DictWeights, product, torch_model
from tests.support.quantized import AWQ, GPTQ
from tests.support.quantized import ForeignMatrix as Matrix
from tests.support.tiny_models import tiny_model

from teneral.loader.artifact import open_artifact
from teneral.loader.format.manifest import Tier
from teneral.loader.load.load import WeightLoad
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.unpack import unpack
from teneral.runtime.backends.torch.tensors import ComputePolicy, CpuDtypes
from teneral.runtime.errors import ModelError
from teneral.runtime.models import projections
from teneral.runtime.models.converted import ConvertedProjection
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.fields import Fields
from teneral.runtime.models.parameters import Parameters
from teneral.runtime.models.quantization_config import QuantizationConfig
from teneral.runtime.tensors import DType
from teneral.runtime.weights import StreamedWeights


def take_linear(*arguments: Any, bias: bool) -> Any:
    return product(projections.take_linear(*arguments, bias=bias))


def parameters_of(tensors: dict[str, torch.Tensor], note: dict[str, Any]) -> Parameters:
    config = QuantizationConfig.from_fields(Fields({"quantization_config": note}))
    return Parameters(DictWeights(tensors), "", config)


@given(
    columns=st.sampled_from([32, 64, 96, 128, 256]),
    group_size=st.sampled_from([16, 32, 64, 128, -1]),
    rows=st.sampled_from([8, 24]),
    bits=st.sampled_from([4, 8]),
    sym=st.booleans(),
    form=st.sampled_from(["gptq", "gptq_v2"]),
    act_order=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=80)
def test_gptq_means_what_its_integers_do(columns, group_size, rows, bits, sym, form, act_order, seed):
    if group_size != -1 and columns % group_size:
        group_size = 32
    note = {**GPTQ, "bits": bits, "group_size": group_size, "sym": sym, "checkpoint_format": form}
    matrix = Matrix(rows, columns, note, seed=seed, act_order=act_order)
    x = torch.randn(3, columns)

    projection = take_linear(parameters_of(matrix.tensors("x"), note), "x", columns, rows, bias=False)

    torch.testing.assert_close(projection(x), x @ matrix.weight().T, atol=1e-3, rtol=1e-4)


@given(
    columns=st.sampled_from([32, 64, 160, 256]),
    group_size=st.sampled_from([32, -1]),
    rows=st.sampled_from([8, 40]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=40)
def test_awq_means_what_its_integers_do(columns, group_size, rows, seed):
    note = {**AWQ, "group_size": group_size}
    matrix = Matrix(rows, columns, note, seed=seed)
    x = torch.randn(3, columns)

    projection = take_linear(parameters_of(matrix.tensors("x"), note), "x", columns, rows, bias=False)

    torch.testing.assert_close(projection(x), x @ matrix.weight().T, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("note", [GPTQ, AWQ])
def test_integers_and_zeros_are_kept_as_they_are(note):
    matrix = Matrix(16, 128, note)
    tensors = matrix.tensors("x")
    projection = projections.take_linear(parameters_of(tensors, note), "x", 128, 16, bias=False)
    assert isinstance(projection, ConvertedProjection)

    (found,) = projection.matrices()

    assert projection.is_settled
    assert (found.bits, found.group_size, found.weight.dtype) == (4, 32, DType.U8)
    assert found.weight.array.ctypes.data % 64 == 0
    assert found.zero.array.tolist() == matrix.zeros.tolist()
    np.testing.assert_array_equal(found.scale.array, matrix.scales.astype(np.float16).astype(np.float32))


def test_symmetric_weights_need_no_zeros_and_large_groups_are_several_small_ones():
    note = {**GPTQ, "sym": True, "group_size": -1}
    matrix = Matrix(16, 256, note)
    parameters = parameters_of(matrix.tensors("x"), note)

    (found,) = projections.take_linear(parameters, "x", 256, 16, bias=False).matrices()

    assert (found.zero, found.group_size) == (None, 128)


@pytest.mark.parametrize("same_order", [False, True])
def test_q_k_and_v_are_one_product_where_their_columns_agree(same_order):
    sizes = [("q", 32), ("k", 16), ("v", 16)]
    matrices = {
        name: Matrix(rows, 128, GPTQ, seed=rows, act_order=same_order or name == "k") for name, rows in sizes
    }
    tensors = {key: each for name, matrix in matrices.items() for key, each in matrix.tensors(name).items()}
    tensors["q.bias"] = torch.randn(32)  # some tools write biases where the model has none
    x = torch.randn(4, 128)

    projection = projections.take_stacked(parameters_of(tensors, GPTQ), sizes, 128, bias=False)

    expected = torch.cat([x @ matrix.weight().T for matrix in matrices.values()], dim=1)
    expected[:, :32] += tensors["q.bias"]
    torch.testing.assert_close(product(projection)(x), expected, atol=1e-3, rtol=1e-4)
    assert len(projection.matrices()) == (1 if same_order else 3)


def test_conversion_happens_once():
    matrix = Matrix(16, 64, AWQ)
    tensors = matrix.tensors("x")
    projection = take_linear(parameters_of(tensors, AWQ), "x", 64, 16, bias=False)
    x = torch.randn(2, 64)
    before = projection(x)
    for tensor in tensors.values():
        tensor.zero_()

    assert torch.equal(projection(x), before)


# -- what is refused

HOSTILE: dict[str, tuple[dict[str, Any], str, torch.Tensor]] = {
    "too few columns": (GPTQ, "x.qweight", torch.zeros(7, 16, dtype=torch.int32)),
    "floats for integers": (GPTQ, "x.qweight", torch.zeros(8, 16)),
    "zeros of another number of groups": (GPTQ, "x.qzeros", torch.zeros(3, 2, dtype=torch.int32)),
    "scales of another number of groups": (GPTQ, "x.scales", torch.ones(1, 16, dtype=torch.float16)),
    "an order of too few columns": (GPTQ, "x.g_idx", torch.zeros(63, dtype=torch.int32)),
    "columns where awq has rows": (AWQ, "x.qweight", torch.zeros(8, 16, dtype=torch.int32)),
    "zeros that are not packed": (AWQ, "x.qzeros", torch.zeros(2, 16, dtype=torch.int32)),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_tensors_that_do_not_fit_are_refused_by_name(kind):
    note, name, tensor = HOSTILE[kind]
    tensors = Matrix(16, 64, note).tensors("x") | {name: tensor}

    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        take_linear(parameters_of(tensors, note), "x", 64, 16, bias=False)


@pytest.mark.parametrize("name", ["x.qzeros", "x.scales"])
def test_a_missing_tensor_is_refused_by_name(name):
    tensors = Matrix(16, 64, GPTQ).tensors("x")
    del tensors[name]

    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        take_linear(parameters_of(tensors, GPTQ), "x", 64, 16, bias=False)


def test_groups_that_do_not_divide_the_columns_are_refused():
    note = {**GPTQ, "group_size": 48}

    with pytest.raises(ModelError, match="x has 64 columns, which are no multiple of the group_size 48"):
        take_linear(parameters_of(Matrix(16, 64, GPTQ).tensors("x"), note), "x", 64, 16, bias=False)


@pytest.mark.parametrize("order", [[0] * 40 + [1] * 24, [0] * 32 + [2] * 32, [-1] * 32 + [0] * 32])
def test_columns_in_groups_that_are_none_are_refused(order):
    tensors = Matrix(16, 64, GPTQ).tensors("x") | {"x.g_idx": torch.tensor(order, dtype=torch.int32)}
    projection = take_linear(parameters_of(tensors, GPTQ), "x", 64, 16, bias=False)

    with pytest.raises(ModelError, match=r"x\.g_idx does not put the 64 columns into 2 groups"):
        projection(torch.zeros(1, 64))


def test_integers_of_gptq_without_a_word_in_the_config_are_refused():
    with pytest.raises(ModelError, match=r"config\.json does not say"):
        take_linear(
            Parameters(DictWeights(Matrix(16, 64, GPTQ).tensors("x")), ""),
            "x",
            64,
            16,
            bias=False,
        )


@pytest.mark.parametrize(
    ("note", "message"),
    [
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "modelopt"}, "modelopt"),
        ({"bits": 4}, "no quantization_config.quant_method"),
        ({**GPTQ, "bits": 3}, "bits is 3"),
        ({**GPTQ, "group_size": 0}, "group_size is 0"),
        ({**GPTQ, "group_size": "128"}, "group_size is '128'"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "marlin"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format"),
        ({**GPTQ, "pack_dtype": "int8"}, "pack_dtype"),
        ({**GPTQ, "format": "marlin"}, "marlin"),
        ({**GPTQ, "rotation": "hadamard"}, "unknown field quantization_config.rotation"),
        ({**GPTQ, "act_bits": 8}, "act_bits"),
        ({**AWQ, "adapter": {"rank": 64}}, "unknown field quantization_config.adapter"),
        ({**AWQ, "data_type": "nv_fp"}, "data_type"),
        ({**AWQ, "version": "gemv"}, "gemv"),
        ({**AWQ, "bits": 8}, "bits is 8"),
        ({**AWQ, "zero_point": False}, "zero_point"),
        ([], "must be an object"),
    ],
)
def test_methods_and_formats_that_are_not_supported_are_refused_by_name(note, message):
    with pytest.raises(ModelError, match=message):
        QuantizationConfig.from_fields(Fields({"quantization_config": note}))


def test_notes_of_tools_that_change_no_result_are_read():
    notes = {
        "damp_percent": 0.1,
        "true_sequential": True,
        "meta": {"quantizer": "x"},
        "backend": "auto",
        "sym": True,
    }
    gptq = QuantizationConfig.from_fields(
        Fields({"quantization_config": {**GPTQ, **notes, "format": "gptq_v2", "rotation": None}})
    )
    awq = QuantizationConfig.from_fields(
        Fields({"quantization_config": {**AWQ, **notes, "format": "gemm", "desc_act": False}})
    )
    assert gptq is not None
    assert not gptq.stores_zero_minus_one
    assert awq is not None
    assert awq.bits == 4


# -- whole models


def foreign_model(note: dict[str, Any], *, act_order: bool = False) -> tuple[dict[str, Any], Any, Any]:
    """config.json, the checkpoint's tensors, and the same as floats."""
    model = tiny_model("llama", intermediate_size=128, num_hidden_layers=2, tie_word_embeddings=True)
    return foreign_checkpoint(model, note, act_order=act_order)


MODELS = {
    "gptq": (GPTQ, False),
    "gptq in its order of activation": ({**GPTQ, "desc_act": True}, True),
    "gptq of 8 bits": ({**GPTQ, "bits": 8, "group_size": 64, "sym": True}, False),
    "gptq, second format": ({**GPTQ, "checkpoint_format": "gptq_v2"}, False),
    "awq": (AWQ, False),
}


def logits_of(decoder: Any) -> torch.Tensor:
    assert isinstance(decoder, Decoder)
    return Stepper(decoder).step({"a": prompt_of(20)})["a"]


@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_computes_what_its_integers_mean(kind):
    note, act_order = MODELS[kind]
    config, checkpoint, floats = foreign_model(note, act_order=act_order)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}

    ours = logits_of(torch_model(config, DictWeights(checkpoint)))

    expected = logits_of(torch_model(plain, DictWeights(floats)))
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kind", ["gptq", "gptq in its order of activation", "awq"])
def test_a_checkpoint_in_fp16_is_computed_in_bf16_where_that_is_fast(kind):
    note, act_order = MODELS[kind]
    config, checkpoint, floats = foreign_model(note, act_order=act_order)
    checkpoint = {
        name: tensor.half() if tensor.dtype is torch.float32 else tensor
        for name, tensor in checkpoint.items()
    }
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    policy = ComputePolicy(CpuDtypes(bfloat16=True, float16=False))

    decoder = torch_model(config, DictWeights(checkpoint), policy=policy)
    ours = logits_of(decoder)

    expected = logits_of(torch_model(plain, DictWeights(floats)))
    assert isinstance(decoder, Decoder)
    assert decoder.dtype is DType.BF16
    assert torch.cosine_similarity(ours, expected, dim=-1).min() > 0.998


def saved(folder: Path, config: dict[str, Any], checkpoint: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in checkpoint.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", ["gptq in its order of activation", "awq"])
@pytest.mark.parametrize("way", ["plain", "packed", "unpacked"])
def test_a_checkpoint_is_packed_and_served_as_it_is(tmp_path, kind, way):
    note, act_order = MODELS[kind]
    config, checkpoint, _ = foreign_model(note, act_order=act_order)
    folder = saved(tmp_path / "plain", config, checkpoint)
    if way != "plain":
        pack(open_source(str(folder)), open_store(str(tmp_path / "packed")))
        folder = tmp_path / "packed"
    if way == "unpacked":
        unpack(open_source(str(folder)), tmp_path / "unpacked")
        folder = tmp_path / "unpacked"
    source = open_source(str(folder))

    with closing(source), WeightLoad(source, open_artifact(source)) as load:
        for group in load.manifest.groups:
            load.slab(group.index)[:] = 0xFF
        decoder = torch_model(config, StreamedWeights(load))
        load.start()
        ours = logits_of(decoder)

    expected = logits_of(torch_model(config, DictWeights(checkpoint)))
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("note", [GPTQ, AWQ])
def test_a_quantised_head_counts_where_the_config_says_tied(note):
    config, checkpoint, floats = foreign_model(note)
    head = Matrix(320, 64, note, seed=99)
    checkpoint |= head.tensors("lm_head")
    plain = {key: value for key, value in config.items() if key != "quantization_config"}

    ours = logits_of(torch_model(config, DictWeights(checkpoint)))

    untied = {**floats, "lm_head.weight": head.weight()}
    expected = logits_of(torch_model({**plain, "tie_word_embeddings": False}, DictWeights(untied)))
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=2e-3)


def test_a_tensor_of_a_layer_that_nothing_computes_with_is_refused_by_name():
    """AWQ divides the inputs of some activations by scales that lie next to them."""
    config, checkpoint, _ = foreign_model(AWQ)
    without_effect = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    torch_model(config, DictWeights(checkpoint | without_effect))

    scales = {"model.layers.1.mlp.act.scales": torch.ones(128)}
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.act\.scales"):
        torch_model(config, DictWeights(checkpoint | scales))


def test_what_was_converted_from_a_draft_is_not_kept():
    class Arriving(DictWeights):
        """Exact on demand."""

        is_exact = False

        def gate(self, names):
            weights = self

            class Gate:
                def opens(self, timeout_s: float) -> bool:
                    return weights.is_exact

                def __call__(self) -> None:
                    assert weights.is_exact

                def reading(self, tier: Tier) -> Any:
                    raise NotImplementedError

            return Gate()

    tensors = Matrix(16, 64, AWQ).tensors("x")
    exact = tensors["x.scales"].clone()
    tensors["x.scales"].mul_(1.1)
    weights = Arriving(tensors)
    config = QuantizationConfig.from_fields(Fields({"quantization_config": AWQ}))
    projection = take_linear(Parameters(weights, "", config), "x", 64, 16, bias=False)
    x = torch.randn(2, 64)

    drafted = projection(x)
    tensors["x.scales"].copy_(exact)
    weights.is_exact = True

    expected = x @ Matrix(16, 64, AWQ).weight().T
    torch.testing.assert_close(projection(x), expected, atol=1e-3, rtol=1e-4)
    assert not torch.allclose(drafted, expected, rtol=0.01)
