"""An engine that computes as on a device says what transformers says, whatever its steps are made of.

Its kernels are the reference of `tests/support/reference_kernels.py`, to which the real ones are held elsewhere.
"""

from __future__ import annotations

import time

import pytest
import torch
from tests.support.decoding import oracle_greedy
from tests.support.device_engine import (
    BLOCK_SIZE,
    TIMEOUT_S,
    DeviceRig,
    Repeater,
    decoder_of,
    use_row_products,
)
from tests.support.inspection import state_of
from tests.support.reference_kernels import ReferenceKernels
from tests.support.tiny_models import tiny_model

from teneral.runtime.backends.cuda.graphs import graph_sizes, next_to_record
from teneral.runtime.backends.cuda.variants import variants_of
from teneral.runtime.errors import CapacityError
from teneral.runtime.metrics import numbers_in
from teneral.runtime.step.requests import SamplingParams

NUM_TOKENS = 24
PROMPTS = [tuple((number * 37 + index * 11) % 250 for index in range(3 + 9 * number)) for number in range(5)]
MODELS = {
    "llama": ("llama", {}),
    "qwen3, with norms of heads": ("qwen3", {}),
    "mistral, that forgets": ("mistral", {"sliding_window": 9}),
    "heads of 80, biases, gelu, tied": (
        "llama",
        {
            "head_dim": 80,
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """(transformers' tokens for the prompts, our decoder over the same weights)"""
    family, overrides = MODELS[request.param]
    with torch.no_grad():
        oracle = tiny_model(family, **overrides)
        expected = [tuple(oracle_greedy(oracle, prompt, NUM_TOKENS)) for prompt in PROMPTS]
    return expected, decoder_of(family, **overrides)


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
def test_tokens_are_those_of_transformers(model, recorded):
    expected, decoder = model
    recorder = Repeater() if recorded else None
    with DeviceRig(decoder, ReferenceKernels(), recorder=recorder, max_running=5) as rig:
        rig.engine.start()
        assert rig.say(PROMPTS, NUM_TOKENS) == expected
        if recorder is not None:
            wait_for(rig, lambda: rig.backend.statistics().num_graphs == 4)  # 1, 2, 4 and 5 rows
        assert rig.say(PROMPTS, NUM_TOKENS) == expected
        assert rig.say(PROMPTS[:3], NUM_TOKENS) == expected[:3]  # in steps for 4
        if recorder is not None:
            assert recorder.num_replayed == rig.backend.statistics().graph_steps_total > NUM_TOKENS / 2


def test_chunks_preemption_and_found_prefixes_change_no_token(model):
    expected, decoder = model
    tight = {"max_step_tokens": 24, "max_running": 5, "max_prefill_tokens": 7, "num_blocks": 26}
    with DeviceRig(decoder, ReferenceKernels(), recorder=Repeater(), **tight) as rig:
        rig.engine.start()
        assert rig.say(PROMPTS, NUM_TOKENS) == expected
        assert rig.say(PROMPTS[::-1], NUM_TOKENS) == expected[::-1]
        statistics = rig.engine.statistics()
        assert statistics.preemptions_total > 0
        assert statistics.prefix_hit_tokens_total > 0


def test_no_kernel_is_launched_that_was_not_compiled_ahead(model):
    _, decoder = model
    launch = ReferenceKernels()
    with DeviceRig(decoder, launch, recorder=Repeater(), max_running=5, max_context=400) as rig:
        use_row_products(decoder)
        rig.engine.start()
        rig.say([*PROMPTS, tuple(range(250)) + PROMPTS[4]], 4)
        rig.say(PROMPTS[:2], 8, sampling=SamplingParams(seed=3, top_k=4))
        rig.say(PROMPTS[:2], 8, sampling=SamplingParams(seed=3))
    compiled = variants_of(decoder.executor.kernels.shape)
    assert launch.launched.keys() <= set(compiled)
    assert {variant.kernel for variant in launch.launched} == {variant.kernel for variant in compiled}


def test_products_with_one_row_change_no_token(model):
    expected, decoder = model
    launch = ReferenceKernels()
    with DeviceRig(decoder, launch) as rig:
        use_row_products(decoder)
        rig.engine.start()
        assert [rig.say([prompt], NUM_TOKENS)[0] for prompt in PROMPTS] == expected
    num_launched = sum(num for variant, num in launch.launched.items() if variant.kernel == "row_product")
    has_biases = decoder.config.mlp_bias or decoder.config.qkv_bias
    assert num_launched > len(PROMPTS) * NUM_TOKENS * (0.9 if has_biases else 4)


def test_a_seed_says_the_same_alone_and_in_company_recorded_or_not():
    decoder = decoder_of("llama")
    sampling = SamplingParams(temperature=0.9, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=11)
    with DeviceRig(decoder, ReferenceKernels(), recorder=Repeater(), max_running=5) as rig:
        rig.engine.start()
        together = rig.say(PROMPTS, NUM_TOKENS, sampling=sampling)
        wait_for(rig, lambda: rig.backend.statistics().num_graphs == 4)
        assert [rig.say([prompt], NUM_TOKENS, sampling=sampling)[0] for prompt in PROMPTS] == together
        assert len(set(together)) == len(PROMPTS)


def test_what_a_devices_memory_is_used_for_can_be_seen():
    decoder = decoder_of("llama")
    with DeviceRig(decoder, ReferenceKernels(), recorder=Repeater(), max_running=5) as rig:
        rig.engine.start()
        rig.say(PROMPTS, 4)
        wait_for(rig, lambda: rig.backend.statistics().num_graphs == 4)
        statistics = rig.engine.statistics()
        figures = dict(numbers_in({"engine": statistics}))
    assert (
        figures["engine", "device", "kv_bytes"]
        == statistics.kv_bytes
        == 200 * decoder.kv_block_bytes(BLOCK_SIZE)
    )
    assert figures["engine", "device", "weight_bytes"] == decoder.weights.size_bytes
    assert figures["engine", "device", "graph_bytes"] > 0
    assert figures["engine", "device", "activation_bytes"] > 0
    assert figures["engine", "device", "eager_steps_total"] > 0
    assert figures["engine", "exhausted_total"] == 0


def test_a_failed_recording_costs_nothing_but_the_recording(caplog):
    class Broken(Repeater):
        def record(self, work):
            work()
            self.num_recorded += 1
            raise RuntimeError("operation not permitted when stream is capturing")

    decoder, recorder = decoder_of("llama"), Broken()
    with DeviceRig(decoder, ReferenceKernels(), recorder=recorder, max_running=5) as rig:
        rig.engine.start()
        first = rig.say(PROMPTS, NUM_TOKENS)
        wait_for(rig, lambda: recorder.num_recorded)
        assert rig.say(PROMPTS, NUM_TOKENS) == first
        statistics = rig.backend.statistics()
    assert (recorder.num_recorded, statistics.num_graphs, statistics.graph_steps_total) == (1, 0, 0)
    assert sum("recording the graph" in record.message for record in caplog.records) == 1


def test_nothing_is_recorded_before_something_was_served_nor_while_somebody_waits_for_a_first_token():
    decoder, recorder = decoder_of("llama"), Repeater()
    with DeviceRig(decoder, ReferenceKernels(), recorder=recorder, max_running=1) as rig:
        assert not rig.backend.wants_idle_time(has_running=False)
        generations = rig.submit(PROMPTS[:3], 4, on_event=lambda _: seen.append(recorder.num_recorded))
        seen: list[int] = []
        rig.engine.start()
        for generation in generations:
            generation.result(TIMEOUT_S)
        assert seen == [0] * len(seen)
        wait_for(rig, lambda: recorder.num_recorded == 1)


def test_a_size_that_is_missed_often_is_recorded_while_others_wait_for_their_next_tokens():
    assert next_to_record((1, 2, 4), {}, has_running=False, min_wanted=9) == 1
    assert next_to_record((1, 2, 4), {4: 8}, has_running=False, min_wanted=9) == 4
    assert next_to_record((1, 2, 4), {4: 8}, has_running=True, min_wanted=9) is None
    assert next_to_record((1, 2, 4), {4: 9}, has_running=True, min_wanted=9) == 4
    assert next_to_record((), {4: 9}, has_running=False, min_wanted=9) is None
    assert [graph_sizes(number) for number in (1, 2, 5, 32)] == [
        (1,),
        (1, 2),
        (1, 2, 4, 5),
        (1, 2, 4, 8, 16, 32),
    ]


def test_running_out_of_memory_ends_the_largest_and_no_other():
    decoder = decoder_of("llama")
    expected = say_alone(decoder)
    launch = Exhausted(at=2)
    with DeviceRig(decoder, launch, recorder=Repeater()) as rig:
        held = []
        generations = rig.submit(
            PROMPTS, NUM_TOKENS, on_event=lambda event: held.append(blocks_held(rig)) if event.error else None
        )
        rig.engine.start()
        with pytest.raises(CapacityError, match="not enough memory"):
            generations[4].result(TIMEOUT_S)
        others = [generation.result(TIMEOUT_S).tokens for generation in generations[:4]]
        statistics = rig.engine.statistics()
        after = rig.say(PROMPTS[4:], NUM_TOKENS)
    assert others == expected[:4]
    assert held == [[(0, 0)] * 4]  # what the step would have filled is given back
    assert after == expected[4:]
    assert statistics.exhausted_total == 1
    assert statistics.device.out_of_memory_total == 1


def blocks_held(rig):
    return [(each.num_blocks, each.num_computed) for each in state_of(rig.engine).running]


class Exhausted(ReferenceKernels):
    """Memory runs out in one launch."""

    def __init__(self, *, at: int) -> None:
        super().__init__()
        self._left = at

    def __call__(self, variant, grid, *arguments):
        self._left -= 1
        if self._left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        super().__call__(variant, grid, *arguments)


def say_alone(decoder):
    with DeviceRig(decoder, ReferenceKernels()) as rig:
        rig.engine.start()
        return rig.say(PROMPTS, NUM_TOKENS)


def wait_for(rig, condition):
    """The engine's thread comes to it by itself, in its idle time."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
