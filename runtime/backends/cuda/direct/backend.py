"""The engine's backend on a device, without torch.

A step is one copy of tables to the device, launches or one graph, the choice of tokens there, and one
copy back, which is the step's only wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .....loader.device.driver.base import CudaError
from ....errors import DeviceLostError
from ....step.backend import BackendDeviceStatistics, BackendOptions, OnLayer
from ....step.batch import Rows, StepBatch, build_batch
from ....step.state import Chosen, SamplingState
from .device import memory_errors
from .executor import DirectExecutor, Logits
from .sampler import TokenSampler
from .storage import DirectPool
from .workspace import WorkspaceLimits

if TYPE_CHECKING:
    from ....models.decoder import Decoder


class DirectBackend:
    """See `step.backend.Backend`."""

    returns_early = True

    def __init__(self, decoder: Decoder, kv: DirectPool, options: BackendOptions) -> None:
        """Opens the decoder's executor for this pool. Raises `CudaError` where memory is short."""
        assert isinstance(decoder.executor, DirectExecutor)
        self._decoder = decoder
        self._executor = decoder.executor
        self._kv = kv
        self._block_size = options.block_size
        self._num_out_of_memory = 0
        limits = WorkspaceLimits(
            max_rows=options.max_step_tokens,
            max_spans=options.max_running,
            max_context=options.max_context,
            block_size=options.block_size,
        )
        self._executor.open(kv, limits)
        device = self._executor.device
        self._sampler = TokenSampler(device.driver, device.kernels(decoder.dtype), device.stream)

    def build(self, parts: Sequence[Rows]) -> StepBatch:
        return build_batch(parts, self._block_size)

    def forward(self, batch: StepBatch, *, on_layer: OnLayer | None) -> Logits:
        with self._translated_errors():
            if self._decoder.is_exact and not batch.scored and _has_its_adapters(batch):
                return self._executor.run(batch)
            logits: Logits = self._decoder.forward(batch, self._kv, on_layer=on_layer)
            return logits

    def choose(self, logits: Logits, states: Sequence[SamplingState]) -> list[Chosen]:
        with self._translated_errors():
            return self._sampler.choose(logits.array, states)

    def wants_idle_time(self, *, has_running: bool) -> bool:
        return False

    def work_when_idle(self) -> None:
        pass

    def make_room(self) -> None:
        self._num_out_of_memory += 1
        with self._translated_errors():
            self._executor.device.driver.synchronize_stream(self._executor.device.stream)
            self._executor.drop_graphs()
            self._executor.drop_adapters()

    def close(self) -> None:
        """Free all but the pool and the weights, once the device is done."""
        self._sampler.close()
        self._executor.close()

    def statistics(self) -> BackendDeviceStatistics:
        free_bytes, total_bytes = self._executor.device.driver.memory()
        executor = self._executor
        used_bytes = self._decoder.weights.size_bytes + self._kv.size_bytes
        used_bytes += executor.workspace_bytes + executor.adapter_bytes
        return BackendDeviceStatistics(
            free_bytes=free_bytes,
            total_bytes=total_bytes,
            weight_bytes=self._decoder.weights.size_bytes,
            kv_bytes=self._kv.size_bytes,
            graph_bytes=0,  # the driver's own
            activation_bytes=executor.workspace_bytes,
            allocated_bytes=used_bytes,
            reserved_bytes=used_bytes,
            num_graphs=executor.num_graphs,
            graph_steps_total=executor.num_graph_steps,
            eager_steps_total=executor.num_eager_steps,
            out_of_memory_total=self._num_out_of_memory,
            narrow_redraws_total=0,
        )

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            with memory_errors():
                yield
        except CudaError as error:
            if error.is_lost:
                raise DeviceLostError(error.message, hint=error.hint) from error
            raise


def _has_its_adapters(batch: StepBatch) -> bool:
    """True if no adapter of its rows is still on its way."""
    return all(span.adapter is None or span.adapter.is_complete for span in batch.spans)
