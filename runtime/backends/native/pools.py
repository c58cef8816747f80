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
    """A pool of keys and values as the core sees it: `data` (layers, 2, kv_heads, slots, head_dim), of int8 with
    `scales` (layers, 2, kv_heads, slots, 1)."""

    def __init__(self, data: Array, scales: Array | None, block_size: int) -> None:
        arrays.check_contiguous(data, "keys and values")
        if scales is not None:
            arrays.check_contiguous(scales, "scales")
        if data.ndim != 5 or data.shape[1] != 2 or data.shape[3] % block_size:
            raise ValueError(f"keys and values must be (layers, 2, heads, slots, head_dim), not {data.shape}")
        if (data.dtype == np.int8) != (scales is not None):
            raise ValueError("keys and values of 8 bits have scales, and others have none")
        if scales is not None and scales.size != data.size // data.shape[4]:
            raise ValueError(f"scales must be {(*data.shape[:4], 1)}, not {scales.shape}")
        self.data = data
        self.scales = scales
        self.num_layers, _, self.num_kv_heads, self.num_slots, self.head_dim = data.shape
        self.block_size = block_size
        self.record = records.KV(
            data=arrays.address(data),
            scale=arrays.address_or_null(scales),
            num_slots=self.num_slots,
            block_size=block_size,
            dtype=arrays.dtype_of(data),
            scale_dtype=0 if scales is None else arrays.dtype_of(scales),
        )

    @classmethod
    def of(cls, kv: Any) -> Pool:
        """Of a `KVStorage` or an `Int8KVStorage`."""
        if isinstance(kv, Pool):
            return kv
        if hasattr(kv, "codes"):
            return cls(kv.codes, kv.scales, kv.block_size)
        return cls(kv.data, None, kv.block_size)

    def takes(self, dtype: NativeDType) -> bool:
        """True if rows of this dtype go in and come out."""
        return dtype in (self.record.dtype, self.record.scale_dtype if self.record.scale else -1)


class Spans:
    """A step's spans as the core reads them: `records`, (num_spans,)."""

    def __init__(self, spans: Sequence[SequenceSpan], num_rows: int, pool: Pool) -> None:
        """Raises `ValueError` unless they cover the rows in order and their blocks are in the pool."""
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

    @property
    def address(self) -> int:
        return ctypes.addressof(self.records)


def check_ids(ids: Int64s, end: int, what: str) -> None:
    """Raises `ValueError` unless all are in [0, end)."""
    if ids.ndim != 1 or ids.dtype != np.int64 or not ids.flags.c_contiguous:
        raise ValueError(f"numbers must be contiguous int64, not {ids.dtype} {ids.shape}")
    if len(ids) and ids.view(np.uint64).max() >= end:  # without a sign, negative ones are the highest
        raise ValueError(f"{what} is outside of [0, {end})")
