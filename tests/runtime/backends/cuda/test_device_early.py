"""While weights arrive, a device drafts and confirms as a CPU does; and what runs out of memory is one request."""

from __future__ import annotations

import time

import pytest
import torch
from tests.support.device_engine import Repeater
from tests.support.early_rig import TIMEOUT_S, EarlyRig, exact_tokens, packed_tiny
from tests.support.inspection import state_of
from tests.support.reference_kernels import ReferenceKernels

from teneral.runtime.backends.cuda.backend import CudaBackend
from teneral.runtime.backends.cuda.decoder import DeviceKernels
from teneral.runtime.backends.cuda.executor import CudaModelBackend
from teneral.runtime.errors import CapacityError
from teneral.runtime.step.requests import FirstToken

NUM_TOKENS = 24
PROMPTS = [tuple((number * 37 + index * 11) % 250 for index in range(3 + 9 * number)) for number in range(3)]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return packed_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected():
    return [exact_tokens(prompt, NUM_TOKENS) for prompt in PROMPTS]


class Faulty(ReferenceKernels):
    """Runs out of memory on demand."""

    is_exhausted = False

    def __call__(self, variant, grid, *arguments):
        if self.is_exhausted:
            self.is_exhausted = False
            raise torch.OutOfMemoryError("CUDA out of memory.")
        super().__call__(variant, grid, *arguments)


@pytest.fixture
def launch():
    """With `rig` an engine computes as on a device, with these kernels."""
    kernels = Faulty()

    def make_backend(model, kv, options, timeline):
        own = DeviceKernels(
            model.executor, kernels, block_size=options.block_size, max_context=options.max_context
        )
        return CudaBackend(model, kv, options, own, recorder=Repeater(), timeline=timeline)

    kernels.rig = {"make_backend": make_backend, "backends": [CudaModelBackend()]}
    return kernels


def wait_until(condition):
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.002)


def num_drafted(rig):
    lanes = [(each, each.draft) for each in state_of(rig.engine).running]
    return sum(len(lane.tokens) - each.num_prompt_tokens for each, lane in lanes if lane is not None)


@pytest.mark.parametrize("first_token", [FirstToken.EXACT, FirstToken.DRAFT], ids=str)
def test_what_was_drafted_is_confirmed_as_on_a_cpu(artifact, expected, launch, first_token):
    with EarlyRig(artifact, **launch.rig) as rig:
        rig.start()
        generations = [rig.submit(prompt, first_token=first_token) for prompt in PROMPTS]
        wait_until(lambda: num_drafted(rig) >= 3 * 4)
        rig.refine()
        results = [generation.result(TIMEOUT_S).tokens for generation in generations]
        if first_token is FirstToken.EXACT:
            assert results == expected
        assert rig.engine.statistics().device.num_graphs == 0  # nothing before the weights are exact
        assert [rig.submit(prompt).result(TIMEOUT_S).tokens for prompt in PROMPTS] == expected


def test_memory_that_runs_out_while_weights_arrive_ends_one_request(artifact, expected, launch):
    with EarlyRig(artifact, **launch.rig) as rig:
        rig.start()
        generations = [rig.submit(prompt) for prompt in PROMPTS]
        wait_until(lambda: num_drafted(rig) >= 3)
        launch.is_exhausted = True
        with pytest.raises(CapacityError):
            generations[2].result(TIMEOUT_S)
        rig.engine.check_integrity()
        rig.refine()
        assert [generation.result(TIMEOUT_S).tokens for generation in generations[:2]] == expected[:2]
        assert rig.engine.statistics().exhausted_total == 1
