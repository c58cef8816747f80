"""The protocol between the engine and a backend, and the backend of models on this machine's CPU.

A backend moves a step's numbers to the model, computes, and chooses tokens;
`backends/cuda/backend.py` is for models on a CUDA device. Not thread-safe. This module does not
know how the engine selects sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import Struct

from ...loader.timeline import Timeline
from .batch import Rows, StepBatch, build_batch
from .sampling import choose_tokens
from .state import Chosen, SamplingState

# Called after each piece of work with (index, name, start_s, end_s), on time.monotonic()'s clock,
# without the time spent waiting for weights. The embedding has index -1, the layers 0 to num_layers
# - 1, the head num_layers. A wait for experts of a layer that its router has chosen comes by itself,
# under the name EXPERT_WAIT.
OnLayer = Callable[[int, str, float, float], None]
EXPERT_WAIT = "wait for experts"


class BackendDeviceStatistics(Struct, frozen=True):
    """A snapshot of a device's memory, in bytes, and of its work. Counts are from the engine's
    start.
    """

    free_bytes: int  # reported by the driver
    total_bytes: int
    weight_bytes: int
    kv_bytes: int
    graph_bytes: int  # held by recorded steps
    activation_bytes: int  # reserved for the largest step
    allocated_bytes: int  # by torch, the pool included
    reserved_bytes: int
    num_graphs: int
    graph_steps_total: int  # replayed steps
    eager_steps_total: int
    out_of_memory_total: int
    # Tokens drawn again among more candidates.
    narrow_redraws_total: int


class Backend(Protocol):
    """The computing side of an engine and of its early phase."""

    @property
    def returns_early(self) -> bool:
        """True if `forward` returns while the device still computes: `choose` then ends the step."""

    def build(self, parts: Sequence[Rows]) -> StepBatch:
        """Build the batch of these rows on the model's device; all lanes must be of one epoch.
        Valid until the next one.
        """

    def forward(self, batch: StepBatch, *, on_layer: OnLayer | None) -> Any:
        """Logits (R, vocab) fp32 of a batch from `build`, valid until the next step.

        A numpy array, or on a device the input of `choose` there. Raises the model's errors.
        """

    def choose(self, logits: Any, states: Sequence[SamplingState]) -> list[Chosen]:
        """Choose the next token of each row. The step then has ended on the device, too."""

    def wants_idle_time(self, *, has_running: bool) -> bool:
        """True if there is work now that is worth its time and makes later steps faster."""

    def work_when_idle(self) -> None:
        """Do one piece of that work, which takes up to a second."""

    def make_room(self) -> None:
        """Free all memory that can be freed, after a step ran out of memory."""

    def statistics(self) -> BackendDeviceStatistics | None: ...


class BackendOptions(Struct, frozen=True, kw_only=True):
    """The engine's settings that a backend may rely on."""

    block_size: int
    max_running: int
    max_step_tokens: int
    max_context: int
    # Folder of kernels compiled ahead of time, for a CUDA device.
    kernel_dir: str | None = None


MakeBackend = Callable[[Any, Any, BackendOptions, Timeline | None], Backend]  # of a model and its pool


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

    def statistics(self) -> BackendDeviceStatistics | None:
        return None


def host_backend(model: Any, kv: Any, options: BackendOptions, timeline: Timeline | None) -> HostBackend:
    """A `MakeBackend`."""
    return HostBackend(model, kv, options.block_size)
