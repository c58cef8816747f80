"""A backend wrapper that distinguishes memory errors, failed steps and a lost device.

After most CUDA errors the process's context is lost, and every later call fails too. An error other
than out of memory is therefore followed by a probe. If the probe fails, the device is lost, and the
engine ends; otherwise only the step has failed. Libraries' reports of failed allocations count as
out of memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ...errors import DeviceLostError
from ...step.backend import Backend, BackendDeviceStatistics, OnLayer
from ...step.batch import Rows, StepBatch
from ...step.state import Chosen, SamplingState
from .launch import OUT_OF_MEMORY, LaunchError

PROBE_S = 10.0  # a device that takes longer for one addition counts as lost

# cuBLAS reports the second when its first handle finds no memory; the probe then distinguishes it
# from a lost context.
_ALLOCATIONS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
_MAYBE_ALLOCATIONS = ("CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_INITIALIZED")
_OF_THE_DEVICE = ("CUDA error", "CUDA driver error", "CUBLAS_STATUS_", "CUDNN_STATUS_", "device-side assert")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if isinstance(error, LaunchError):
        return error.result == OUT_OF_MEMORY
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ALLOCATIONS)


def is_of_the_device(error: BaseException) -> bool:
    """True if CUDA or one of its libraries reported the error."""
    if isinstance(error, LaunchError):
        return error.result != 0
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OF_THE_DEVICE)


def probe(device: torch.device) -> bool:
    """Return whether the device still computes. Takes up to `PROBE_S`."""
    answers: list[float] = []

    def add() -> None:
        try:
            answers.append(float(torch.ones(2, device=device).sum().item()))
        except Exception:  # noqa: BLE001 - any error means that it does not
            answers.append(0.0)

    thread = threading.Thread(target=add, name="teneral-probe", daemon=True)
    thread.start()
    thread.join(PROBE_S)
    return answers == [2.0]


class GuardedBackend:
    """A `Backend` that translates CUDA's errors into `torch.OutOfMemoryError` and
    `DeviceLostError`.
    """

    def __init__(
        self, backend: Backend, device: torch.device, *, probe: Callable[[torch.device], bool] = probe
    ) -> None:
        self.backend = backend
        self._device = device
        self._probe = probe

    @property
    def returns_early(self) -> bool:
        return self.backend.returns_early

    def build(self, parts: Sequence[Rows]) -> StepBatch:
        with self._translated_errors():
            return self.backend.build(parts)

    def forward(self, batch: StepBatch, *, on_layer: OnLayer | None) -> torch.Tensor:
        with self._translated_errors():
            logits: torch.Tensor = self.backend.forward(batch, on_layer=on_layer)
            return logits

    def choose(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Chosen]:
        with self._translated_errors():
            return self.backend.choose(logits, states)

    def wants_idle_time(self, *, has_running: bool) -> bool:
        return self.backend.wants_idle_time(has_running=has_running)

    def work_when_idle(self) -> None:
        with self._translated_errors():
            self.backend.work_when_idle()

    def make_room(self) -> None:
        with self._translated_errors():
            self.backend.make_room()

    def statistics(self) -> BackendDeviceStatistics | None:
        return self.backend.statistics()

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # The new error has no cause: its traceback would keep the step's tensors alive while
            # memory is freed.
            if is_out_of_memory(error):
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                raise torch.OutOfMemoryError(str(error)) from None
            if not is_of_the_device(error):
                raise
            if not self._probe(self._device):
                raise DeviceLostError(
                    f"{self._device} is lost: {error}",
                    hint="`nvidia-smi` and the system's log (Xid) show the cause. Start the server again.",
                ) from error
            if any(text in str(error) for text in _MAYBE_ALLOCATIONS):
                raise torch.OutOfMemoryError(str(error)) from None
            raise
