"""The choice of a backend: from `--backend`, the machine and the model's weights.

This is the only module that knows all backends; a new one on the CPU is a folder and a row in
`ROWS`. The choice is logged; a request that cannot be met is an error, never a silent fallback.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from ...loader.errors import UsageError
from ...loader.process.cpu import available_cores
from ...loader.timeline import Timeline
from ..models.executor import ExecutorFactory
from ..step.backend import Backend, BackendOptions, host_backend
from ..tensors import CPU

if TYPE_CHECKING:
    from .cuda.direct.device import DirectDevice

AUTO, NATIVE, TORCH, DIRECT, TRANSFORMERS = "auto", "native", "torch", "direct", "transformers"


class BackendChoice(Struct, frozen=True):
    """The requested backend, device and precision."""

    asked: str = AUTO  # AUTO, TRANSFORMERS or the name of a row
    device: str = CPU  # the device that holds the weights
    compute_dtype: str = AUTO  # or a dtype name as in config.json
    threads: int | None = None  # None: one for each available core
    trim_imports: bool = False
    kernel_dir: str | None = None  # of compiled kernels

    @property
    def is_torch(self) -> bool:
        """True if torch computes any model, so that its import need not wait for the model's
        config.
        """
        return self.asked in (TORCH, TRANSFORMERS) or (self.device != CPU and not self.is_direct)

    @property
    def is_direct(self) -> bool:
        """True if the device computes without torch."""
        return self.asked == DIRECT

    def direct_device(self) -> DirectDevice:
        """The process's one, opened at the first call. Raises `CudaError`."""
        return _direct_device(self.device, self.kernel_dir)

    def check(self) -> None:
        """Raise `UsageError` for a combination that this machine cannot run, and `NativeLibraryError` where only the
        native core could compute, and has no library for this processor.
        """
        if self.asked == NATIVE and self.device != CPU:
            raise UsageError(
                f"the native backend runs on the CPU only, but the weights are on {self.device}",
                key="backend",
                hint="Leave --backend out, or add --device cpu.",
            )
        if self.is_direct and self.device == CPU:
            raise UsageError(
                "the direct backend computes on a GPU, but the weights are on the CPU",
                key="backend",
                hint="Leave --backend out; or give the container a GPU and CuPy, and leave out --device cpu.",
            )
        if self.asked == TRANSFORMERS and self.device != CPU:
            raise UsageError(
                f"the transformers backend runs on the CPU only, but the weights are on {self.device}",
                key="backend",
                hint="Add --device cpu.",
            )
        if self.asked == TRANSFORMERS and find_spec("transformers") is None:
            raise UsageError(
                "transformers is not installed",
                key="backend",
                hint="pip install transformers 'teneral[torch]'",
            )
        if self.is_torch and not has_torch():
            raise UsageError(
                "torch is not installed"
                + (f", and weights on {self.device} need it" if self.device != CPU else ""),
                key="backend",
                hint="pip install 'teneral[torch]'; on a CPU --backend native needs none.",
            )
        if self.device == CPU and (self.asked == NATIVE or (self.asked == AUTO and not has_torch())):
            from ...loader.native.library import require_library  # torch does without

            require_library()

    def model_backends(self) -> Iterator[ExecutorFactory]:
        """Yield the candidates in order of preference. Each is imported only when it is reached."""
        self.check()
        if self.is_direct:
            from .cuda.direct.executor import DirectModelBackend

            yield DirectModelBackend(self.direct_device(), self.compute_dtype)
            return
        if self.device != CPU:
            self.import_torch()
            # Only models on a device need it.
            from .cuda.executor import CudaModelBackend

            yield CudaModelBackend()
            return
        for row in ROWS:
            if row.name == self.asked or (self.asked == AUTO and row.is_installed()):
                yield row.make(self)

    def import_torch(self) -> bool:
        """Import torch, by far the longest import. Returns whether the import was trimmed.

        The environment decides how torch's threads wait.
        """
        # OpenMP's threads sleep between regions instead of spinning, because a container's cores
        # are few and metered. The variable is read once, when torch loads the library
        # (docs/decisions/0007).
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from ..torch_import import import_torch

        # transformers uses modules of torch that trimming removes.
        trimmed = import_torch(trim=self.trim_imports and self.asked != TRANSFORMERS)
        import torch

        torch.set_num_threads(self.threads or available_cores())
        return trimmed


@cache
def _direct_device(device: str, kernel_dir: str | None) -> DirectDevice:
    from ...loader.device.compile import kernel_folders
    from .cuda.direct.device import open_direct_device

    return open_direct_device(device, kernel_folders(kernel_dir))


def has_torch() -> bool:
    """Return whether torch is installed, without importing it."""
    return find_spec("torch") is not None


