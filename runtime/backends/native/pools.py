"""Pools of keys and values, and a step's spans, as the core reads them: addresses, after everything is checked."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...step.batch import Int64s, SequenceSpan
from . import arrays, records
from .arrays import NativeDType

if TYPE_CHECKING:
    from .arrays import Array


class Pool:
    """A pool of keys and values as the core sees it: `data` (layers, parts, kv_heads, slots, head_dim), of int8 with
    `scales` (layers, parts, kv_heads, slots, 1). Parts are keys and values, or latents alone. `states` (num_states,
    state_size) fp32 are those of models that have some. `others` are the same of layers of other sizes: `groups` are
    this one and those, and `records` theirs.
    """

    def __init__(
        self,
        data: Array,
        scales: Array | None,
        block_size: int,
        states: Array | None = None,
        others: Sequence[tuple[Array, Array | None]] = (),
    ) -> None:
        arrays.check_contiguous(data, "keys and values")
        if scales is not None:
            arrays.check_contiguous(scales, "scales")
        if data.ndim != 5 or data.shape[1] not in (1, 2) or data.shape[3] % block_size:
            raise ValueError(
                f"keys and values must be (layers, 1 or 2, heads, slots, head_dim), not {data.shape}"
            )
        if (data.dtype == np.int8) != (scales is not None):
            raise ValueError("keys and values of 8 bits have scales, and others have none")
        if scales is not None and scales.size != data.size // data.shape[4]:
            raise ValueError(f"scales must be {(*data.shape[:4], 1)}, not {scales.shape}")
        self.data = data
        self.scales = scales
        self.num_layers, self.num_parts, self.num_kv_heads, self.num_slots, self.head_dim = data.shape
        self.block_size = block_size
        self.states = np.empty((0, 0), np.float32) if states is None else states
        if self.states.ndim != 2 or self.states.dtype != np.float32:
            raise ValueError(f"states must be (states, numbers) fp32, not {self.states.shape}")
        arrays.check_contiguous(self.states, "states")
        self.record = records.KV(
            data=arrays.address(data),
            scale=arrays.address_or_null(scales),
            num_slots=self.num_slots,
            block_size=block_size,
            dtype=arrays.dtype_of(data),
            scale_dtype=0 if scales is None else arrays.dtype_of(scales),
        )
        self.groups: tuple[Pool, ...] = (self, *(Pool(data, scales, block_size) for data, scales in others))
        kinds = {(group.num_slots, group.record.dtype, group.record.scale_dtype) for group in self.groups}
        if len(kinds) > 1:
            raise ValueError("layers of other sizes must have as many slots, of the same dtypes")
        self.records = (records.KV * len(self.groups))(*(group.record for group in self.groups))

    @property
    def shapes(self) -> list[tuple[int, int, int, int]]:
        """(layers, parts, kv_heads, head_dim) of each group."""
        return [(each.num_layers, each.num_parts, each.num_kv_heads, each.head_dim) for each in self.groups]

    @classmethod
    def of(cls, kv: Any) -> Pool:
        """Of a `KVStorage` or an `Int8KVStorage`."""
        if isinstance(kv, Pool):
            return kv
        (data, scales), *others = kv.groups
        return cls(data, scales, kv.block_size, kv.states, others)

    def takes(self, dtype: NativeDType) -> bool:
        """True if rows of this dtype go in and come out."""
        return dtype in (self.record.dtype, self.record.scale_dtype if self.record.scale else -1)


class Spans:
    """A step's spans as the core reads them: `records`, (num_spans,)."""

    def __init__(self, spans: Sequence[SequenceSpan], num_rows: int, pool: Pool) -> None:
        """Raises `ValueError` unless they cover the rows in order, and their blocks and states are in the pool."""
        start = 0
        tables: list[int] = []
        firsts: list[int] = []
        for span in spans:
            num_blocks = -(-span.context_len // pool.block_size)
            if (
                span.start != start
                or not 0 < span.length <= span.context_len
                or num_blocks > len(span.blocks)
            ):
                raise ValueError(f"a span does not fit its step or its blocks: {span}")
            firsts.append(len(tables))
            tables += span.blocks
            start += span.length
        if start != num_rows:
            raise ValueError(f"spans have {start} rows, and the step {num_rows}")
        self._blocks = np.array(tables, dtype=np.int64)
        check_ids(self._blocks, pool.num_slots // pool.block_size, "a block")
        base = arrays.address(self._blocks)
        self.num = len(spans)
        self.records = (records.SpanRecord * len(spans))(
            *(
                records.SpanRecord(span.start, span.length, span.context_len, base + 8 * first)
                for span, first in zip(spans, firsts, strict=True)
            )
        )
        if pool.states.size:
            self._add_states(spans, pool)

    def _add_states(self, spans: Sequence[SequenceSpan], pool: Pool) -> None:
        places = [span.blocks[0] if span.state is None else span.state for span in spans]
        written = [*places, *(save.state for span in spans for save in span.saves)]
        check_ids(np.array(written, np.int64), len(pool.states), "a state")
        if len(set(written)) < len(written):
            raise ValueError(f"two of a step's states are in the same place: {written}")
        base, size_bytes = arrays.address(pool.states), pool.states.strides[0]
        self._saves = []  # the records have their addresses
        for span, place, record in zip(spans, places, self.records, strict=True):
            first = span.context_len - span.length
            counts = [save.num_tokens - first for save in span.saves]
            if counts != sorted(counts) or not all(0 < count <= span.length for count in counts):
                raise ValueError(f"copies of a state that are not of the span's rows: {span}")
            saves = (records.SaveRecord * len(counts))(
                *(
                    records.SaveRecord(count, base + save.state * size_bytes)
                    for count, save in zip(counts, span.saves, strict=True)
                )
            )
            record.state, record.num_saves = base + place * size_bytes, len(counts)
            record.saves = ctypes.addressof(saves)
            self._saves.append(saves)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.records)


def check_ids(ids: Int64s, end: int, what: str) -> None:
    """Raises `ValueError` unless all are in [0, end)."""
    if ids.ndim != 1 or ids.dtype != np.int64 or not ids.flags.c_contiguous:
        raise ValueError(f"numbers must be contiguous int64, not {ids.dtype} {ids.shape}")
    if len(ids) and ids.view(np.uint64).max() >= end:  # without a sign, negative ones are the highest
        raise ValueError(f"{what} is outside of [0, {end})")


def check_ends(ends: Int64s, spans: Sequence[SequenceSpan], num_rows: int) -> None:
    """Raises `ValueError` unless each row sees itself, no fewer tokens than the row before it, and none behind its
    sequence's context.
    """
    arrays.check_contiguous(ends, "ends")
    if ends.dtype != np.int64 or ends.shape != (num_rows,):
        raise ValueError(f"ends must be int64 ({num_rows},), not {ends.dtype} {ends.shape}")
    for span in spans:
        own = ends[span.start : span.start + span.length]
        first = span.context_len - span.length
        if own[-1] > span.context_len or (own <= np.arange(first, span.context_len)).any():
            raise ValueError(f"a row of a context of {span.context_len} tokens must see itself, and no more")
        if (np.diff(own) < 0).any():
            raise ValueError("a row must not see fewer tokens than the row before it")
