"""Models over torch tensors, computed as users' models are unless a test names a backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from teneral.loader.format.manifest import Tier
from teneral.runtime import weights
from teneral.runtime.backends.choose import BackendChoice
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.backends.torch.layers import product_of
from teneral.runtime.backends.torch.tensors import TORCH_DTYPES, ComputePolicy, to_numpy, to_torch
from teneral.runtime.models import build
from teneral.runtime.models.executor import ExecutorFactory
from teneral.runtime.models.matrices import Projection
from teneral.runtime.tensors import DType, Tensor


def dtype_of(dtype: torch.dtype) -> DType:
    """The `DType` of a torch dtype."""
    return DType[next(name for name, own in TORCH_DTYPES.items() if own is dtype)]


def arrays_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensor]:
    """The tensors in numpy; of one storage views of one array, as a load's are."""
    storages: dict[int, np.ndarray] = {}
    arrays: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        arrays[name] = own = Tensor(dtype_of(tensor.dtype), to_numpy(tensor))
        if tensor.is_contiguous() and tensor.numel():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in storages:
                storages[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            begin = tensor.storage_offset() * tensor.element_size()
            part = storages[storage.data_ptr()][begin : begin + tensor.nbytes]
            arrays[name] = Tensor(own.dtype, part.view(own.dtype.numpy).reshape(own.shape))
    return arrays


class DictWeights(weights.DictWeights):
    """Finished weights. Arrays share the tensors' memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(arrays_of(tensors))

    def in_torch(self, name: str) -> torch.Tensor:
        return to_torch(self.tensor(name))


def build_model(
    config: Mapping[str, Any],
    weights: weights.Weights,
    *,
    backends: Iterable[ExecutorFactory] | None = None,
    **files: Any,
) -> Any:
    """A model of `backends`, by default of those that the product chooses without a setting: the native core first, in
    one thread, because the tests' processes share the cores. It promises equal bits for equal requests, in any batch
    and under any load; torch, the reference in tests of backends, does not.
    """
    return build.build_model(config, weights, backends or BackendChoice(threads=1).model_backends(), **files)


def torch_model(
    config: Mapping[str, Any], weights: weights.Weights, *, policy: ComputePolicy | None = None, **files: Any
) -> Any:
    """A model that torch computes, for tests of torch's backend."""
    return build_model(config, weights, backends=[TorchBackend(policy)], **files)


class WaitedGate:
    """A gate that opens when `wait` is called, which a pass does layer by layer."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait

    def __call__(self) -> None:
        self._wait()

    def opens(self, timeout_s: float, tier: Tier = Tier.REFINE) -> bool:
        if timeout_s > 0:
            self._wait()
        return timeout_s > 0

    def reading(self, tier: Tier) -> AbstractContextManager[None]:
        self._wait()
        return nullcontext()


def product(projection: Projection) -> Any:
    """What torch computes it with."""
    return product_of(projection, torch.device("cpu"))


def forward(decoder: Any, *arguments: Any, **options: Any) -> torch.Tensor:
    return torch.from_numpy(decoder.forward(*arguments, **options))


def embed(encoder: Any, token_lists: Any) -> torch.Tensor:
    return torch.from_numpy(encoder.embed(token_lists))
