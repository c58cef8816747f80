"""The factory of native executors for models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....loader.native.library import VERSION, library
from ...kv.storage import Int8KVStorage, KVKind, KVStorage
from ...models.executor import ComputeDtype, EncoderExecutor, Executor
from ...models.matrices import DecoderWeights
from ...models.spec import DecoderSpec, EncoderSpec
from ...tensors import CPU, DType
from .decoder import NativeDecoder
from .implemented import NAME, refusal

if TYPE_CHECKING:
    from ...models.encoder_weights import EncoderWeights
    from ...models.speech import SpeechExecutor, SpeechWeights
    from ...models.vision import VisionExecutor, VisionWeights

_STORAGES: dict[KVKind, type[KVStorage] | type[Int8KVStorage]] = {
    KVKind.MODEL: KVStorage,
    KVKind.INT8: Int8KVStorage,
}
_COMPUTED_IN = {DType.BF16: DType.BF16, DType.F16: DType.F32, DType.F32: DType.F32}


class NativeBackend:
    """An `ExecutorFactory`. bf16 is computed in bf16 with sums in fp32; fp16, whose numbers fp32 holds, in fp32."""

    name = NAME

    def __init__(self, compute_dtype: str = "auto", threads: int | None = None) -> None:
        """`compute_dtype` is "auto" or a name as config.json has it. Raises `UsageError` where the environment names a
        library that cannot be used.
        """
        self._asked = compute_dtype
        self._library = library()
        if self._library is not None and threads is not None:
            self._library.functions.tn_set_threads(threads)

    def compute_dtype(self, stored: DType, *, is_quantised: bool, is_encoder: bool = False) -> ComputeDtype:
        if self._asked != "auto":
            return ComputeDtype(stored, DType.of_label(self._asked), "it was requested")
        chosen = _COMPUTED_IN.get(stored, stored)
        return ComputeDtype(
            stored, chosen, "as stored" if chosen is stored else "fp32 holds every fp16 number"
        )

    def refuses_decoder(self, spec: DecoderSpec, weights: DecoderWeights) -> str | None:
        return self._lacks(weights.device) or refusal(spec, weights)

    def refuses_encoder(self, spec: EncoderSpec, weights: EncoderWeights) -> str | None:
        from . import encoder  # decoders do without

        return self._lacks(weights.device) or encoder.refusal(spec, weights)

    def decoder(self, spec: DecoderSpec, weights: DecoderWeights) -> Executor:
        assert self._library is not None
        return _Decoder(spec, weights, self._library)

    def encoder(self, spec: EncoderSpec, weights: EncoderWeights) -> EncoderExecutor:
        from .encoder import NativeEncoder  # decoders do without

        assert self._library is not None
        return NativeEncoder(spec, weights, self._library)

    def vision(self, spec: EncoderSpec, weights: VisionWeights) -> VisionExecutor:
        from .vision import NativeVision  # of few models

        assert self._library is not None
        return NativeVision(spec, weights, self._library)

    def speech(self, spec: EncoderSpec, weights: SpeechWeights) -> SpeechExecutor:
        from .speech import NativeSpeech  # of few models

        assert self._library is not None
        return NativeSpeech(spec, weights, self._library)

    def _lacks(self, device: str) -> str | None:
        if device != CPU:
            return f"{self.name} computes on the CPU, and the weights are on {device}"
        return None if self._library is not None else f"{self.name} has no library for this processor"


class _Decoder(NativeDecoder):
    """Makes its pools, too."""

    @property
    def numerics(self) -> str:
        return f"{NAME}/{VERSION}/{self._library.isa}"

    def new_kv(self, num_blocks: int, block_size: int, kind: KVKind, num_states: int | None = None) -> Any:
        return _STORAGES[kind](self._spec.kv_shape(num_blocks, block_size, num_states))

    def kv_block_bytes(self, block_size: int, kind: KVKind) -> int:
        return _STORAGES[kind].block_bytes(self._spec.kv_shape(1, block_size))
