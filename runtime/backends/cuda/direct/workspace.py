"""Everything that steps write, at fixed addresses: the arena's layout, and the tables' way there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from .....loader.device.driver.base import Driver
from ....models.spec import DecoderSpec
from ....step.batch import Int64s, StepBatch
from ....step.logprobs import rows_at_once
from ....tensors import DType
from .device import DirectDevice
from .experts import ExpertArrays
from .latent import LatentArrays, projected_size
from .memory import Array, DeviceArena
from .storage import DirectPool
from .tables import FEW_PAIRS, SLOTS, AttentionPlan, ProgramKey, StepTables, TableSizes, U32s

_NUM_UPLINKS = 3
_FIRST_POSITIONS = 4096  # whose angles are there from the start
_TEXTS_ALONE = 1024  # of a pass without an engine: `models.pooled_decoder.STEP_TOKENS`


class WorkspaceLimits(Struct, frozen=True, kw_only=True):
    """The largest step. Defaults are `EngineOptions`'s, but for `max_spans`."""

    max_rows: int = 2048
    max_spans: int = 256
    max_context: int
    block_size: int = 16
    num_logits: int | None = None  # rows of logits, of those that are normalised for them; None: all
    num_latent_copies: int = 0  # of matrices: `latent.copied_layers`

    @classmethod
    def alone(cls, spec: DecoderSpec, block_size: int = 16) -> WorkspaceLimits:
        """For passes without an engine, as of texts that are embedded."""
        return cls(
            max_rows=max(2048, spec.max_context if spec.is_bidirectional else 0),
            max_spans=_TEXTS_ALONE,
            max_context=spec.max_context,
            block_size=block_size,
            num_logits=rows_at_once(spec.vocab_size),
        )

    def table_sizes(self, spec: DecoderSpec) -> TableSizes:
        group = spec.num_heads // spec.num_kv_heads
        keys = [ProgramKey(self.max_rows, many, SLOTS[-1]) for many in (False, True)]
        return TableSizes(
            max_rows=self.max_rows,
            max_spans=self.max_spans,
            max_logits=self.max_logits(spec.vocab_size),
            max_items=max(key.num_items(group, self.max_spans) for key in keys),
            max_blocks=self.max_spans * (-(-self.max_context // self.block_size) + 1),
        )

    def max_logits(self, vocab_size: int) -> int:
        """Rows that the head takes: two for each sequence, or a chunk of a prompt's."""
        return min(self.max_rows, max(2 * self.max_spans, rows_at_once(vocab_size)))


class StepArrays:
    """The arrays of an arena."""

    def __init__(self, arena: DeviceArena, spec: DecoderSpec, limits: WorkspaceLimits) -> None:
        rows, dtype = limits.max_rows, spec.dtype
        num_logits = limits.max_logits(spec.vocab_size)
        latent, value_dim = spec.latent, spec.head_dim
        attended_size = spec.num_heads * spec.head_dim
        heads_size = attended_size + 2 * spec.num_kv_heads * spec.head_dim
        if latent is not None:
            attended_size, value_dim = spec.num_heads * latent.value_dim, latent.rank
            heads_size = projected_size(spec, latent)
        inner_size, angles = _inner_size(spec), (limits.max_context, spec.rotary.dim // 2)
        split = (SLOTS[-1], spec.num_kv_heads, FEW_PAIRS)
        self.tables = arena.take("tables", (limits.table_sizes(spec).offsets["end"],), DType.U32)
        self.x = arena.take("rows", (rows, spec.hidden_size), dtype)
        self.normed = arena.take("normed rows", (rows, spec.hidden_size), dtype)
        self.heads = arena.take("heads", (rows, heads_size), dtype)
        self.attended = arena.take("attended heads", (rows, attended_size), dtype)
        self.inner = arena.take("gate and up", (rows, 2 * inner_size), dtype)
        self.active = arena.take("active", (rows, inner_size), dtype)
        self.scored = arena.take("scored rows", (num_logits, spec.hidden_size), dtype)
        self.logits = arena.take("logits", (limits.num_logits or num_logits, spec.vocab_size), DType.F32)
        self.split_sums = arena.take("sums of splits", (*split, value_dim), DType.F32)
        self.split_scales = arena.take("scales of splits", (*split, 2), DType.F32)
        self.cos = arena.take("cosines", angles, DType.F32)
        self.sin = arena.take("sines", angles, DType.F32)
        self.local_angles: tuple[Array, Array] | None = None  # of layers with a rotary table of their own
        if spec.local_rotary is not None:
            names = "local cosines", "local sines"
            self.local_angles = (
                arena.take(names[0], angles, DType.F32),
                arena.take(names[1], angles, DType.F32),
            )
        # What is normalised, scaled or adapted before it is added to the rows
        self.added = arena.take("added rows", (rows, spec.hidden_size), dtype)
        self.experts: ExpertArrays | None = None
        if spec.experts is not None:
            self.experts = ExpertArrays(arena, spec, spec.experts, rows)
        self.latents: LatentArrays | None = None
        if latent is not None:
            self.latents = LatentArrays(arena, spec, latent, rows, limits.num_latent_copies)

    def table(self, offset: int) -> int:
        """The address of a number of the tables."""
        return self.tables.address + 4 * offset


def _inner_size(spec: DecoderSpec) -> int:
    """The largest intermediate size of an MLP that all rows take."""
    experts = spec.experts
    if experts is None:
        return spec.intermediate_size
    return experts.shared_size if all(experts.layers) else max(spec.intermediate_size, experts.shared_size)


class Workspace:
    """The arrays of one model and pool, and the tables of the batch that is there now.

    Not thread-safe. Queues its copies on the device's stream.
    """

    def __init__(
        self, device: DirectDevice, spec: DecoderSpec, limits: WorkspaceLimits, kv: DirectPool
    ) -> None:
        """Raises `CudaError` where the memory is not there."""
        self.device = device
        self.spec = spec
        self.limits = limits
        self.size_bytes = DeviceArena.measure(lambda arena: StepArrays(arena, spec, limits))
        self._address = device.driver.alloc(self.size_bytes)
        self.arena = DeviceArena(self._address, self.size_bytes)
        self.arrays = StepArrays(self.arena, spec, limits)
        self.offsets = limits.table_sizes(spec).offsets
        self._tables = StepTables(
            limits.table_sizes(spec),
            group=spec.num_heads // spec.num_kv_heads,
            num_kv_heads=spec.num_kv_heads,
            num_processors=device.num_processors,
            vocab_size=spec.vocab_size,
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            num_experts_used=0 if spec.experts is None else spec.experts.num_used,
            sees_ahead=spec.is_bidirectional,
            takes_many=spec.latent is None,
        )
        self._uplink = Uplink(device.driver, device.stream, 4 * self.offsets["end"])
        self._loaded: tuple[StepBatch, AttentionPlan] | None = None
        self._num_positions = 0

    def load(self, batch: StepBatch, adapters: Sequence[int] = ()) -> AttentionPlan:
        """Have the batch's tables on the device; `adapters` are the slots of its spans' own. Raises `ModelError` for a
        batch that does not fit.
        """
        if self._loaded is not None and self._loaded[0] is batch:
            return self._loaded[1]
        self._loaded = None
        longest = max((span.context_len for span in batch.spans), default=0)
        self._take_positions(longest)
        address, numbers = self._uplink.room()
        plan, num = self._tables.fill(batch, numbers, adapters)
        self._uplink.send(self.arrays.tables.address, address, 4 * num)
        self._loaded = batch, plan
        return plan

    def forget(self) -> None:
        """Have the next batch's tables written again."""
        self._loaded = None

    def load_logit_rows(self, rows: Int64s) -> None:
        """Have these rows of the activations in place of the batch's."""
        if self._loaded is not None and self._loaded[0].logit_rows is rows:
            return
        self._loaded = None
        address, numbers = self._uplink.room()
        num = self._tables.fill_logit_rows(rows, numbers)
        self._uplink.send(self.arrays.tables.address, address, 4 * num)

    def close(self) -> None:
        self._uplink.close()
        self.device.driver.free(self._address)

    def _take_positions(self, num: int) -> None:
        """Have the angles of the first `num` positions in the tables."""
        if num <= self._num_positions:
            return
        most = self.limits.max_context
        end = min(most, max(num, _FIRST_POSITIONS, 2 * self._num_positions))
        first, self._num_positions = self._num_positions, end
        tables = [*zip((self.arrays.cos, self.arrays.sin), self.spec.rotary.tables(first, end), strict=True)]
        if self.arrays.local_angles is not None and self.spec.local_rotary is not None:
            tables += zip(self.arrays.local_angles, self.spec.local_rotary.tables(first, end), strict=True)
        for array, numbers in tables:
            host = np.ascontiguousarray(numbers, np.float32)
            self.device.driver.copy_in(array.row(first), host.ctypes.data, host.nbytes, self.device.stream)
            self.device.driver.synchronize_stream(self.device.stream)  # before `host` is freed


class Uplink:
    """Pinned rooms of one size, used in turn: a room is written again once its copy is done."""

    def __init__(self, driver: Driver, stream: int, size_bytes: int) -> None:
        self._driver = driver
        self._stream = stream
        self._rooms: list[tuple[int, U32s]] = []
        for _ in range(_NUM_UPLINKS):
            address = driver.alloc_host(size_bytes)
            memory: Any = (ctypes.c_uint32 * (size_bytes // 4)).from_address(address)
            self._rooms.append((address, np.ctypeslib.as_array(memory)))
        self._events = [driver.event() for _ in self._rooms]
        self._turn = 0

    def room(self) -> tuple[int, U32s]:
        """The address and the numbers of the next room."""
        self._turn = (self._turn + 1) % len(self._rooms)
        self._driver.synchronize(self._events[self._turn])
        return self._rooms[self._turn]

    def send(self, to: int, address: int, size_bytes: int) -> None:
        """Queue a copy of the first bytes of the room that was given last."""
        self._driver.copy_in(to, address, size_bytes, self._stream)
        self._driver.record(self._events[self._turn], self._stream)

    def close(self) -> None:
        self._driver.synchronize_stream(self._stream)
        for (address, _), event in zip(self._rooms, self._events, strict=True):
            self._driver.free_host(address)
            self._driver.free_event(event)
        self._rooms.clear()


def size_of(array: Array, num_rows: int) -> int:
    """The bytes of the first rows."""
    return array.row(num_rows) - array.address
