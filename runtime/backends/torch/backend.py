"""The factory of torch executors for models."""

from __future__ import annotations

from ...models.encoder_weights import EncoderWeights
from ...models.executor import ComputeDtype, refusal_of, refusal_of_formats
from ...models.matrices import DecoderWeights
from ...models.spec import DecoderSpec, EncoderSpec
from ...tensors import DType
from . import decoder, encoder
from .decoder import TorchExecutor
from .encoder import TorchEncoderExecutor
from .layers import PRODUCTS
from .tensors import ComputePolicy


class TorchBackend:
    """An `ExecutorFactory`. Weights on a device stay in their dtype; on a CPU `policy` chooses."""

    name = "torch"

    def __init__(self, policy: ComputePolicy | None = None) -> None:
        """Without a policy, everything is computed in the dtype of the stored weights."""
        self._policy = policy

    def compute_dtype(self, stored: DType, *, is_quantised: bool, is_encoder: bool = False) -> ComputeDtype:
        if self._policy is None:
            return ComputeDtype(stored, stored, "as stored")
        return self._policy.choose(stored, is_quantised=is_quantised)

    def refuses_decoder(self, spec: DecoderSpec, weights: DecoderWeights) -> str | None:
        return refusal_of(spec, decoder.IMPLEMENTED, self.name) or refusal_of_formats(
            weights, PRODUCTS, self.name
        )

    def refuses_encoder(self, spec: EncoderSpec, weights: EncoderWeights) -> str | None:
        return refusal_of(spec, encoder.IMPLEMENTED, self.name)

    def decoder(self, spec: DecoderSpec, weights: DecoderWeights) -> TorchExecutor:
        return TorchExecutor(spec, weights)

    def encoder(self, spec: EncoderSpec, weights: EncoderWeights) -> TorchEncoderExecutor:
        return TorchEncoderExecutor(spec, weights)
