"""Whole engines on the direct path: transformers' tokens, the same in any company, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.decoding import Stepper
from tests.support.direct_engine import MIXTURES, DirectModel, DirectRig, assert_greedy, greedy, prompts_of
from tests.support.direct_engine import Stepper as DirectStepper
from tests.support.direct_kernels import cuda, needs_double, needs_kernels
from tests.support.direct_program import tensors_of
from tests.support.gptq_awq_checkpoints import foreign_checkpoint
from tests.support.load import patience_s
from tests.support.models import arrays_of
from tests.support.native_decoder import with_parameters_in
from tests.support.quantized import FP8, FP8_ROWS, compressed
from tests.support.tiny_models import save_tiny, tiny_model

from teneral import cli
from teneral.runtime.backends.choose import BackendChoice
from teneral.runtime.backends.cuda.direct.products import matrices_of
from teneral.runtime.errors import CapacityError, DeviceLostError, ModelError
from teneral.runtime.kv.storage import KVKind
from teneral.runtime.models.build import build_model
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.gptq_awq import GptqAwqMatrix
from teneral.runtime.models.matrices import Float8Matrix
from teneral.runtime.step.requests import SamplingParams
from teneral.runtime.tensors import DType, Tensor
from teneral.runtime.weights import DictWeights

pytestmark = needs_kernels

FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "ministral", "phi3", "gemma2", "gemma3_text", "granite", "olmo2"),
    *("glm", "glm4", "cohere", "cohere2", "smollm3"),
)


@pytest.fixture(scope="module")
def llama() -> Iterator[DirectModel]:
    model = DirectModel.of(tiny_model("llama", dtype=torch.bfloat16))
    yield model
    model.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, dtype: torch.dtype) -> None:
    oracle = with_parameters_in(dtype, tiny_model(family))
    model = DirectModel.of(oracle)
    prompts = prompts_of(3)
    with DirectRig(model) as rig:
        found = rig.say(prompts, 6)
    model.close()
    assert_greedy(oracle, prompts, found)


@pytest.mark.parametrize("flags", [("int8",), ("int4",), ("int4", "--asymmetric")], ids=" ".join)
def test_quantised_models_say_what_the_cpu_says(flags: tuple[str, ...], tmp_path: Path) -> None:
    """A model with the integers of `pack --quantize`: matrices, head and embeddings."""
    folder = save_tiny("llama", tmp_path / "model", dtype=torch.bfloat16, intermediate_size=128)
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    assert cli.run(["pack", str(folder), str(packed), "--quantize", *flags, "--quiet"]) == 0
    assert cli.run(["unpack", str(packed), str(plain), "--quiet"]) == 0
    config, tensors = json.loads((plain / "config.json").read_text()), tensors_of(plain / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype is DType.I8
    model, prompt = DirectModel(config, tensors), prompts_of(1, seed=10)[0]
    with DirectRig(model) as rig:
        (found,) = rig.say([prompt], 6)
    model.close()
    on_cpu = build_model(config, DictWeights(tensors), BackendChoice(threads=1).model_backends())
    assert isinstance(on_cpu, Decoder)
    assert found == tuple(Stepper(on_cpu).greedy({"a": list(prompt)}, 6)["a"])


def in_bf16(checkpoint: dict[str, torch.Tensor]) -> dict[str, Tensor]:
    """With what is not quantised."""
    wide = {name for name, tensor in checkpoint.items() if tensor.dtype is torch.float32}
    return arrays_of({n: t.to(torch.bfloat16) if n in wide else t for n, t in checkpoint.items()})


def assert_says_what_the_cpu_says(
    config: dict[str, Any], checkpoint: dict[str, torch.Tensor], matrix: type[Any]
) -> None:
    """Computed in bf16, with a first layer's projection that is stored as such a matrix."""
    tensors, prompt = in_bf16(checkpoint), prompts_of(1, seed=10)[0]
    model = DirectModel(config, tensors)
    assert isinstance(matrices_of(model.decoder.weights.layers[0].output)[0], matrix)
    with DirectRig(model) as rig:
        (found,) = rig.say([prompt], 6)
    model.close()
    on_cpu = build_model(config, DictWeights(tensors), BackendChoice(threads=1).model_backends())
    assert isinstance(on_cpu, Decoder)
    assert found == tuple(Stepper(on_cpu).greedy({"a": list(prompt)}, 6)["a"])


@pytest.mark.parametrize("note", [FP8, FP8_ROWS, {"quant_method": "fp8", "activation_scheme": "static"}])
def test_checkpoints_of_fp8_say_what_the_cpu_says(note: dict[str, Any]) -> None:
    config, checkpoint, _ = foreign_checkpoint(tiny_model("llama", intermediate_size=128), note)
    assert_says_what_the_cpu_says(config, checkpoint, Float8Matrix)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
