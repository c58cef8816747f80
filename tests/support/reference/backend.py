"""The executors in numpy as a backend, which the tests compare with the others."""

from __future__ import annotations

from typing import Any

from tests.support.reference.models import ReferenceDecoder, ReferenceEncoder

from teneral.loader.native.library import VERSION
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.native.implemented import refusal_of_spec
from teneral.runtime.kv.storage import Int8KVStorage, KVKind, KVStorage
from teneral.runtime.models.encoder_weights import EncoderWeights
from teneral.runtime.models.executor import EncoderExecutor, Executor, native_alone
from teneral.runtime.models.matrices import DecoderWeights
from teneral.runtime.models.spec import DecoderSpec, EncoderSpec

STORAGES: dict[KVKind, Any] = {KVKind.MODEL: KVStorage, KVKind.INT8: Int8KVStorage}


class ReferenceBackend(NativeBackend):
    """The native core's operations in numpy: a hundred times slower, and needing no library."""

    name = "numpy"

    def refuses_decoder(self, spec: DecoderSpec, weights: DecoderWeights) -> str | None:
        lacked = "takes_images" if spec.takes_images else native_alone(spec)
        return f"{self.name} does not implement {lacked}" if lacked is not None else refusal_of_spec(spec)

    def refuses_encoder(self, spec: EncoderSpec, weights: EncoderWeights) -> str | None:
        from teneral.runtime.backends.native import encoder

        return encoder.refusal(spec, weights)

    def decoder(self, spec: DecoderSpec, weights: DecoderWeights) -> Executor:
        return _PooledDecoder(spec, weights)

    def encoder(self, spec: EncoderSpec, weights: EncoderWeights) -> EncoderExecutor:
        return ReferenceEncoder(spec, weights)


class _PooledDecoder(ReferenceDecoder):
    numerics = f"{ReferenceBackend.name}/{VERSION}"

    def new_kv(self, num_blocks: int, block_size: int, kind: KVKind, num_states: int | None = None) -> Any:
        return STORAGES[kind](self._spec.kv_shape(num_blocks, block_size, num_states))

    def kv_block_bytes(self, block_size: int, kind: KVKind) -> int:
        return int(STORAGES[kind].block_bytes(self._spec.kv_shape(1, block_size)))
