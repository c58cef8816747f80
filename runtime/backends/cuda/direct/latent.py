"""Attention over latents: a head's queries and sums, multiplied with the head's own rows of one matrix.

The pool has a token's latent and its turned key. Prompts and single tokens are computed in one form, that of the host's
cores (decision 0074): queries are multiplied with the rows for keys, and attend to latents as to one key head; sums of
latents are multiplied with the rows for values. Floats are read where they lie; of other formats there are copies.
"""

from __future__ import annotations

import numpy as np

from .....loader.device.driver.base import Driver, KernelLaunch
from ....models.decoder_config import LatentAttention
from ....models.matrices import DecoderWeights, DenseMatrix, Matrix
from ....models.spec import DecoderSpec
from ....tensors import DType, from_float32
from .arguments import AbsorbQueries, HeadProduct, MatrixPart, PlaceLatents, TransposeMatrix
from .memory import Array, DeviceArena
from .products import PRODUCT_THREADS, MatrixLayout, kernel_for, matrices_of, product_launch
from .program import Kernels
from .row_launches import HEAD_THREADS, HEADS_PER_BLOCK, THREADS, RowLaunches
from .sources import LATENT, ROWS
from .storage import LayerPlaces

_ABSORBED_ROWS, _ABSORBED_COLUMNS = 32, 512  # that a block has
_TILE = 32  # rows and columns that a block transposes
_NUM_COUNTS = 8


def copied_layers(weights: DecoderWeights, dtype: DType) -> list[int]:
    """The layers whose matrices of latents are not floats of this dtype, and are copied as such."""
    found = []
    for number, layer in enumerate(weights.layers):
        if layer.key_value_up is not None:
            (matrix,) = matrices_of(layer.key_value_up)
            if type(matrix) is not DenseMatrix or matrix.weight.dtype is not dtype:
                found.append(number)
    return found


def query_dim(spec: DecoderSpec, latent: LatentAttention) -> int:
    """The numbers of a query."""
    return latent.plain_dim + spec.rotary.dim


def projected_size(spec: DecoderSpec, latent: LatentAttention) -> int:
    """The numbers that a layer's input is projected to: inputs of queries, then a latent and a key."""
    return (latent.query_rank or spec.num_heads * query_dim(spec, latent)) + spec.head_dim


class LatentArrays:
    """Arrays around a step's attention, and copies of matrices."""

    def __init__(
        self, arena: DeviceArena, spec: DecoderSpec, latent: LatentAttention, num_rows: int, num_copies: int
    ) -> None:
        dtype, heads, rank = spec.dtype, spec.num_heads, latent.rank
        of_queries = (num_rows, heads * query_dim(spec, latent)) if latent.query_rank else (0, 1)
        self.low = arena.take("low ranks of queries", (num_rows, latent.query_rank), dtype)
        self.queries = arena.take("queries", of_queries, dtype)
        self.absorbed = arena.take("absorbed queries", (num_rows, heads, spec.head_dim), dtype)
        self.sums = arena.take("sums of latents", (num_rows, heads, rank), dtype)
        num_out, num_in = heads * (latent.plain_dim + latent.value_dim), rank if num_copies else 0
        self.copies = arena.take("copies of latents' matrices", (num_copies, num_out, rank), dtype)
        self.turned = arena.take("a matrix of latents, transposed", (num_in, num_out), dtype)
        self.identity = arena.take("identity", (num_in, rank), dtype)
        self.identity_counts = arena.take("counts of the identity", (_NUM_COUNTS,), DType.U32)


