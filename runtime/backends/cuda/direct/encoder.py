"""The executor of encoders and classifiers on a device, without torch: a batch is a program over fixed addresses.

Embeddings come back as they are pooled; the layers of sentence-transformers behind them, and their length, are the
host's. What a text gives depends on nothing that else is in its batch.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from .....loader.device.driver.base import Driver
from ....errors import ModelError
from ....models.encoder import MAX_BATCH_TOKENS
from ....models.encoder_weights import EncoderWeights
from ....models.executor import Floats, TextBatch
from ....models.pooling import normalize, through_dense
from ....models.relative_positions import bias_buckets
from ....models.spec import EncoderSpec
from ....step.batch import SequenceSpan, StepBatch
from ....tensors import DType, from_float32, to_float32
from .device import NAME, DirectDevice, memory_errors
from .encoder_launches import EncoderArrays, EncoderKey, EncoderLaunches, modules_of_encoder
from .memory import Array, DeviceArena
from .program import MIN_GRAPH_STEPS, Graph, Program
from .tables import StepTables, bucket_of
from .workspace import Uplink

# Rows that there is room for from the first batch on, and those for which it is kept between batches.
_FIRST_ROWS, _KEPT_ROWS = 512, MAX_BATCH_TOKENS


class BatchProgram:
    """The launches of batches of one size, whose layers become a graph where they come often."""

    def __init__(self, driver: Driver, program: Program) -> None:
        self._driver = driver
        self._program = program
        self._num_uses = 0
        self.graph: Graph | None = None

    def embed(self, stream: int) -> None:
        self._program.launch(stream, 0, 1)

    def layers(self, stream: int, first: int, end: int) -> None:
        """[first, end) of them."""
        of_layers = self._program.stages[1:-1]
        if (first, end) != (0, len(of_layers)):
            self._program.launch(stream, first + 1, end + 1)
            return
        self._num_uses += 1
        if self.graph is None and self._num_uses >= MIN_GRAPH_STEPS:
            self.graph = Program(self._driver, of_layers).graph()
        if self.graph is not None:
            self.graph.launch(stream)
        else:
            self._program.launch(stream, 1, end + 1)

    def finish(self, stream: int) -> None:
        self._program.launch(stream, len(self._program.stages) - 1)

    def close(self) -> None:
        """Not while it runs."""
        if self.graph is not None:
            self.graph.close()


class EncoderWorkspace:
    """The arrays of one model, for batches of at most `num_rows`, and the programs over them."""

    def __init__(
        self, device: DirectDevice, spec: EncoderSpec, weights: EncoderWeights, num_rows: int
    ) -> None:
        """Behind the embeddings' gate. Raises `CudaError` where the memory is not there."""
        self._device = device
        size_bytes = self.measure(spec, num_rows)
        self._address = device.driver.alloc(size_bytes)
        self.arrays = EncoderArrays(DeviceArena(self._address, size_bytes), spec, num_rows)
        self._tables = StepTables(
            self.arrays.sizes,
            group=1,
            num_kv_heads=spec.num_heads,
            num_processors=device.num_processors,
            vocab_size=spec.vocab_size,
            num_blocks=num_rows,
            block_size=1,
            sees_ahead=True,
            max_slots=0,
        )
        self._uplink = Uplink(device.driver, device.stream, 4 * self.arrays.sizes.offsets["end"])
        self._launches = EncoderLaunches(device.kernels(spec.dtype), spec, weights, self.arrays)
        self.programs: dict[EncoderKey, BatchProgram] = {}
        self._take_angles(spec)
        if spec.position_bias is not None:
            assert weights.relative is not None
            table = to_float32(weights.relative.on_host(), weights.relative.dtype)  # (buckets, heads)
            table = to_float32(from_float32(table, spec.dtype), spec.dtype)
            buckets = bias_buckets(spec.position_bias, self.arrays.reach)
            self._put(self.arrays.bias, table[buckets].T * np.float32(math.log2(math.e)))

    @staticmethod
    def measure(spec: EncoderSpec, num_rows: int) -> int:
        """The memory that arrays for this number of rows take."""
        return DeviceArena.measure(lambda arena: EncoderArrays(arena, spec, num_rows))

    def load(self, batch: TextBatch) -> BatchProgram:
        """Have the batch's tables on the device; returns the program for it. Raises `ModelError` for ids that nothing
        has.
        """
        step, types = _step_of(batch), np.empty(0, np.int64)
        if self.arrays.sizes.max_types:
            types = np.zeros(len(batch.tokens), np.int64) if batch.types is None else batch.types
        address, numbers = self._uplink.room()
        plan, num = self._tables.fill(step, numbers, types=types)
        self._uplink.send(self.arrays.tables.address, address, 4 * num)
        most = self.arrays.num_rows
        key = EncoderKey(bucket_of(len(batch.tokens), most), bucket_of(len(step.spans), most), plan.many)
        if key not in self.programs:
            self.programs[key] = BatchProgram(self._device.driver, self._launches.program(key))
        return self.programs[key]

    def close(self) -> None:
        """Wait for the stream's work, and free the memory."""
        self._uplink.close()
        for program in self.programs.values():
            program.close()
        self._device.driver.free(self._address)

    def _take_angles(self, spec: EncoderSpec) -> None:
        """The same values as the host's cores have: rounded to the model's dtype."""
        for rotary, arrays in zip((spec.rotary, spec.local_rotary), self.arrays.angles, strict=True):
            if rotary is not None:
                for array, numbers in zip(arrays, rotary.tables(0, self.arrays.num_rows), strict=True):
                    self._put(array, to_float32(from_float32(numbers, spec.dtype), spec.dtype))

    def _put(self, array: Array, numbers: Floats) -> None:
        host = np.ascontiguousarray(numbers, np.float32)
        assert host.shape == array.shape
        self._device.driver.copy_in(array.address, host.ctypes.data, host.nbytes, self._device.stream)
        self._device.driver.synchronize_stream(self._device.stream)  # before `host` is freed


