"""What is done differently on a device: putting a step's numbers there, computing it, and choosing tokens.

`CpuBackend` is what an engine does on a CPU; on a CUDA device there is `cuda/backend.py`. One thread at a time. Nothing
is known here of which sequences take part, or why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...loader.timeline import Timeline
from ..errors import ModelError
from .batch import StepBatch
from .sampling import choose_tokens
from .sequence import Choice, SamplingState
from .step_batch import Rows, build_batch
from .trace import OnLayer


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """A moment's view of a device's memory, in bytes, and of what is done there. Counts are from the engine's start."""

    free_bytes: int  # as the driver says
    total_bytes: int
    weight_bytes: int
    kv_bytes: int
    graph_bytes: int  # that recorded steps keep
    activation_bytes: int  # set aside for the largest step
    allocated_bytes: int  # by torch, the pool included
    reserved_bytes: int
    num_graphs: int
    graph_steps_total: int  # steps that were replayed
    eager_steps_total: int
    out_of_memory_total: int
    narrow_redraws_total: int  # tokens that were drawn a second time, among more candidates


class Backend(Protocol):
    """What an engine, and its early phase, compute with."""

    @property
    def returns_early(self) -> bool:
        """Whether `forward` returns while the device still computes: `choose` then ends the step."""

    def build(self, parts: Sequence[Rows]) -> StepBatch:
        """The batch for these rows, where the model is; all lanes must be of one epoch. Valid until the next one."""

    def forward(self, batch: StepBatch, *, on_layer: OnLayer | None) -> torch.Tensor:
        """Logits (R, vocab) fp32 of a batch that `build` has made, valid until the next step."""

    def choose(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Choice | ModelError]:
        """The next token of each row. The step is over then, on the device, too."""

    def wants_idle_time(self, *, has_running: bool) -> bool:
        """Whether there is something to be done that makes later steps faster, and is worth it now."""

    def work_when_idle(self) -> None:
        """One piece of that. Takes up to a second."""

    def make_room(self) -> None:
        """Memory ran out in a step: give back what can be given back."""

    def statistics(self) -> DeviceStatistics | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendOptions:
    """What a backend may rely on, and where it finds what."""

    block_size: int
    max_running: int
    max_step_tokens: int
    max_context: int
    kernels_dir: str | None = None  # of binaries that were compiled ahead of time, for a CUDA device


MakeBackend = Callable[[Any, Any, BackendOptions, Timeline | None], Backend]  # of a model and its pool


class CpuBackend:
    """Everything where it is."""

    def __init__(self, model: Any, kv: Any, block_size: int) -> None:
        self._model = model
        self._kv = kv
        self._block_size = block_size

    @property
    def returns_early(self) -> bool:
        return False

    def build(self, parts: Sequence[Rows]) -> StepBatch:
        return build_batch(parts, self._block_size)

    def forward(self, batch: StepBatch, *, on_layer: OnLayer | None) -> torch.Tensor:
        logits: torch.Tensor = self._model.forward(batch, self._kv, on_layer=on_layer)
        return logits

    def choose(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Choice | ModelError]:
        return choose_tokens(logits, states)

    def wants_idle_time(self, *, has_running: bool) -> bool:
        return False

    def work_when_idle(self) -> None:
        pass

    def make_room(self) -> None:
        pass

    def statistics(self) -> DeviceStatistics | None:
        return None


def backend_for(model: Any, kv: Any, options: BackendOptions, timeline: Timeline | None) -> Backend:
    """The one for where the model's weights are."""
    device = getattr(model, "device", None)
    if device is not None and device.type == "cuda":
        from ..cuda.backend import cuda_backend  # nobody else needs it

        return cuda_backend(model, kv, options, timeline)
    return CpuBackend(model, kv, options.block_size)
