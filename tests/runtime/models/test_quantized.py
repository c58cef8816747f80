"""Products with integers are those with the weights that they mean; models of them are those of these weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.support.decoding import Stepper, prompt_of
from tests.support.models import DictWeights, product, torch_model
from tests.support.quantized import slow_dequantize
from tests.support.tiny_models import save_tiny, tiny_model

from teneral import cli
from teneral.loader.format.nibbles import pack_nibbles
from teneral.runtime.backends.torch.layers import (
    Linear,
    QuantizedLinear,
    SideBySide,
    dequantize,
    unpack_nibbles,
)
from teneral.runtime.errors import ModelError
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.parameters import Parameters
from teneral.runtime.models.projections import take_linear, take_stacked
from teneral.runtime.tensors import DType

KINDS = ["int8", "int8 --group-size 32", "int4", "int4 --group-size 32", "int4 --asymmetric"]


def integers(
    rows: int, columns: int, *, bits: int, groups: int = 1, has_zero: bool = False, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A matrix's weight, scale and zero, of any values."""
    rng = np.random.default_rng(seed)
    if bits == 8:
        weight = torch.from_numpy(rng.integers(-127, 128, (rows, columns), dtype=np.int8))
    else:
        weight = torch.from_numpy(rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8))
    scale = torch.from_numpy(rng.normal(0, 0.02, (rows, groups)).astype(np.float32)).to(torch.bfloat16)
    top, dtype = (16, torch.uint8) if bits == 4 else (129, torch.int16)
    zero = torch.from_numpy(rng.integers(0, top, (rows, groups))).to(dtype) if has_zero else None
    return weight, scale, zero


def slow(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    return torch.from_numpy(
        slow_dequantize(weight.numpy(), scale.float().numpy(), None if zero is None else zero.numpy())
    )


@given(
    rows=st.integers(1, 3),
    runs=st.integers(1, 4),
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([32, 64, None]),
    has_zero=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=60)
def test_integers_mean_what_the_document_says(rows, runs, bits, group_size, has_zero, seed):
    columns = 64 * runs
    groups = columns // (group_size or columns)
    tensors = integers(rows, columns, bits=bits, groups=groups, has_zero=has_zero, seed=seed)

    assert torch.equal(dequantize(*tensors), slow(*tensors))


@given(st.integers(0, 1000))
@settings(deadline=None, max_examples=20)
def test_nibbles_are_packed_as_they_are_unpacked(seed):
    packed = integers(3, 192, bits=4, seed=seed)[0]

    np.testing.assert_array_equal(pack_nibbles(unpack_nibbles(packed).numpy()), packed.numpy())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 40])
def test_a_product_is_that_with_the_weights_that_are_meant(bits, groups, has_zero, dtype, num_rows):
    tensors = integers(70, 128, bits=bits, groups=groups, has_zero=has_zero)
    bias = torch.randn(70).to(dtype)
    x = torch.randn(num_rows, 128).to(dtype)

    product = QuantizedLinear(*tensors, bias)(x)

    assert product.dtype == dtype
    expected = x.double() @ slow(*tensors).double().T + bias.double()
    share = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 0.002}[dtype]
    tolerance = share * float(expected.abs().max()) if num_rows else 0.0
    torch.testing.assert_close(product.double(), expected, atol=tolerance, rtol=0.0)


