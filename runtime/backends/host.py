"""The backend of models on this machine's CPU, for any executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...loader.timeline import Timeline
from ..step.backend import BackendOptions, DeviceStatistics, OnLayer
from ..step.batch import Rows, StepBatch, build_batch
from ..step.sampling import choose_tokens
from ..step.state import Chosen, SamplingState


class HostBackend:
    """A `Backend`."""

    def __init__(self, model: Any, kv: Any, block_size: int) -> None:
        self._model = model
        self._kv = kv
        self._block_size = block_size

    @property
    def returns_early(self) -> bool:
        return False

    def build(self, parts: Sequence[Rows]) -> StepBatch:
        return build_batch(parts, self._block_size)

    def forward(self, batch: StepBatch, *, on_layer: OnLayer | None) -> Any:
        return self._model.forward(batch, self._kv, on_layer=on_layer)

    def choose(self, logits: Any, states: Sequence[SamplingState]) -> list[Chosen]:
        return choose_tokens(logits, states)

    def wants_idle_time(self, *, has_running: bool) -> bool:
        return False

    def work_when_idle(self) -> None:
        pass

    def make_room(self) -> None:
        pass

    def statistics(self) -> DeviceStatistics | None:
        return None


def host_backend(model: Any, kv: Any, options: BackendOptions, timeline: Timeline | None) -> HostBackend:
    """A `MakeBackend`."""
    return HostBackend(model, kv, options.block_size)
