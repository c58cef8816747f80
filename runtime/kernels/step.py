"""A decoder's layers, and its head, for a few rows: one kernel, in which all threads go through all stages together.

What is fixed stands in records (`records.py`); what a step brings, in arrays. Threads meet wherever one of them reads
what others have written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numba
import numpy as np

from .attention import attend
from .products import INPUT_GROUP, project, quantise_inputs
from .records import (
    ATTENTION_NORM,
    BIAS,
    DOWN,
    GATE_UP,
    HEAD_NORMS,
    INPUT,
    MAX_ROWS,
    MLP_NORM,
    NUM_IN,
    NUM_OUT,
    NUMBERS,
    OUT,
    OUTPUT,
    PROJECTION_FIELDS,
    QKV,
    WINDOW,
)
from .rows import add_, gate, place_heads, rms_norm
from .sizes import float32s, size_of, uint16s, value_of
from .team import assemble, meet, reset, share

_COMPILED = {"nogil": True, "error_model": "numpy", "cache": True}
HEIGHTS = (
    1,
    4,
    8,
)  # numbers of rows that there are kernels for; others take the next one, or several of the last
MAX_HEIGHT = HEIGHTS[-1]


def padded(num_rows: int) -> int:
    """How many rows are computed for so many, up to MAX_ROWS: as many as a kernel takes, or as several of them do."""
    if num_rows > MAX_HEIGHT:
        return -(-num_rows // MAX_HEIGHT) * MAX_HEIGHT
    return next(height for height in HEIGHTS if height >= num_rows)


@cache
def layers_kernel(height: int, head_dim: int) -> Callable[..., bool]:
    """For so many rows at a time, and heads of this size."""

    @numba.njit(parallel=True, **_COMPILED)
    def compute(
        team: Any,
        size: int,
        records: Any,
        x: Any,
        turns: Any,
        where: Any,
        firsts: Any,
        ends: Any,
        caches: Any,
        block_size: int,
        queries: Any,
        eps: float,
        scale: float,
        activation: int,
    ) -> bool:
        """x (T, hidden_size) uint16 through the layers of records (L, LAYER_FIELDS), in place.

        `turns` are cos and sin; `where` the new tokens' slots and the sequences' blocks; `caches` (L, 2, kv_heads,
        slots, head_dim) uint16; `queries` room (MAX_ROWS, heads, head_dim). False when the threads did not come
        together: then nothing was done.
        """
        reset(team)
        done = np.zeros(size, np.int8)
        for thread in numba.prange(size):
            if assemble(team, size):
                for index in range(records.shape[0]):
                    _layer(
                        size_of(height),
                        size_of(head_dim),
                        team,
                        thread,
                        size,
                        records[index],
                        x,
                        turns,
                        where,
                        firsts,
                        ends,
                        caches[index],
                        block_size,
                        queries,
                        eps,
                        scale,
                        activation,
                    )
                done[thread] = 1
        return bool(done.all())

    return cast(Callable[..., bool], compute)


@cache
def head_kernel(height: int) -> Callable[..., bool]:
    """The norm and the product behind the last layer."""

    @numba.njit(parallel=True, **_COMPILED)
    def compute(team: Any, size: int, record: Any, norm: int, x: Any, eps: float) -> bool:
        """x (T, hidden_size) uint16 → the projection of `record`; `norm` is the address of the norm's weights. False as
        above.
        """
        reset(team)
        done = np.zeros(size, np.int8)
        for thread in numba.prange(size):
            if assemble(team, size):
                begin, end = share(x.shape[0], thread, size)
                room = uint16s(record[INPUT], (MAX_ROWS, record[NUM_IN]))
                rms_norm(x, uint16s(norm, (x.shape[1],)), eps, room, begin, end)
                meet(team, size)
                begin, end = share(record[NUM_OUT], thread, size)
                _project(size_of(height), team, thread, size, record, x.shape[0], begin, end)
                done[thread] = 1
        return bool(done.all())

    return cast(Callable[..., bool], compute)


@numba.njit(**_COMPILED)
def _project(
    height: Any, team: Any, thread: int, size: int, record: Any, num_rows: int, begin: int, end: int
) -> None:
    """A projection whose inputs are there; its columns [begin, end) are, for this thread, afterwards."""
    if record[NUMBERS] != 0:
        low, high = share(record[NUM_IN] // INPUT_GROUP, thread, size)
        quantise_inputs(record, num_rows, low, high)
        meet(team, size)
    step = value_of(height)
    project(height, record, (num_rows + step - 1) // step * step, begin, end)


@numba.njit(**_COMPILED)
def _bias(record: Any) -> Any:
    return uint16s(record[BIAS], (record[NUM_OUT] if record[BIAS] != 0 else 0,))


@numba.njit(**_COMPILED)
def _product(record: Any) -> Any:
    return float32s(record[OUT], (MAX_ROWS, record[NUM_OUT]))


@numba.njit(**_COMPILED)
def _layer(
    height: Any,
    head_size: Any,
    team: Any,
    thread: int,
    size: int,
    layer: Any,
    x: Any,
    turns: Any,
    where: Any,
    firsts: Any,
    ends: Any,
    keys_values: Any,
    block_size: int,
    queries: Any,
    eps: float,
    scale: float,
    activation: int,
) -> None:
    """x + attention(norm(x)), then x + mlp(norm(x)): this thread's share."""
    num_rows, hidden_size = x.shape
    num_heads, head_dim = queries.shape[1], value_of(head_size)
    qkv, output = layer[QKV : QKV + PROJECTION_FIELDS], layer[OUTPUT : OUTPUT + PROJECTION_FIELDS]
    gate_up, down = layer[GATE_UP : GATE_UP + PROJECTION_FIELDS], layer[DOWN : DOWN + PROJECTION_FIELDS]
    first_row, end_row = share(num_rows, thread, size)
    first_column, end_column = share(hidden_size, thread, size)

    normed = uint16s(qkv[INPUT], (MAX_ROWS, hidden_size))
    rms_norm(x, uint16s(layer[ATTENTION_NORM], (hidden_size,)), eps, normed, first_row, end_row)
    meet(team, size)
    begin, end = share(qkv[NUM_OUT], thread, size)
    _project(height, team, thread, size, qkv, num_rows, begin, end)
    meet(team, size)
    norms = uint16s(layer[HEAD_NORMS], (2 if layer[HEAD_NORMS] != 0 else 0, head_dim))
    begin, end = share(num_rows * (qkv[NUM_OUT] // head_dim), thread, size)
    own = queries[:num_rows]
    place_heads(
        _product(qkv), _bias(qkv), norms, eps, turns[0], turns[1], where[0], keys_values, own, begin, end
    )
    meet(team, size)
    attended = uint16s(output[INPUT], (MAX_ROWS, num_heads, head_dim))
    begin, end = share(num_rows * num_heads, thread, size)
    attend(
        head_size,
        own,
        keys_values,
        where[1],
        firsts[layer[WINDOW]],
        ends,
        block_size,
        scale,
        attended,
        begin,
        end,
    )
    meet(team, size)
    _project(height, team, thread, size, output, num_rows, first_column, end_column)
    add_(x, _product(output), _bias(output), first_column, end_column)
    meet(team, size)

    normed = uint16s(gate_up[INPUT], (MAX_ROWS, hidden_size))
    rms_norm(x, uint16s(layer[MLP_NORM], (hidden_size,)), eps, normed, first_row, end_row)
    meet(team, size)
    inner_size = down[NUM_IN]
    begin, end = share(inner_size, thread, size)
    _project(height, team, thread, size, gate_up, num_rows, begin, end)
    step = value_of(height)
    padded_rows = (num_rows + step - 1) // step * step
    project(height, gate_up, padded_rows, inner_size + begin, inner_size + end)
    inner = uint16s(down[INPUT], (MAX_ROWS, inner_size))[:num_rows]
    gate(_product(gate_up), _bias(gate_up), activation, inner, begin, end)
    meet(team, size)
    _project(height, team, thread, size, down, num_rows, first_column, end_column)
    add_(x, _product(down), _bias(down), first_column, end_column)
    meet(team, size)