class BackendRow(NamedTuple):
    """A way to compute on the CPU. `make` imports it."""

    name: str  # in `--backend`, as the setting's own row has it
    make: Callable[[BackendChoice], ExecutorFactory]
    is_installed: Callable[[], bool] = lambda: True


def _native(choice: BackendChoice) -> ExecutorFactory:
    from .native.backend import NativeBackend

    return NativeBackend(choice.compute_dtype, choice.threads)


def _torch(choice: BackendChoice) -> ExecutorFactory:
    choice.import_torch()
    from .torch.backend import TorchBackend
    from .torch.tensors import ComputePolicy

    return TorchBackend(ComputePolicy.of_this_machine(choice.compute_dtype))


# In order of preference.
ROWS = (BackendRow(NATIVE, _native), BackendRow(TORCH, _torch, has_torch))


def model_of_transformers(config: Any, weights: Any, compute_dtype: str, **files: Any) -> tuple[Any, bool]:
    """Build a model that transformers computes. Returns it and whether it is an encoder.

    The arguments are those of `build_with_transformers`.
    """
    from .transformers.build import build_with_transformers  # rarely used
    from .transformers.encoder import TransformersEncoder

    model = build_with_transformers(config, weights, compute_dtype=compute_dtype, **files)
    return model, isinstance(model, TransformersEncoder)


def step_backend(model: Any, kv: Any, options: BackendOptions, timeline: Timeline | None) -> Backend:
    """A `MakeBackend`: the backend for the device that holds the model's weights."""
    if getattr(model.executor, "is_direct", False):
        from .cuda.direct.backend import DirectBackend

        return DirectBackend(model, kv, options)
    if getattr(model, "device", CPU) != CPU:
        # Only models on a device need it.
        from .cuda.backend import cuda_backend

        return cuda_backend(model, kv, options, timeline)
    return host_backend(model, kv, options, timeline)


def pool_bytes(
    model: Any,
    weight_bytes: int,
    max_running: int,
    *,
    kv_bytes: int | None = None,
    device_percent: int | None = None,
    adapters_bytes: int = 0,
) -> int:
    """The size of the KV pool in bytes: `kv_bytes`, or the default, which leaves room for what a tower takes for its
    largest image.

    The weights have their memory by now; on a CPU, much of that is not touched yet. `adapters_bytes` bounds the
    adapters of a model that has some. Raises `InsufficientMemoryError` where weights, the largest step and the pool are
    more than `device_percent` of the device's memory.
    """
    if kv_bytes is not None and (model.device == CPU or device_percent is None):
        return kv_bytes
    if model.device == CPU:
        from ...loader.memory.limits import available_bytes
        from ..kv.storage import default_kv_bytes

        tower = getattr(model, "vision", None)
        tower_bytes = 0 if tower is None else tower.working_bytes()
        return default_kv_bytes(weight_bytes + tower_bytes, available_bytes())
    if getattr(model.executor, "is_direct", False):
        free_bytes, total_bytes = model.executor.device.driver.memory()
        step_bytes = model.executor.step_bytes(max_running, adapters_bytes)
    else:
        # Only models on a device need it.
        from .cuda.storage import device_memory

        free_bytes, total_bytes, step_bytes = device_memory(model.device, model.spec, max_rows=max_running)
    from ..kv.storage import MIN_KV_BYTES, device_kv_bytes

    if device_percent is not None:
        share_bytes = _share_of(
            model, total_bytes, device_percent, weight_bytes, step_bytes, kv_bytes or MIN_KV_BYTES
        )
        free_bytes = min(free_bytes, share_bytes - weight_bytes)
    return kv_bytes or device_kv_bytes(free_bytes, step_bytes)


def check_encoder_share(model: Any, weight_bytes: int, device_percent: int | None) -> None:
    """Raise `InsufficientMemoryError` where weights and the largest batch of texts are more than `device_percent` of
    the device's memory. Batches that torch computes are not counted.
    """
    if device_percent is None or not getattr(getattr(model, "executor", None), "is_direct", False):
        return
    executor = model.executor
    _, total_bytes = executor.device.driver.memory()
    batch_bytes = executor.batch_bytes(model.config.max_tokens)
    _share_of(model, total_bytes, device_percent, weight_bytes, batch_bytes, 0)


def _share_of(
    model: Any, total_bytes: int, percent: int, weight_bytes: int, step_bytes: int, kv_bytes: int
) -> int:
    """The bytes of this share of a device. Raises `InsufficientMemoryError` where these do not fit it."""
    from ...loader.device.base import check_share
    from ..kv.storage import spare_bytes

    share_bytes = total_bytes * percent // 100
    check_share(
        f"{percent} percent of {model.device}",
        share_bytes,
        weights_bytes=weight_bytes,
        step_bytes=spare_bytes(step_bytes),
        kv_bytes=kv_bytes,
    )
    return share_bytes
