"""A whole engine with the real kernels, in Triton's interpreter: slow, so there is little of it."""

from __future__ import annotations

import pytest
from tests.support.device_engine import TIMEOUT_S, DeviceRig, Repeater, decoder_of
from tests.support.reference_kernels import ReferenceKernels

pytest.importorskip("triton", reason="kernels are written in Triton, which is for Linux on x86_64")

from tests.support.interpreted import Interpreter

from teneral.runtime.step.requests import SamplingParams

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPTS = [(7, 11, 13), tuple(range(20, 29))]
TIGHT = {"max_step_tokens": 6, "max_running": 2, "max_prefill_tokens": 4, "num_blocks": 5, "max_context": 24}


@pytest.mark.parametrize("overrides", [{}, {"sliding_window": 5}], ids=["sees all", "forgets"])
def test_the_kernels_say_what_their_references_say(overrides):
    results = []
    for launch in (ReferenceKernels(), Interpreter()):
        decoder = decoder_of("mistral", **SMALL, **overrides)
        with DeviceRig(decoder, launch, recorder=Repeater(), **TIGHT) as rig:
            generations = rig.submit(PROMPTS, 8)
            rig.engine.start()
            answers = [generation.result(TIMEOUT_S).tokens for generation in generations]
            answers += rig.say(PROMPTS[1:], 4, sampling=SamplingParams(temperature=0.9, top_k=20, seed=2))
            preemptions = rig.engine.statistics().preemptions_total
        results.append((answers, preemptions > 0))
        kernels = {variant.kernel for variant in launch.launched}
        assert kernels >= {"decode_attention", "chunk_attention", "rms_norm", "place_heads", "gate", "race"}
    assert results[0] == results[1]
    assert results[0][1]
