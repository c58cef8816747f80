"""The executor of decoders on a CUDA device: torch's, until the backend installs its kernels."""

from __future__ import annotations

from typing import Any

import torch

from ...kv.storage import KVKind
from ...models.matrices import DecoderWeights
from ...models.spec import DecoderSpec
from ...step.batch import Int64s, StepBatch
from ..torch.backend import TorchBackend
from ..torch.decoder import TorchExecutor
from .decoder import DeviceKernels, DeviceStep
from .storage import DeviceKVStorage
from .tables import DeviceBatch


class CudaExecutor(TorchExecutor):
    """An `Executor` whose logits stay on the device, for `DeviceSampler`, when kernels compute
    them.
    """

    kernels: DeviceKernels | None = None

    @property
    def name(self) -> str:
        return "cuda"

    @torch.inference_mode()
    def embed(self, batch: StepBatch) -> torch.Tensor:
        arrays = batch.on_device
        return self.embeddings(arrays.tokens) if isinstance(arrays, DeviceBatch) else super().embed(batch)

    @torch.inference_mode()
    def begin(self, batch: StepBatch, kv: Any) -> Any:
        if self.kernels is None or not self.kernels.takes(batch, kv):
            return super().begin(batch, kv)
        arrays = batch.on_device
        positions = torch.from_numpy(batch.positions).to(self.device) if arrays is None else arrays.positions
        cos, sin = self.rope.rows(positions, max(span.context_len for span in batch.spans))
        return self.kernels.begin(batch, kv, cos, sin)

    @torch.inference_mode()
    def layers(self, step: Any, first: int, end: int, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(step, DeviceStep):
            return super().layers(step, first, end, x)
        for index in range(first, end):
            x = step.layer(index, x)
        return x

    @torch.inference_mode()
    def logits(self, x: torch.Tensor, rows: Int64s) -> Any:
        if self.kernels is None:
            return super().logits(x, rows)
        return self.kernels.logits(x[torch.from_numpy(rows).to(self.device)])

    def new_kv(self, num_blocks: int, block_size: int, kind: KVKind) -> Any:
        if kind is not KVKind.MODEL or self.spec.latent is not None:
            return super().new_kv(num_blocks, block_size, kind)
        return DeviceKVStorage(self.spec.kv_shape(num_blocks, block_size), device=self.device)


class CudaModelBackend(TorchBackend):
    """An `ExecutorFactory` for weights on a device. Computes in the dtype of the stored weights."""

    name = "cuda"

    def decoder(self, spec: DecoderSpec, weights: DecoderWeights) -> CudaExecutor:
        return CudaExecutor(spec, weights)