class LatentLaunches(RowLaunches):
    """Makes the launches around attention over latents. Reads no weights."""

    def __init__(
        self,
        kernels: Kernels,
        counts: Array,
        spec: DecoderSpec,
        latent: LatentAttention,
        weights: DecoderWeights,
        arrays: LatentArrays,
    ) -> None:
        super().__init__(kernels, counts, spec.norm, latent.norm_eps)
        self._spec = spec
        self._latent = latent
        self._layers = weights.layers
        self.arrays = arrays
        self._copies = {
            layer: arrays.copies.row(n) for n, layer in enumerate(copied_layers(weights, spec.dtype))
        }

    def load(self, driver: Driver, stream: int) -> None:
        """Have what copies are made with on the device. Blocks."""
        identity, counts = self.arrays.identity, self.arrays.identity_counts
        host = from_float32(np.eye(*identity.shape, dtype=np.float32), identity.dtype)
        num_rows = np.full(counts.shape, identity.shape[0], np.uint32)
        for array, numbers in ((identity, host), (counts, num_rows)):
            if numbers.size:
                driver.copy_in(array.address, numbers.ctypes.data, numbers.nbytes, stream)
        driver.synchronize_stream(stream)  # before `host` is freed

    def copy(self, number: int) -> list[KernelLaunch]:
        """Make the layer's copy of what its matrix is now: its product with the identity is its transpose."""
        matrix, identity, turned = self._matrix(number), self.arrays.identity, self.arrays.turned
        num_in, num_out = turned.shape
        transposing = TransposeMatrix(
            source=turned.address, out=self._copies[number], num_in=num_in, num_out=num_out
        )
        grid = -(-num_in // _TILE), -(-num_out // _TILE)
        return [
            product_launch(
                self._kernels, matrix, identity, turned, self.arrays.identity_counts, bucket=num_in
            ),
            self._kernels.launch(LATENT, "transpose_matrix", grid, THREADS, transposing),
        ]

    def before(
        self,
        number: int,
        down: Array,
        angles: tuple[int, int],
        places: LayerPlaces,
        tables: tuple[int, int],
        rows: int,
    ) -> list[KernelLaunch]:
        """From the projected rows to queries that attend to latents, and the rows' own in the pool. `angles` are
        addresses of cosines and sines, `tables` those of the rows' positions and slots.
        """
        spec, latent, layer, arrays = self._spec, self._latent, self._layers[number], self.arrays
        assert layer.key_norm is not None
        before = down.shape[1] - spec.head_dim
        own = Array(down.address + before * down.dtype.size_bytes, down.shape, down.dtype)
        launches, queries = [self._norm(layer.key_norm, own, own, rows)], down
        if layer.query_up is not None and layer.query_norm is not None:
            queries = arrays.queries
            launches.append(self._norm(layer.query_norm, down, arrays.low, rows))
            launches += self._product(layer.query_up, arrays.low, queries, rows)
        placing = PlaceLatents(
            queries=queries.address,
            latents=own.address,
            absorbed=arrays.absorbed.address,
            pool=places.keys,
            scales=places.key_scales,
            cos=angles[0],
            sin=angles[1],
            positions=tables[0],
            slots=tables[1],
            counts=self._counts.address,
            num_heads=spec.num_heads,
            plain_dim=latent.plain_dim,
            rotary_dim=spec.rotary.dim,
            rank=latent.rank,
            query_stride=queries.shape[1],
            latent_stride=down.shape[1],
            interleaved=spec.rotary.interleaved,
            wide_turns=spec.wide_rotary,
        )
        grid = rows, -(-(spec.num_heads + 1) // HEADS_PER_BLOCK)
        launches.append(self._kernels.launch(ROWS, "place_latents", grid, HEAD_THREADS, placing))
        return [*launches, self._absorb(number, queries, rows)]

    def behind(self, number: int, out: Array, rows: int) -> KernelLaunch:
        """From sums of latents to the rows' outputs, those of all heads side by side."""
        spec, latent, sums = self._spec, self._latent, self.arrays.sums
        layout = MatrixLayout("float", latent.rank, latent.rank, scale_rows=1, scale_kind=0, bias_kind=0)
        # Of a head's rows, those for keys come first.
        of_keys = latent.plain_dim * latent.rank * spec.dtype.size_bytes
        part = MatrixPart(weight=self._address(number) + of_keys)
        x = Array(sums.address, (sums.shape[0], latent.rank), sums.dtype)
        product = HeadProduct(
            each=layout.product(part, latent.value_dim, x, out, self._counts),
            head_rows=latent.plain_dim + latent.value_dim,
            x_stride=spec.num_heads * latent.rank,
        )
        kernel = kernel_for(rows)
        grid = -(-rows // kernel.rows), spec.num_heads * -(-latent.value_dim // kernel.outs)
        return self._kernels.launch(LATENT, f"{LATENT}_{kernel.name}", grid, PRODUCT_THREADS, product)

    def _absorb(self, number: int, queries: Array, rows: int) -> KernelLaunch:
        """Plain numbers of queries times the rows for keys."""
        spec, latent, out = self._spec, self._latent, self.arrays.absorbed
        arguments = AbsorbQueries(
            weight=self._address(number),
            queries=queries.address,
            out=out.address,
            counts=self._counts.address,
            num_heads=spec.num_heads,
            head_rows=latent.plain_dim + latent.value_dim,
            rank=latent.rank,
            plain_dim=latent.plain_dim,
            query_dim=query_dim(spec, latent),
            query_stride=queries.shape[1],
            out_dim=spec.head_dim,
        )
        grid = -(-rows // _ABSORBED_ROWS), spec.num_heads, -(-latent.rank // _ABSORBED_COLUMNS)
        return self._kernels.launch(LATENT, "absorb_queries", grid, THREADS, arguments)

    def _address(self, number: int) -> int:
        """The layer's matrix, of floats of the model's dtype."""
        if number in self._copies:
            return self._copies[number]
        address: int = self._matrix(number).weight.array.address
        return address

    def _matrix(self, number: int) -> Matrix:
        projection = self._layers[number].key_value_up
        assert projection is not None
        (matrix,) = matrices_of(projection)
        return matrix
