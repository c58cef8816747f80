"""Adapters in the native core: against merged models of transformers, against numpy, and in company."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.adapters import SETS, load_adapter, merged, save_adapter
from tests.support.native import each_isa, loaded, threads
from tests.support.native_decoder import (
    NativeStepper,
    new_pool,
    quantized,
    spec_of,
    weights_of,
    with_codes,
    with_parameters_in,
)
from tests.support.reference.models import ReferenceDecoder
from tests.support.tiny_models import config_json, tiny_model

from teneral.runtime.adapters.loaded import LoadedAdapter
from teneral.runtime.backends.native.decoder import NativeDecoder
from teneral.runtime.models.decoder_config import DecoderConfig
from teneral.runtime.tensors import DType

PROMPT = [int(each) for each in np.random.default_rng(1).integers(0, 250, 23)]
OTHER = PROMPT[::-1][:9]
TORCH = {DType.BF16: torch.bfloat16, DType.F32: torch.float32}


@functools.cache
def model(family: str = "llama", dtype: DType = DType.F32, inner: int = 96) -> Any:
    return with_parameters_in(TORCH[dtype], tiny_model(family, intermediate_size=inner))


def load(folder: Path, of: Any) -> LoadedAdapter:
    """The adapter in this folder, complete."""
    return load_adapter(folder, DecoderConfig.from_json(config_json(of)))


def stepper(executor: Any, of: Any, dtype: DType, **adapters: Any) -> NativeStepper:
    return NativeStepper(executor, new_pool(spec_of(of, dtype), 64, 4), adapters=adapters)


def native(isa: str, of: Any, dtype: DType, weights: Any = None) -> NativeDecoder:
    return NativeDecoder(spec_of(of, dtype), weights or weights_of(of), loaded(isa))


@each_isa
@pytest.mark.parametrize("modules", SETS)
def test_logits_are_those_of_the_merged_model(isa: str, modules: str, tmp_path: Path) -> None:
    base = model()
    folder = save_adapter(tmp_path / "a", base, **SETS[modules])
    steps = stepper(native(isa, base, DType.F32), base, DType.F32, a=load(folder, base))
    got = steps.step({"a": PROMPT})["a"]
    with torch.no_grad():
        expected = merged(base, folder)(torch.tensor([PROMPT])).logits[0].numpy()
        plain = base(torch.tensor([PROMPT])).logits[0].numpy()
    assert np.abs(plain - expected).max() > 0.05  # the adapter matters
    np.testing.assert_allclose(got, expected, atol=2e-4, rtol=1e-3)


@each_isa
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("kind", ["floats", "int8", "int4", "nf4"])
def test_numpy_computes_the_same(isa: str, dtype: DType, kind: str, tmp_path: Path) -> None:
    base = model("qwen2", dtype, 128)  # integers of 4 bits come in runs of 64
    weights = weights_of(base)
    if kind == "nf4":
        weights = with_codes(weights)
    elif kind != "floats":
        weights = quantized(weights, bits=int(kind.removeprefix("int")))
    stored = torch.float32 if kind == "int8" else torch.bfloat16
    adapter = load(save_adapter(tmp_path / "a", base, dtype=stored, **SETS["patterns"]), base)
    reference = ReferenceDecoder(spec_of(base, dtype), weights)
    expected = stepper(reference, base, dtype, a=adapter).step({"a": PROMPT, "b": OTHER})
    got = stepper(native(isa, base, dtype, weights), base, dtype, a=adapter).step({"a": PROMPT, "b": OTHER})
    close = {"atol": 1e-3, "rtol": 1e-3} if dtype is DType.F32 else {"atol": 0.35, "rtol": 0.1}
    for name in ("a", "b"):
        np.testing.assert_allclose(got[name], expected[name], **close)


@each_isa
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_eight_adapters_in_one_step_equal_each_alone_bit_for_bit(
    isa: str, dtype: DType, tmp_path: Path
) -> None:
    base = model("llama", dtype)
    executor = native(isa, base, dtype)
    names = list(SETS)
    adapters = {
        f"s{number}": load(
            save_adapter(
                tmp_path / str(number), base, seed=number, dtype=TORCH[dtype], **SETS[names[number % 7]]
            ),
            base,
        )
        for number in range(8)
    }
    prompts = {name: [int(name[1:]) + 1, *PROMPT[: 5 + 2 * int(name[1:])]] for name in adapters}
    prompts["plain"] = PROMPT
    alone: dict[str, list[np.ndarray]] = {}
    for name, prompt in prompts.items():
        steps = stepper(executor, base, dtype, **adapters)
        alone[name] = [steps.step({name: prompt})[name], steps.step({name: [7]})[name]]
    plain = NativeStepper(executor, new_pool(spec_of(base, dtype), 64, 4))
    np.testing.assert_array_equal(plain.step({"plain": PROMPT})["plain"], alone["plain"][0])
    for num_threads in (1, 3):
        with threads(isa, num_threads):
            steps = stepper(executor, base, dtype, **adapters)
            together = steps.step(prompts)
            after = steps.step({name: [7] for name in prompts})
        for name in prompts:
            np.testing.assert_array_equal(together[name], alone[name][0], err_msg=name)
            np.testing.assert_array_equal(after[name], alone[name][1], err_msg=name)


@each_isa
@pytest.mark.parametrize("cut", [1, 6, 22])
def test_a_prompt_in_pieces_gives_the_same_bits(isa: str, cut: int, tmp_path: Path) -> None:
    base = model("llama", DType.BF16)
    executor = native(isa, base, DType.BF16)
    adapter = load(save_adapter(tmp_path / "a", base, target_modules="all-linear"), base)
    whole = stepper(executor, base, DType.BF16, a=adapter).step({"a": PROMPT})["a"]
    steps = stepper(executor, base, DType.BF16, a=adapter)
    first = steps.step({"a": PROMPT[:cut]}, cuts=(1,))["a"]
    rest = steps.step({"a": PROMPT[cut:], "b": OTHER})["a"]
    np.testing.assert_array_equal(np.concatenate([first, rest]), whole)


@each_isa
def test_a_long_prompt_is_several_runs(isa: str, tmp_path: Path) -> None:
    base = model()
    adapter = load(save_adapter(tmp_path / "a", base, **SETS["all linear"]), base)
    executor = native(isa, base, DType.F32)
    long = [int(each) for each in np.random.default_rng(2).integers(0, 250, 150)]
    with threads(isa, 4):
        whole = stepper(executor, base, DType.F32, a=adapter, b=adapter).step({"a": long, "b": OTHER})
    alone = stepper(executor, base, DType.F32, b=adapter).step({"b": OTHER})
    np.testing.assert_array_equal(whole["b"], alone["b"])
    steps = stepper(executor, base, DType.F32, a=adapter)
    pieces = [steps.step({"a": long[first : first + 31]})["a"] for first in range(0, 150, 31)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole["a"])
