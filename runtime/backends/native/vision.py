"""The native executor of vision towers: the layers of an encoder over the patches of one tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...models.executor import TextBatch
from ...models.matrices import StoredProjection
from .encoder import NativeEncoder

if TYPE_CHECKING:
    from ....loader.native.library import Library
    from ...models.matrices import VisionWeights
    from ...models.spec import EncoderSpec
    from ...step.batch import Int64s
    from .arrays import Array


class NativeVision:
    """A `VisionExecutor`. One thread at a time."""

    def __init__(self, spec: EncoderSpec, weights: VisionWeights, library: Library) -> None:
        """Reads no tensor's content."""
        self._weights = weights
        self._encoder = NativeEncoder(spec, weights.encoder, library)

    def embed(self, patches: Array, places: Int64s) -> Array:
        positions = self._weights.encoder.positions
        assert positions is not None
        x = self._encoder.product(StoredProjection((self._weights.patches,)), patches, patches.dtype)
        return self._encoder.operations.add(x, self._encoder.rows_of(positions, places))

    def layers(self, first: int, end: int, x: Array) -> Array:
        one = TextBatch(np.zeros(len(x), np.int64), np.array([0, len(x)], np.int64))
        return self._encoder.layers(one, first, end, x)

    def connect(self, x: Array, order: Int64s) -> Array:
        final_norm = self._weights.encoder.final_norm
        assert final_norm is not None
        states = self._encoder.norm(x, final_norm)[order]
        connector = self._weights.connector
        return self._encoder.product(connector, states.reshape(-1, connector.num_in), x.dtype)
