"""The needs of a device before it computes, on a machine without them: nothing else fails."""

from __future__ import annotations

import pytest
import torch
from tests.support.decoding import oracle_greedy
from tests.support.device_engine import TIMEOUT_S
from tests.support.inspection import backend_of
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model
from tests.support.toy_decoder import ToyTokenizer

from teneral.loader.timeline import Timeline
from teneral.runtime.backends.cuda import backend as backend_module
from teneral.runtime.backends.cuda import warm_up
from teneral.runtime.backends.cuda.backend import TorchDeviceBackend
from teneral.runtime.backends.cuda.executor import CudaModelBackend
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.step.requests import GenerationRequest, SamplingParams

PROMPTS = [tuple((number * 37 + index * 11) % 250 for index in range(3 + 9 * number)) for number in range(3)]


def names(timeline: Timeline) -> list[str]:
    return [span.name for span in timeline.spans()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_a_warm_up_that_fails_says_so_and_nothing_else():
    timeline = Timeline()
    warm_up.start_warm_up(torch.device("cuda:0"), torch.bfloat16, timeline=timeline).join(TIMEOUT_S)
    assert names(timeline) == ["CUDA context", "warm-up failed"]


@pytest.mark.parametrize("error", [ImportError("no Triton"), RuntimeError("no image for this device")])
def test_without_kernels_torch_computes_over_the_same_pool(monkeypatch, caplog, error):
    """The engine of a device whose kernels cannot be loaded does this."""

    def refuse(device, folder):
        raise error

    monkeypatch.setattr(backend_module, "open_launcher", refuse)
    oracle = tiny_model("mistral", sliding_window=9)
    decoder = build_model(config_json(oracle), DictWeights(tensors_of(oracle)), backends=[CudaModelBackend()])
    timeline = Timeline()
    engine = Engine(
        decoder,
        ToyTokenizer(),
        options=EngineOptions(kv_bytes=100 * decoder.kv_block_bytes(4), block_size=4, max_context=96),
        make_backend=backend_module.cuda_backend,
        timeline=timeline,
    )
    assert isinstance(backend_of(engine).backend, TorchDeviceBackend)
    engine.start()
    generations = [
        engine.submit(GenerationRequest(str(number), prompt, 12, SamplingParams(temperature=0)))
        for number, prompt in enumerate(PROMPTS)
    ]
    answers = [generation.result(TIMEOUT_S).tokens for generation in generations]
    assert engine.stop(TIMEOUT_S)
    with torch.no_grad():
        assert answers == [tuple(oracle_greedy(oracle, prompt, 12)) for prompt in PROMPTS]
    assert "no kernels on the device" in names(timeline)
    assert sum(str(error) in record.getMessage() for record in caplog.records) == 1


def test_prompts_are_never_planned_by_cudnn_and_a_short_one_is_warm(monkeypatch):
    """What torch is asked for, on the CPU."""
    shapes = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(queries, keys, values, **options):
        shapes.append((tuple(queries.shape), tuple(keys.shape)))
        return attend(queries, keys, values, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    torch.backends.cuda.enable_cudnn_sdp(True)
    timeline = Timeline()
    warm_up.warm_up(torch.device("cpu"), torch.bfloat16, timeline=timeline)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert names(timeline) == ["CUDA context", "cuBLAS", "a prompt's attention"]
    assert [queries[2] for queries, _ in shapes] == [64, 64]
    assert {queries[3] for queries, _ in shapes} == {64, 128}
