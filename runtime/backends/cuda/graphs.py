"""CUDA graphs of steps in which every sequence takes one token: recorded once, then replayed.

With few sequences, launching the few hundred kernels of a step takes the host longer than the
device needs to compute them. A CUDA graph launches them all at once. Each is recorded for one
number of rows, a power of 2, and serves all steps with at most as many; whatever changes between
steps is read from one buffer at a fixed address.

A graph keeps addresses: of weights, which are refined in place and never moved; of the pool; and of
the tables of rotary angles, which it therefore keeps alive. It is recorded once the weights are
exact, since none of its layers waits.

If recording fails, the reason is logged once, and steps are launched kernel by kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...step.batch import Rows, StepBatch
from .decoder import DeviceKernels
from .storage import DeviceKVStorage
from .tables import NUM_PARTS, DeviceBatch, StepPacker

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2


class Recorder(Protocol):
    """A recorder of the work that a function enqueues. The one in tests calls the function again at
    each replay.
    """

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record `work`. Returns (replay, its result), a tensor that each replay overwrites."""

    @property
    def memory_bytes(self) -> int:
        """The memory of all recordings together."""


class CudaRecorder:
    """Recorder of CUDA graphs. They share one memory pool because they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._memory_bytes = 0

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        current = torch.cuda.current_stream(self._device)
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                # Lazy initialisation at the first use must not be recorded.
                for _ in range(WARM_UP_STEPS):
                    work()
                self._stream.synchronize()
                # Other threads may allocate and copy meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = work()
                finally:
                    graph.capture_end()
        finally:
            current.wait_stream(self._stream)
        self._memory_bytes += max(0, torch.cuda.memory_reserved(self._device) - before)
        return graph.replay, result


@dataclass(frozen=True, slots=True)
class _RecordedGraph:
    replay: Callable[[], None]
    logits: torch.Tensor  # (rows, vocab) fp32
    # Tensors that the graph reads and that it must keep alive.
    kept: tuple[torch.Tensor, ...]


class DecodeGraphs:
    """The graphs of one decoder and its pool. Not thread-safe: only the thread that computes steps
    uses them.
    """

    def __init__(
        self,
        kernels: DeviceKernels,
        kv: DeviceKVStorage,
        packer: StepPacker,
        recorder: Recorder,
        *,
        max_rows: int,
        max_context: int,
    ) -> None:
        """For steps with up to `max_rows` sequences of up to `max_context` tokens."""
        self._kernels = kernels
        self._kv = kv
        self._packer = packer
        self._recorder = recorder
        self._max_context = max_context
        self.sizes = graph_sizes(max_rows)
        self._recorded: dict[int, _RecordedGraph] = {}
        self._failed = False
        self._buffer: torch.Tensor | None = None

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    @property
    def memory_bytes(self) -> int:
        return self._recorder.memory_bytes + (0 if self._buffer is None else self._buffer.nbytes)

    @property
    def missing(self) -> tuple[int, ...]:
        """The sizes not recorded yet; empty after a failure."""
        return () if self._failed else tuple(size for size in self.sizes if size not in self._recorded)

    def size_for(self, num_rows: int) -> int | None:
        """The recorded size for a step of `num_rows` rows; None: there is none."""
        size = next((size for size in self.sizes if size >= num_rows), None)
        return size if size in self._recorded else None

    def batch(self, parts: list[Rows], size: int) -> StepBatch:
        """Build the batch that the next `run` computes."""
        assert self._buffer is not None
        return self._packer.decode_batch(parts, size, self._buffer)

    def run(self, size: int, num_rows: int) -> torch.Tensor:
        """Logits (num_rows, vocab) fp32 of the batch built last, valid until the next replay."""
        recorded = self._recorded[size]
        recorded.replay()
        return recorded.logits[:num_rows]

    def record(self, size: int) -> bool:
        """Record one size, in about 100 ms. The weights must be exact.

        Returns False on failure; then recording is disabled.
        """
        try:
            if self._buffer is None:
                most = self.sizes[-1]
                num_blocks = most * (-(-self._max_context // self._kv.block_size) + 1)
                self._buffer = torch.zeros(
                    NUM_PARTS * most + num_blocks, dtype=torch.int64, device=self._kv.device
                )
            self._recorded[size] = self._record(size, self._buffer)
        # Errors of a driver, a library or memory: every step can be computed without graphs.
        except Exception:
            self._failed = True
            logger.exception(
                "recording the graph of %d rows failed: its kernels are launched one by one", size
            )
            return False
        return True

    def forget(self) -> None:
        """Free the graphs' memory for other uses, and disable recording."""
        self._recorded.clear()
        self._failed = True

    def _record(self, size: int, buffer: torch.Tensor) -> _RecordedGraph:
        kernels, kv = self._kernels, self._kv
        executor = kernels.executor
        batch = self._packer.decode_batch([], size, buffer)  # rows of padding
        # Grow the tables to the longest context first, because growing later would replace them.
        arrays = batch.on_device
        assert isinstance(arrays, DeviceBatch)
        executor.rope.rows(arrays.positions, self._max_context)

        @torch.inference_mode()
        def work() -> torch.Tensor:
            cos, sin = executor.rope.rows(arrays.positions, self._max_context)
            step = kernels.begin(batch, kv, cos, sin, is_recorded=True)
            x = executor.embeddings(arrays.tokens)
            for index in range(executor.spec.num_layers):
                x = step.layer(index, x)
            return kernels.logits(x)

        replay, logits = self._recorder.record(work)
        return _RecordedGraph(replay, logits, executor.rope.tables)


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """The powers of 2 below `max_rows`, then `max_rows` itself."""
    sizes = [1 << power for power in range(max_rows.bit_length()) if 1 << power < max_rows]
    return (*sizes, max_rows)


def next_to_record(
    missing: tuple[int, ...], wanted: dict[int, int], *, has_running: bool, min_wanted: int
) -> int | None:
    """The size most worth recording now; None: none.

    In idle time this is the size missed most often, or the smallest. While sequences are running,
    it must have been missed at least `min_wanted` times.
    """
    if not missing:
        return None
    most = max(missing, key=lambda size: (wanted.get(size, 0), -size))
    if has_running and wanted.get(most, 0) < min_wanted:
        return None
    return most