PACKED = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False)


@pytest.mark.parametrize(
    "note", [GPTQ, {**GPTQ, "group_size": -1, "checkpoint_format": "gptq_v2"}, AWQ, PACKED]
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_checkpoints_of_gptq_and_awq_say_what_the_cpu_says(family: str, note: dict[str, Any]) -> None:
    config, checkpoint, _ = foreign_checkpoint(tiny_model(family, intermediate_size=128), note)
    assert_says_what_the_cpu_says(config, checkpoint, GptqAwqMatrix)


def test_columns_in_an_order_are_refused_whether_the_config_says_it_or_not() -> None:
    oracle, whole = tiny_model("llama", intermediate_size=128), {"a": [1, 2, 3]}
    for act_order in (True, False):
        config, checkpoint, _ = foreign_checkpoint(oracle, GPTQ, act_order=act_order)
        for name in [name for name in checkpoint if name.endswith(".qweight") and not act_order]:
            num_in = 8 * len(checkpoint[name])
            checkpoint[name.replace("qweight", "g_idx")] = torch.arange(num_in, dtype=torch.int32) // 32
        tensors = in_bf16(checkpoint)
        model = DirectModel(config, tensors)
        stepper = DirectStepper(model)
        if act_order:
            with pytest.raises(ModelError, match="g_idx puts columns in groups by an order, of which config"):
                stepper.run(whole)
        else:
            stepper.run(whole)  # they say what is so anyway
        stepper.close()
        model.close()
        config["quantization_config"] = {**GPTQ, "desc_act": True}
        with pytest.raises(
            ModelError, match=r"without an order of columns \(desc_act\), and not model.layers.0"
        ):
            DirectModel(config, tensors)


@pytest.mark.parametrize("note", [{**GPTQ, "bits": 8}, {**GPTQ, "group_size": 16}])
def test_gptq_that_kernels_lack_is_refused(note: dict[str, Any]) -> None:
    config, checkpoint, _ = foreign_checkpoint(tiny_model("llama", intermediate_size=128), note)
    with pytest.raises(ModelError, match="takes matrices of GPTQ, AWQ and compressed-tensors in 4 bits"):
        DirectModel(config, in_bf16(checkpoint))


def test_windows_forget() -> None:
    oracle = tiny_model("mistral", dtype=torch.bfloat16, sliding_window=5)
    model = DirectModel.of(oracle)
    with DirectRig(model) as rig:
        found = rig.say(prompts_of(2, seed=1), 5)
    model.close()
    assert found == [greedy(oracle, prompt, 5) for prompt in prompts_of(2, seed=1)]


def test_answers_are_the_same_alone_in_company_in_chunks_and_preempted(llama: DirectModel) -> None:
    """Greedy and drawn ones, with penalties, top-k and top-p."""
    prompts = prompts_of(6, seed=2)
    for sampling in (
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.2, top_p=0.95, top_k=60, repetition_penalty=1.1, seed=7),
    ):
        with DirectRig(llama) as rig:
            alone = [rig.say([prompt], 12, sampling=sampling)[0] for prompt in prompts]
            assert rig.say(prompts, 12, sampling=sampling) == alone
        with DirectRig(llama, max_step_tokens=10, max_prefill_tokens=5, max_running=3) as rig:
            assert rig.say(prompts, 12, sampling=sampling) == alone
        with DirectRig(llama, num_blocks=16, max_running=4) as rig:
            assert rig.say(prompts, 12, sampling=sampling) == alone
            assert rig.engine.statistics().preemptions_total > 0


@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_say_what_transformers_says(family: str) -> None:
    """In fp16: in bf16 many a row is between two experts."""
    oracle = with_parameters_in(torch.float16, tiny_model(family, **MIXTURES[family]))
    model = DirectModel.of(oracle)
    prompts = prompts_of(3)
    with DirectRig(model) as rig:
        found = rig.say(prompts, 6)
    model.close()
    assert_greedy(oracle, prompts, found)


@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3_text", "granite", "olmo2", "glm4", "cohere2", "smollm3", *MIXTURES]
)
def test_each_kind_of_norm_rotation_cap_and_mixture_gives_the_same_in_company_and_in_chunks(
    family: str,
) -> None:
    model = DirectModel.of(tiny_model(family, dtype=torch.bfloat16, **MIXTURES.get(family, {})))
    prompts = prompts_of(3, seed=9)
    with DirectRig(model) as rig:
        alone = [rig.say([prompt], 10)[0] for prompt in prompts]
        assert rig.say(prompts, 10) == alone
    with DirectRig(model, max_step_tokens=10, max_prefill_tokens=5, max_running=3) as rig:
        assert rig.say(prompts, 10) == alone
    model.close()