def test_a_product_is_made_a_stretch_of_rows_at_a_time(monkeypatch):
    monkeypatch.setattr("teneral.runtime.backends.torch.layers.SCRATCH_ELEMENTS", 1000)
    tensors = integers(70, 128, bits=4, groups=2, has_zero=True)
    x = torch.randn(3, 128)

    torch.testing.assert_close(QuantizedLinear(*tensors)(x), x @ slow(*tensors).T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("offset", [1, 8, 16])
@pytest.mark.parametrize("num_rows", [1, 12])
def test_weights_may_lie_anywhere_in_memory(offset, num_rows):
    memory = torch.randint(-127, 128, (64 + 256 * 128,), dtype=torch.int8)
    weight = memory[offset : offset + 256 * 128].view(256, 128)
    scale, x = torch.rand(256, 1).bfloat16(), torch.randn(num_rows + 1, 128).bfloat16()[1:]

    out = QuantizedLinear(weight, scale)(x)

    torch.testing.assert_close(out.float(), x.float() @ slow(weight, scale, None).T, rtol=0.02, atol=10.0)


def test_a_projection_tells_what_a_kernel_has_to_know():
    packed = QuantizedLinear(*integers(70, 128, bits=4, groups=2))
    rows = QuantizedLinear(*integers(70, 128, bits=8))

    assert (packed.num_out, packed.num_in, packed.bits, packed.group_size) == (70, 128, 4, 64)
    assert (rows.num_out, rows.num_in, rows.bits, rows.group_size) == (70, 128, 8, 128)


# -- taken from tensors by their names


def parameters_of(tensors: dict[str, torch.Tensor], **quantization: Any) -> Parameters:
    from teneral.runtime.models.fields import Fields
    from teneral.runtime.models.quantization_config import QuantizationConfig

    note = {"quant_method": "teneral", "bits": 4, "group_size": 64, **quantization}
    config = QuantizationConfig.from_fields(Fields({"quantization_config": note}))
    return Parameters(DictWeights(tensors), "", config)


def named(name: str, weight: Any, scale: Any, zero: Any = None) -> dict[str, torch.Tensor]:
    tensors = {f"{name}.weight": weight, f"{name}.weight_scale": scale, f"{name}.weight_zero": zero}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize("bits", [4, 8])
def test_matrices_whose_pieces_lie_back_to_back_become_one(bits):
    parts = integers(96, 128, bits=bits, groups=2, has_zero=bits == 4)
    cut = [0, 64, 96]
    tensors: dict[str, torch.Tensor] = {}
    for name, begin, end in zip("qk", cut, cut[1:], strict=False):
        tensors |= named(name, *[part[begin:end] if part is not None else None for part in parts])
    biases = torch.randn(96)
    tensors |= {"q.bias": biases[:64], "k.bias": biases[64:]}

    one = product(take_stacked(parameters_of(tensors), [("q", 64), ("k", 32)], 128, bias=True))
    scattered = {name: tensor.clone() for name, tensor in tensors.items()}
    several = product(take_stacked(parameters_of(scattered), [("q", 64), ("k", 32)], 128, bias=True))

    assert isinstance(one, QuantizedLinear)
    assert one.weight.data_ptr() == tensors["q.weight"].data_ptr()
    assert isinstance(several, SideBySide)
    x = torch.randn(40, 128)
    expected = x @ slow(*parts).T + biases
    torch.testing.assert_close(one(x), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(several(x), expected, atol=1e-4, rtol=1e-4)


def test_matrices_of_different_kinds_stand_side_by_side():
    tensors = named("q", *integers(64, 128, bits=4, groups=2)) | named("k", *integers(32, 128, bits=8))
    tensors["v.weight"] = torch.randn(16, 128)

    sizes = [("q", 64), ("k", 32), ("v", 16)]
    projection = product(take_stacked(parameters_of(tensors), sizes, 128, bias=False))

    assert isinstance(projection, SideBySide)
    assert [type(part) for part in projection.parts] == [QuantizedLinear, QuantizedLinear, Linear]


HOSTILE = {
    "a scale of too few rows": {"x.weight_scale": torch.zeros(63, 2, dtype=torch.bfloat16)},
    "a scale of one dimension": {"x.weight_scale": torch.zeros(64, dtype=torch.bfloat16)},
    "a scale without groups": {"x.weight_scale": torch.zeros(64, 0, dtype=torch.bfloat16)},
    "groups that do not divide a row": {"x.weight_scale": torch.zeros(64, 3, dtype=torch.bfloat16)},
    "more groups than columns": {"x.weight_scale": torch.zeros(64, 256, dtype=torch.bfloat16)},
    "a scale of integers": {"x.weight_scale": torch.zeros(64, 2, dtype=torch.int32)},
    "a weight of half its columns": {"x.weight": torch.zeros(64, 32, dtype=torch.uint8)},
    "a weight of another kind": {"x.weight": torch.zeros(64, 128, dtype=torch.int32)},
    "a float weight with a scale": {"x.weight": torch.zeros(64, 128)},
    "a zero of another shape": {"x.weight_zero": torch.zeros(64, 1, dtype=torch.uint8)},
    "a zero of another kind": {"x.weight_zero": torch.zeros(64, 2, dtype=torch.int8)},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_pieces_that_do_not_fit_each_other_are_refused_by_name(kind):
    tensors = named("x", *integers(64, 128, bits=4, groups=2, has_zero=True)) | HOSTILE[kind]
    [name] = HOSTILE[kind]

    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        take_linear(parameters_of(tensors), "x", 128, 64, bias=False)


def test_four_bits_whose_rows_are_no_whole_runs_are_refused():
    tensors = named("x", torch.zeros(64, 48, dtype=torch.uint8), torch.zeros(64, 3, dtype=torch.bfloat16))

    with pytest.raises(ModelError, match=r"x\.weight with 96 columns"):
        take_linear(parameters_of(tensors), "x", 96, 64, bias=False)


def test_a_missing_zero_differs_from_one_that_is_not_needed():
    tensors = named("x", *integers(64, 128, bits=4, groups=2))

    assert take_linear(parameters_of(tensors), "x", 128, 64, bias=False).num_out == 64
    with pytest.raises(ModelError, match=r"no tensor 'x\.weight_zero'"):
        take_linear(parameters_of(tensors, symmetric=False), "x", 128, 64, bias=False)


# -- whole models


def quantized(folder: Path, kind: str, family: str = "llama", **shape: Any) -> tuple[dict[str, Any], Any]:
    """config.json and tensors of a tiny model that was packed with --quantize and unpacked again."""
    shape = {"intermediate_size": 128, **shape}
    save_tiny(family, folder / "plain", **{"dtype": torch.bfloat16, **shape})
    assert (
        cli.run(
            ["pack", str(folder / "plain"), str(folder / "packed"), "--quiet", "--quantize", *kind.split()]
        )
        == 0
    )
    assert cli.run(["unpack", str(folder / "packed"), str(folder / "unpacked"), "--quiet"]) == 0
    config = json.loads((folder / "unpacked" / "config.json").read_text())
    return config, load_file(folder / "unpacked" / "model.safetensors")


def floats_of(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[dict[str, Any], Any]:
    """The same model with the weights that the integers mean, in fp32."""
    dense = {}
    for name, tensor in tensors.items():
        if f"{name}_scale" in tensors:
            dense[name] = slow(tensor, tensors[f"{name}_scale"], tensors.get(f"{name}_zero"))
        elif not name.endswith(("_scale", "_zero")):
            dense[name] = tensor.float()
    return {key: value for key, value in config.items() if key != "quantization_config"}, dense


def logits_of(config: dict[str, Any], tensors: dict[str, torch.Tensor], prompt: list[int]) -> torch.Tensor:
    decoder = torch_model(config, DictWeights(tensors))
    assert isinstance(decoder, Decoder)
    stepper = Stepper(decoder)
    return torch.cat([stepper.step({"a": tokens})["a"] for tokens in (prompt[:-1], prompt[-1:])])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_quantised_model_computes_what_the_weights_that_are_meant_do(tmp_path, kind, tied):
    shape = {"num_hidden_layers": 2, "tie_word_embeddings": tied}
    config, tensors = quantized(tmp_path, kind, dtype=torch.float32, **shape)
    assert config["quantization_config"]["quant_method"] == "teneral"
    prompt = prompt_of(30)

    ours = logits_of(config, tensors, prompt)

    torch.testing.assert_close(ours, logits_of(*floats_of(config, tensors), prompt), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_family_runs_quantised_in_the_dtype_that_it_had(tmp_path, family):
    config, tensors = quantized(tmp_path, "int4", family)
    decoder = torch_model(config, DictWeights(tensors))
    assert decoder.dtype is DType.BF16
    assert decoder.new_kv(2, 4).dtype is DType.BF16
    prompt = prompt_of(20)

    ours = logits_of(config, tensors, prompt)

    expected = logits_of(*floats_of(config, tensors), prompt)
    assert torch.cosine_similarity(ours, expected, dim=-1).min() > 0.998


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantised_model_says_nearly_what_the_original_does(tmp_path, kind):
    config, tensors = quantized(tmp_path, kind, dtype=torch.float32)
    model = tiny_model("llama", intermediate_size=128)
    prompt = prompt_of(30)

    ours = logits_of(config, tensors, prompt)

    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    cosine = torch.cosine_similarity(ours, expected, dim=-1).mean()
    # Random weights amplify what is off in each layer, unlike trained ones.
    assert cosine > (0.998 if kind == "int8" else 0.85)


def test_a_model_whose_scale_of_the_embeddings_is_missing_is_refused_by_name(tmp_path):
    config, tensors = quantized(tmp_path, "int8", num_hidden_layers=1)
    del tensors["model.embed_tokens.weight_scale"]

    with pytest.raises(ModelError, match=r"no model\.embed_tokens\.weight_scale"):
        torch_model(config, DictWeights(tensors))


@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head", "model.layers.0.self_attn.o_proj"])
def test_a_scale_of_another_shape_is_refused_by_name(tmp_path, name):
    config, tensors = quantized(tmp_path, "int8", num_hidden_layers=1)
    tensors[f"{name}.weight_scale"] = tensors[f"{name}.weight_scale"][:-1]

    with pytest.raises(ModelError, match=rf"{name}\.weight_scale has shape"):
        torch_model(config, DictWeights(tensors))
