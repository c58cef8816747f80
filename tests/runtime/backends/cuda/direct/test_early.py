"""While weights arrive, the direct path drafts and confirms as a CPU does.

The weights are a load's on the host, whose addresses are the device's here: kernels on the CPU read them where they
are. So each call waits for the device, as a load onto a device orders its streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.direct_kernels import needs_double, open_device
from tests.support.early_rig import TIMEOUT_S, EarlyRig, packed_tiny
from tests.support.inspection import state_of

from teneral.runtime.backends.cuda.direct.backend import DirectBackend
from teneral.runtime.backends.cuda.direct.device import DirectDevice
from teneral.runtime.backends.cuda.direct.executor import DirectExecutor, DirectModelBackend
from teneral.runtime.backends.cuda.direct.weights import tensor_at
from teneral.runtime.step.requests import FirstToken
from teneral.runtime.tensors import DType, Tensor
from teneral.runtime.weights import StreamedWeights

pytestmark = needs_double

PROMPTS = [tuple((number * 37 + index * 11) % 250 for index in range(3 + 9 * number)) for number in range(3)]
NUM_TOKENS = 16


class Waiting(DirectExecutor):
    """Waits for the device behind each call, so that weights may change after it."""

    def embed(self, batch: Any) -> Any:
        return self._waited(super().embed(batch))

    def layers(self, step: Any, first: int, end: int, x: Any) -> Any:
        return self._waited(super().layers(step, first, end, x))

    def logits(self, x: Any, rows: Any) -> Any:
        return self._waited(super().logits(x, rows))

    def _waited(self, result: Any) -> Any:
        self.device.driver.synchronize_stream(self.device.stream)
        return result


class WaitingBackend(DirectModelBackend):
    def __init__(self, device: DirectDevice) -> None:
        super().__init__(device)
        self.device = device

    def decoder(self, spec: Any, weights: Any) -> DirectExecutor:
        return Waiting(spec, weights, self.device)


class SlabWeights(StreamedWeights):
    """A load's weights, by their addresses."""

    def __init__(self, load: Any, device: DirectDevice) -> None:
        super().__init__(load)
        self._device = device

    def _view(self, group: int, begin: int, end: int, dtype: DType, shape: tuple[int, ...]) -> Tensor:
        array = super()._view(group, begin, end, dtype, shape).array
        return tensor_at(self._device, array.ctypes.data, shape, dtype)


class DirectEarlyRig(EarlyRig):
    def __init__(self, artifact: Path, **options: Any) -> None:
        device = open_device()
        self.made: list[Any] = []

        def make_backend(model: Any, kv: Any, chosen: Any, timeline: Any) -> DirectBackend:
            self.made += [DirectBackend(model, kv, chosen), kv]
            return self.made[0]

        super().__init__(
            artifact,
            make_backend=make_backend,
            backends=[WaitingBackend(device)],
            make_weights=lambda load: SlabWeights(load, device),
            num_blocks=120,
            max_context=96,
            max_running=8,
            max_step_tokens=64,
            **options,
        )

    def __exit__(self, *outcome: object) -> None:
        super().__exit__(*outcome)
        for each in self.made:
            each.close()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_tiny(tmp_path_factory.mktemp("llama"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def expected(artifact: Path) -> Iterator[list[tuple[int, ...]]]:
    """The tokens of the exact weights, by the same kernels."""
    with DirectEarlyRig(artifact) as rig:
        rig.start()
        rig.refine()
        generations = [rig.submit(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
        yield [generation.result(TIMEOUT_S).tokens for generation in generations]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.002)


def num_drafted(rig: EarlyRig) -> int:
    lanes = [(each, each.draft) for each in state_of(rig.engine).running]
    return sum(len(lane.tokens) - each.num_prompt_tokens for each, lane in lanes if lane is not None)


@pytest.mark.parametrize("first_token", [FirstToken.EXACT, FirstToken.DRAFT], ids=str)
def test_drafts_are_confirmed_with_the_exact_weights_tokens(
    artifact: Path, expected: list[tuple[int, ...]], first_token: FirstToken
) -> None:
    with DirectEarlyRig(artifact) as rig:
        rig.start()
        generations = [
            rig.submit(prompt, first_token=first_token, max_tokens=NUM_TOKENS) for prompt in PROMPTS
        ]
        wait_until(lambda: num_drafted(rig) >= 3 * 2)
        rig.refine()
        results = [generation.result(TIMEOUT_S).tokens for generation in generations]
        if first_token is FirstToken.EXACT:
            assert results == expected
        later = [rig.submit(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS]
        assert [generation.result(TIMEOUT_S).tokens for generation in later] == expected
