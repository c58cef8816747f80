"""The native executor of vision towers: the layers of an encoder over the patches of one tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...models.executor import Floats, TextBatch
from ...models.fields import Norm
from ...models.matrices import StoredProjection
from ...models.vision import BAND_ROWS
from ...tensors import from_float32, to_float32
from .encoder import NativeEncoder
from .operations import ACTIVATIONS

if TYPE_CHECKING:
    from ....loader.native.library import Library
    from ...models.matrices import Projection
    from ...models.spec import EncoderSpec
    from ...models.vision import VisionWeights
    from ...step.batch import Int64s
    from .arrays import Array


class NativeVision:
    """A `VisionExecutor`. One thread at a time."""

    def __init__(self, spec: EncoderSpec, weights: VisionWeights, library: Library) -> None:
        """Reads no tensor's content."""
        self._spec = spec
        self._weights = weights
        self._encoder = NativeEncoder(spec, weights.encoder, library)

    def working_bytes(self, num_rows: int) -> int:
        return self._encoder.missing_bytes(num_rows) if self._spec.num_layers else 0

    def embed(self, patches: Array, places: Int64s, shares: Floats | None) -> Array:
        patches = self._entry_norm(patches, 0)
        x = self._encoder.product(StoredProjection((self._weights.patches,)), patches, patches.dtype)
        if (row := self._weights.class_row) is not None:
            x = np.concatenate((from_float32(to_float32(row.array, row.dtype), self._spec.dtype)[None], x))
        return self._entry_norm(self._with_positions(self._entry_norm(x, 1), places, shares), 2)

    def _entry_norm(self, x: Array, number: int) -> Array:
        """In place; nothing, where there are none."""
        norm = self._weights.entry_norms[number] if self._weights.entry_norms else None
        if norm is None:
            return x
        eps = self._weights.entry_norm_eps
        return self._encoder.operations.norm(x, x, norm.weight, norm.bias, eps, Norm.LAYER)

    def _with_positions(self, x: Array, places: Int64s, shares: Floats | None) -> Array:
        positions = self._weights.encoder.positions
        if positions is None:
            return x
        if shares is None:
            return self._encoder.operations.add(x, self._encoder.rows_of(positions, places))
        used, numbers = np.unique(places, return_inverse=True)
        table, numbers = to_float32(positions.array[used], positions.dtype), numbers.reshape(places.shape)
        for first in range(0, len(x), BAND_ROWS):
            band = slice(first, first + BAND_ROWS)
            more = np.zeros(x[band].shape, np.float32)
            for taps, share in zip(numbers[band].T, shares[band].T, strict=True):
                more += table[taps] * share[:, None]
            self._encoder.operations.add(x[band], from_float32(more, self._spec.dtype))
        return x

    def layers(self, first: int, end: int, x: Array, starts: Int64s, turns: Floats | None) -> Array:
        return self._encoder.layers(TextBatch(np.zeros(len(x), np.int64), starts), first, end, x, turns)

    def connect(self, x: Array, order: Int64s) -> Array:
        final_norm = self._weights.encoder.final_norm
        states = x if final_norm is None else self._encoder.norm(x, final_norm)
        connector, norm = self._weights.connector, self._weights.connector_norm
        if norm is None:
            rows = states[order].reshape(len(order), connector.num_in)
        else:
            rows = self._means(states, order)
            self._encoder.operations.norm(rows, rows, norm, None, self._spec.norm_eps, Norm.RMS_PLUS_ONE)
        output = self._weights.connector_output
        return (
            self._encoder.product(connector, rows, x.dtype)
            if output is None
            else self._mlp(connector, output, rows)
        )

    def _means(self, states: Array, order: Int64s) -> Array:
        weights, dtype = self._weights, self._spec.dtype
        starts = np.arange(len(order) + 1, dtype=np.int64) * order.shape[1]
        rows = from_float32(self._encoder.operations.mean(states[order.reshape(-1)], starts), dtype)
        if weights.mean_scale == 1.0 and weights.mean_standard is None:
            return rows
        wide = to_float32(rows, dtype) * np.float32(weights.mean_scale)
        if weights.mean_standard is not None:
            less, factor = (to_float32(each.array, each.dtype) for each in weights.mean_standard)
            wide = (wide - less) * factor
        return from_float32(wide, dtype)

    def connect_deep(self, number: int, x: Array, order: Int64s) -> Array:
        deep = self._weights.deep[number]
        rows = x[order].reshape(len(order), -1)
        return self._mlp(deep.inner, deep.output, self._encoder.norm(rows, deep.norm))

    def _mlp(self, inner: Projection, output: Projection, rows: Array) -> Array:
        rows = self._encoder.product(inner, rows, rows.dtype)
        self._encoder.operations.activate(rows, None, rows, ACTIVATIONS[self._spec.head_activation])
        return self._encoder.product(output, rows, rows.dtype)
