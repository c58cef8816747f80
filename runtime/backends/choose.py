"""Which way computes a model: what `--backend` asks for, and what this machine and its weights allow.

The only place that knows all backends. What is chosen is logged; a wish that cannot be met is an error, never silently
something else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ...loader.errors import UsageError
from ...loader.process.cpu import available_cores
from ...loader.timeline import Timeline
from ..models.executor import ExecutorFactory
from ..step.backend import Backend, BackendOptions
from ..tensors import CPU

AUTO, NATIVE, TORCH, TRANSFORMERS = "auto", "native", "torch", "transformers"
BACKENDS = (AUTO, NATIVE, TORCH, TRANSFORMERS)


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What was asked for, and for where."""

    asked: str = AUTO  # one of BACKENDS
    device: str = CPU  # where the weights are
    compute_dtype: str = AUTO  # or a name as config.json has it
    threads: int | None = None  # None: as many as there are cores
    trim_imports: bool = False

    @property
    def is_torch(self) -> bool:
        """Whether torch computes whatever the model is, so that its import need not wait for the model's config."""
        return self.device != CPU or self.asked in (TORCH, TRANSFORMERS)

    def check(self) -> None:
        """Raises `UsageError` for what cannot be had here."""
        if self.asked == NATIVE and self.device != CPU:
            raise UsageError(
                f"the native backend computes on the CPU, and the weights are on {self.device}",
                key="backend",
                hint="Leave --backend out, or add --device cpu.",
            )
        if self.asked == TRANSFORMERS and self.device != CPU:
            raise UsageError(
                f"models that transformers computes are on the CPU, and the weights are on {self.device}",
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

    def model_backends(self) -> Iterator[ExecutorFactory]:
        """In the order in which they are asked whether they compute a model. Each is imported when its turn comes."""
        self.check()
        if self.device != CPU:
            self.import_torch()
            from .cuda.executor import CudaModelBackend  # nobody else has a device

            yield CudaModelBackend()
            return
        if self.asked != TORCH:
            from .native.backend import NativeBackend

            yield NativeBackend(self.compute_dtype, self.threads)
        if self.asked == TORCH or (self.asked == AUTO and has_torch()):
            self.import_torch()
            from .torch.backend import TorchBackend
            from .torch.compute_dtype import ComputePolicy

            yield TorchBackend(ComputePolicy.of_this_machine(self.compute_dtype))
        if self.asked != TORCH:
            from .native.backend import ReferenceBackend

            yield ReferenceBackend(self.compute_dtype)

    def import_torch(self) -> bool:
        """The longest import by far. Whether it was trimmed; the environment decides how its threads wait."""
        # OpenMP's threads sleep between regions instead of spinning: a container's cores are few, and metered.
        # Read once, when torch brings the library in (docs/decisions/0007).
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from ..torch_import import import_torch

        # transformers looks into corners of torch that others do not.
        trimmed = import_torch(trim=self.trim_imports and self.asked != TRANSFORMERS)
        import torch

        torch.set_num_threads(self.threads or available_cores())
        return trimmed


def model_of_transformers(config: Any, weights: Any, compute_dtype: str, **files: Any) -> tuple[Any, bool]:
    """A model that transformers computes, and whether it is an encoder. As `build_with_transformers`."""
    from .transformers.build import build_with_transformers  # few ask for it
    from .transformers.encoder import TransformersEncoder

    model = build_with_transformers(config, weights, compute_dtype=compute_dtype, **files)
    return model, isinstance(model, TransformersEncoder)


def step_backend(model: Any, kv: Any, options: BackendOptions, timeline: Timeline | None) -> Backend:
    """A `MakeBackend`: the one for where the model's weights are."""
    if getattr(model, "device", CPU) != CPU:
        from .cuda.backend import cuda_backend  # nobody else needs it

        return cuda_backend(model, kv, options, timeline)
    from .host import host_backend

    return host_backend(model, kv, options, timeline)


def pool_bytes(model: Any, weight_bytes: int, max_running: int) -> int:
    """The KV pool's size unless somebody says it. The weights have their memory by now; on a CPU, much of that is
    untouched yet.
    """
    if model.device == CPU:
        from ...loader.memory.limits import available_bytes
        from ..kv.sizing import default_kv_bytes

        return default_kv_bytes(weight_bytes, available_bytes())
    from .cuda.budget import pool_bytes_on  # nobody else has a device

    return pool_bytes_on(model.device, model.spec, max_rows=max_running)


def has_torch() -> bool:
    """Whether torch is installed. Does not import it."""
    return find_spec("torch") is not None
