"""The protocol by which an engine computes: puts a step's numbers where the model is, computes, and chooses tokens.

`backends/host.py` is for models on this machine's CPU; for a CUDA device there is `cuda/backend.py`. One thread at a
time. Nothing is known here of which sequences take part, or why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...loader.timeline import Timeline
from .batch import StepBatch
from .rows import Rows
from .state import Chosen, SamplingState

# Told after each piece of work: (index, name, start_s, end_s), on time.monotonic()'s clock, waiting for
# weights left out. The embedding has index -1, the layers 0 to num_layers - 1, the head num_layers.
OnLayer = Callable[[int, str, float, float], None]


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
    """The computing side of an engine and of its early phase."""

    @property
    def returns_early(self) -> bool:
        """Whether `forward` returns while the device still computes: `choose` then ends the step."""

    def build(self, parts: Sequence[Rows]) -> StepBatch:
        """The batch for these rows, where the model is; all lanes must be of one epoch. Valid until the next one."""

    def forward(self, batch: StepBatch, *, on_layer: OnLayer | None) -> Any:
        """Logits (R, vocab) fp32 of a batch that `build` has made, valid until the next step: numpy's, or on a device
        what `choose` takes there. Raises what the model raises.
        """

    def choose(self, logits: Any, states: Sequence[SamplingState]) -> list[Chosen]:
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
    """The parts that a backend may rely on."""

    block_size: int
    max_running: int
    max_step_tokens: int
    max_context: int
    kernels_dir: str | None = None  # of binaries that were compiled ahead of time, for a CUDA device


MakeBackend = Callable[[Any, Any, BackendOptions, Timeline | None], Backend]  # of a model and its pool