class DirectEncoder:
    """See `models.executor.EncoderExecutor`. One batch at a time: a batch is its own activations."""

    name = NAME
    is_direct = True
    runs_layers_together = True

    def __init__(self, spec: EncoderSpec, weights: EncoderWeights, device: DirectDevice) -> None:
        """Loads kernels, which may compile some."""
        self.spec = spec
        self.device = device
        self._weights = weights
        self._workspace: EncoderWorkspace | None = None
        self._under_way: tuple[TextBatch, BatchProgram] | None = None
        device.kernels(spec.dtype).load(modules_of_encoder(spec, weights))

    @memory_errors()
    def embed(self, batch: TextBatch) -> TextBatch:
        """Takes memory for a batch that is larger than those before it; what a text takes that is longer than any batch
        of several is freed behind it.
        """
        self._under_way = None
        self._check(batch)
        workspace = self._with_rows(len(batch.tokens))
        self._under_way = batch, workspace.load(batch)
        self._program(batch).embed(self.device.stream)
        return batch

    @memory_errors()
    def layers(self, batch: TextBatch, first: int, end: int, x: TextBatch) -> TextBatch:
        self._program(batch).layers(self.device.stream, first, end)
        return x

    @memory_errors()
    def finish(self, batch: TextBatch, x: TextBatch) -> Floats:
        """Blocks until the device is done. Raises `ModelError` where numbers were too large for fp16."""
        spec, program, workspace = self.spec, self._program(batch), self._workspace
        assert workspace is not None
        program.finish(self.device.stream)
        array = workspace.arrays.scores if spec.num_labels else workspace.arrays.states
        rows = np.empty((len(batch.starts) - 1, array.shape[1]), np.float32)
        self.device.read(Array(array.address, rows.shape, array.dtype), rows.ctypes.data)
        self._under_way = None
        if workspace.arrays.num_rows > _KEPT_ROWS:
            self.close()
        if spec.dtype is DType.F16 and not np.isfinite(rows).all():
            raise ModelError(
                "the model's numbers are too large for fp16",
                hint="Weights that are stored in fp32 can be computed with in bf16: --compute-dtype bfloat16.",
            )
        if spec.num_labels:
            return rows
        activations = [layer.activation for layer in spec.dense]
        rows = through_dense(self._weights.sentence, activations, rows)
        if spec.normalize:
            normalize(rows)
        return rows

    def batch_bytes(self, max_tokens: int) -> int:
        """The memory of the largest batch of texts of up to `max_tokens`."""
        return EncoderWorkspace.measure(self.spec, _room_for(max(max_tokens, MAX_BATCH_TOKENS)))

    def close(self) -> None:
        """Free its memory, once the device is done with it. Idempotent."""
        if self._workspace is not None:
            self._workspace.close()
        self._workspace = self._under_way = None

    def _program(self, batch: TextBatch) -> BatchProgram:
        assert self._under_way is not None
        assert self._under_way[0] is batch, "another batch has been begun"
        return self._under_way[1]

    def _with_rows(self, num_rows: int) -> EncoderWorkspace:
        if self._workspace is None or self._workspace.arrays.num_rows < num_rows:
            self.close()
            most = _room_for(num_rows)
            self._workspace = EncoderWorkspace(self.device, self.spec, self._weights, most)
        return self._workspace

    def _check(self, batch: TextBatch) -> None:
        """Raise `ModelError` for texts that no address may be made of."""
        starts, num_rows, spec = batch.starts, len(batch.tokens), self.spec
        lengths = np.diff(starts)
        if not num_rows or starts[0] or starts[-1] != num_rows or lengths.min() < 1:
            raise ModelError(f"the texts of a batch are not its {num_rows} tokens")
        if spec.max_positions and lengths.max() + spec.position_offset > spec.max_positions:
            raise ModelError(f"a text of {lengths.max()} tokens has no positions for all of them")
        types, num_types = batch.types, spec.type_vocab_size
        if types is None or not num_types:
            return
        if len(types) != num_rows or not 0 <= types.min() <= types.max() < num_types:
            raise ModelError(f"a token's type is outside [0, {num_types})")


def _room_for(num_rows: int) -> int:
    return 1 << (max(num_rows, _FIRST_ROWS) - 1).bit_length()


def _step_of(batch: TextBatch) -> StepBatch:
    """All of the texts as one step; a row's keys and values have its own number, and each text has one scored row."""
    num_rows, starts = len(batch.tokens), batch.starts.tolist()
    rows = np.arange(num_rows, dtype=np.int64)
    spans = tuple(
        SequenceSpan(start, end - start, end - start, tuple(range(start, end)))
        for start, end in pairwise(starts)
    )
    positions = rows - np.repeat(batch.starts[:-1], np.diff(batch.starts))
    return StepBatch(batch.tokens, positions, rows, spans, batch.starts[:-1])