def test_keys_and_values_of_int8_give_the_same_in_company_in_chunks_and_preempted(llama: DirectModel) -> None:
    prompts = prompts_of(6, seed=2)
    with DirectRig(llama, kv_dtype=KVKind.INT8) as rig:
        alone = [rig.say([prompt], 12)[0] for prompt in prompts]
        assert rig.say(prompts, 12) == alone
        assert rig.kv.element_bytes == 1
    with DirectRig(llama, kv_dtype=KVKind.INT8, num_blocks=8, max_running=4, max_prefill_tokens=5) as rig:
        assert rig.say(prompts, 12) == alone
        assert rig.engine.statistics().preemptions_total > 0


def test_steps_that_come_often_become_graphs_with_the_same_tokens(llama: DirectModel) -> None:
    prompts = prompts_of(3, seed=3)
    with DirectRig(llama) as rig:
        first = rig.say(prompts, 20)
        statistics = rig.backend.statistics()
        assert statistics.num_graphs > 0
        assert statistics.graph_steps_total > 0
        assert rig.say(prompts, 20) == first
        rig.backend.make_room()
        assert rig.backend.statistics().num_graphs == 0
        assert rig.say(prompts, 20) == first


def test_prompts_have_log_probabilities(llama: DirectModel) -> None:
    """Of the prompt's tokens, computed in chunks, and of the answer's."""
    oracle = tiny_model("llama", dtype=torch.bfloat16).float()
    prompt = prompts_of(1, seed=4)[0] + (5, 6, 7)
    with DirectRig(llama, max_step_tokens=16, max_prefill_tokens=7) as rig:
        (generation,) = rig.submit([prompt], 3, num_prompt_logprobs=2, num_top_logprobs=2)
        result = generation.result(60)
    with torch.no_grad():
        expected = torch.log_softmax(oracle(torch.tensor([prompt])).logits[0], -1)
    found = result.prompt_logprobs
    assert found is not None
    for place in range(len(prompt) - 1):
        assert found.logprobs[place] == pytest.approx(expected[place, prompt[place + 1]].item(), abs=0.2)
    assert result.tokens == greedy(oracle, prompt, 3)


@needs_double
def test_memory_that_runs_out_ends_one_request_and_not_the_others(llama: DirectModel) -> None:
    prompts = prompts_of(3, seed=5)
    with DirectRig(llama) as rig:
        expected = rig.say(prompts, 8)
        cuda().fail_next("cuMemcpyHtoDAsync_v2", 2)
        generations = rig.submit(prompts, 8)
        outcomes: list[object] = []
        for generation in generations:
            try:
                outcomes.append(generation.result(60).tokens)
            except CapacityError as error:
                outcomes.append(error)
        assert sum(isinstance(outcome, CapacityError) for outcome in outcomes) == 1
        assert all(
            outcome == tokens or isinstance(outcome, CapacityError)
            for outcome, tokens in zip(outcomes, expected, strict=True)
        )
        assert rig.backend.statistics().out_of_memory_total == 1


@needs_double
def test_a_lost_device_ends_the_engine_with_what_to_do() -> None:
    model = DirectModel.of(tiny_model("llama", dtype=torch.bfloat16))
    rig = DirectRig(model)
    rig.engine.start()
    rig.say([(1, 2)], 2)
    cuda().lose(719)
    try:
        with pytest.raises(DeviceLostError, match=r"LAUNCH_FAILED \(719\)\n  `nvidia-smi`"):
            rig.say([(1, 2, 3)], 3)
        with pytest.raises(DeviceLostError):
            rig.say([(1, 2, 3)], 3)
        rig.engine.stop(60)
    finally:
        cuda().lose(0)
    rig.backend.close()
    rig.kv.close()
    model.close()


@needs_double
def test_an_answer_needs_no_torch(tmp_path: Path) -> None:
    folder = save_tiny("qwen2", tmp_path / "model", dtype=torch.bfloat16)
    prompts = prompts_of(2, seed=6)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.direct_program", str(folder), "4"],
        input=json.dumps(prompts), capture_output=True, text=True, timeout=patience_s(100),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    imported = {name.partition(".")[0] for name in answer["modules"]}
    assert not imported & {"torch", "triton", "cupy", "cupy_backends", "transformers"}
    oracle = tiny_model("qwen2", dtype=torch.bfloat16)
    assert [tuple(tokens) for tokens in answer["answers"]] == [
        greedy(oracle, prompt, 4) for prompt in prompts
    ]
