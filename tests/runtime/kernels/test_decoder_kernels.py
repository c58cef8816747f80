"""With compiled kernels a model says what it says with torch, to within what bf16 leaves open."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.decoding import Stepper, prompt_of
from tests.support.tiny_models import config_json, tensors_of, tiny_model

pytest.importorskip("numba", reason="kernels need the extra [cpu]")

from teneral.loader.timeline import Timeline
from teneral.runtime.kernels import prepare
from teneral.runtime.kernels.compile import compile_kinds, missing
from teneral.runtime.kernels.decoder import MAX_ALONE, SIZES, DecoderKernels, NotCompiledError
from teneral.runtime.kernels.prepare import prepare_kernels
from teneral.runtime.models.build import build_model
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.weights import DictWeights

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3, with norms of heads": ("qwen3", {}),
    "mistral, that forgets": ("mistral", {"sliding_window": 9}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama gelu, tied": ("llama", {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}),
}


def decoders(family: str, **overrides: Any) -> tuple[Decoder, Decoder]:
    """The same model in bf16 and, from the same bf16 weights, in fp32."""
    model = tiny_model(family, **overrides).to(torch.bfloat16)
    built = []
    for dtype in (torch.bfloat16, torch.float32):
        tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(model).items()}
        built.append(build_model(config_json(model), DictWeights(tensors)))
    return built[0], built[1]


def with_kernels(decoder: Decoder, *, everywhere: bool = True) -> DecoderKernels:
    kernels = DecoderKernels(decoder)
    if everywhere:
        kernels.use_for(range(1, max(SIZES) + 1))
    kernels.install()
    return kernels


def all_logits(decoder: Decoder) -> torch.Tensor:
    """Of a script of steps: prompts in torch, then one to eleven sequences of one or more tokens at a time."""
    torch.manual_seed(0)
    order = list(range(64))
    random.Random(3).shuffle(order)
    stepper = Stepper(decoder, block_order=order)
    names = list("abcdefghijk")
    outputs = [*stepper.step({name: prompt_of(12 + n, seed=n) for n, name in enumerate(names)}).values()]
    for number in range(len(names)):
        work = {name: [7 + number] for name in names[: number + 1]}
        work["a"] = [3, 4, 5][: 1 + number % 3]
        outputs += stepper.step(work).values()
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in outputs])


@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_are_as_near_to_the_exact_logits_as_torch_is(variant):
    family, overrides = VARIANTS[variant]
    in_bf16, in_fp32 = decoders(family, **overrides)
    exact = all_logits(in_fp32)
    torch_error = (all_logits(in_bf16) - exact).abs()

    with_kernels(in_bf16)
    own = all_logits(in_bf16)

    error = (own - exact).abs()
    assert error.mean() <= 1.2 * torch_error.mean()
    assert error.max() <= 2 * torch_error.max()
    assert not torch.equal(own, exact)


def test_rows_beyond_the_kernels_are_computed_by_torch():
    decoder, _ = decoders("qwen2")
    expected = Stepper(decoder).step({"a": prompt_of(max(SIZES) + 1)})["a"]
    with_kernels(decoder)
    assert torch.equal(Stepper(decoder).step({"a": prompt_of(max(SIZES) + 1)})["a"][:-1], expected[:-1])


def test_a_measurement_decides_nothing_and_a_size_stands_for_the_numbers_below():
    decoder, _ = decoders("qwen2")
    kernels = with_kernels(decoder, everywhere=False)

    kernels_s, torch_s = kernels.measure(4)

    assert kernels_s > 0
    assert torch_s > 0
    assert not any(kernels.is_used_for(num_rows) for num_rows in range(1, 40))
    kernels.use_at([4, 32])
    used = [num_rows for num_rows in range(1, 40) if kernels.is_used_for(num_rows)]
    assert used == [3, 4, *range(17, 33)]
    kernels.keep_to([1, 4])
    assert [num_rows for num_rows in range(1, 40) if kernels.is_used_for(num_rows)] == [3, 4]


def test_a_model_in_fp32_goes_on_with_torch_and_the_timeline_says_why():
    _, in_fp32 = decoders("llama")
    timeline = Timeline()

    assert not prepare_kernels(in_fp32, num_threads=1, timeline=timeline)

    assert in_fp32.kernels is None
    (span,) = [each for each in timeline.spans() if each.name == "compile kernels"]
    assert "bf16" in span.attributes["outcome"]
    with pytest.raises(NotCompiledError):
        DecoderKernels(in_fp32)


def test_kernels_are_prepared_beside_the_serving_and_measured():
    decoder, _ = decoders("qwen2")
    timeline = Timeline()

    assert prepare_kernels(decoder, num_threads=2, timeline=timeline)

    assert decoder.kernels is not None
    (span,) = [each for each in timeline.spans() if each.name == "compile kernels"]
    assert "torch" in span.attributes["1 rows, ms a layer"]


def test_a_width_that_no_kernel_takes_is_torchs(monkeypatch):
    decoder, _ = decoders("llama", intermediate_size=90)
    with pytest.raises(NotCompiledError, match="no kernel"):
        DecoderKernels(decoder)


def test_what_was_compiled_once_is_not_missing_any_more():
    decoder, _ = decoders("qwen2")
    kernels = DecoderKernels(decoder)
    compile_kinds(kernels.kinds)
    assert missing(kernels.kinds) == []
    assert missing(["heads:24"]) == ["heads:24"]
    with pytest.raises(ValueError, match="no kind of kernel"):
        compile_kinds(["int2"])


def test_kernels_that_an_image_brings_are_copied_to_where_numba_may_write(tmp_path, monkeypatch):
    brought = tmp_path / "image" / "kernels_1"
    brought.mkdir(parents=True)
    (brought / "bf16.nbc").write_bytes(b"compiled")
    brought.chmod(0o555)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "image"))
    monkeypatch.setattr(prepare.os, "access", lambda *_: False)
    monkeypatch.setattr(prepare.tempfile, "tempdir", str(tmp_path))

    prepare.keep_somewhere()

    own = Path(os.environ["NUMBA_CACHE_DIR"])
    assert own.parent == tmp_path
    assert (own / "kernels_1" / "bf16.nbc").read_bytes() == b"compiled"
    (own / "kernels_1" / "int8.nbc").write_bytes(b"more")


def test_threads_that_do_not_come_together_leave_it_to_one_and_in_the_end_to_torch():
    decoder, _ = decoders("qwen2")
    kernels = with_kernels(decoder)
    sizes: list[int] = []

    def never_with_others(team: Any, size: int) -> bool:
        sizes.append(size)
        return size == 1

    kernels._num_threads = 2
    for number in range(MAX_ALONE):
        assert kernels.is_used_for(1)
        kernels.run(never_with_others)
        assert sizes == [2, 1] * (number + 1)
    assert not kernels.is_used_for(1)
