"""Products of few rows with matrices of integers, which are read as they lie and widened in registers.

Weights are rounded to the activations' dtype as torch's path rounds them, and multiplied in fp32. A
program computes some columns of the result for all rows, so each weight is read once.

No `from __future__ import annotations` here: Triton reads the annotations.
"""

import triton.language as tl

# Of 64 numbers of 4 bits the first half are the low bits of 32 bytes, and the second the high ones.
RUN = tl.constexpr(64)


def int4_product(
    x,  # (num_rows, SIZE)
    levels,  # (num_out, SIZE / 2) uint8, docs/quantize.md, "The layout"
    scale,  # (num_out, SIZE / GROUP)
    zero,  # as scale, uint8, if HAS_ZERO; else 8
    out,  # (num_rows, num_out)
    num_rows,
    num_out,
    SIZE: tl.constexpr,  # known, so that numbers are read many at a time
    GROUP: tl.constexpr,  # a multiple of 32
    ROWS: tl.constexpr,  # at least num_rows
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,  # bytes of a row at a time: 32, or more where that many numbers are in one group
    HAS_ZERO: tl.constexpr,
):
    """out = x @ ((levels - zero) * scale).T."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_out
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    num_groups = SIZE // GROUP
    byte = tl.arange(0, PIECE)
    number = byte // 32 * RUN + byte % 32
    matrix = levels + column.to(tl.int64)[:, None] * (SIZE // 2) + byte[None, :]
    low_x = x + row[:, None] * SIZE + number[None, :]
    groups = column.to(tl.int64) * num_groups
    dtype = x.dtype.element_ty
    sums = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for first in range(0, SIZE, 2 * PIECE):
        is_there = first // 2 + byte < SIZE // 2
        pairs = tl.load(matrix + first // 2, mask=is_column[:, None] & is_there[None, :], other=0)
        low_group = groups + first // GROUP
        high_group = groups + (first + 32) // GROUP
        low_scale = tl.load(scale + low_group, mask=is_column, other=0.0).to(tl.float32)
        high_scale = tl.load(scale + high_group, mask=is_column, other=0.0).to(tl.float32)
        if HAS_ZERO:
            low_zero = tl.load(zero + low_group, mask=is_column, other=0).to(tl.float32)
            high_zero = tl.load(zero + high_group, mask=is_column, other=0).to(tl.float32)
        else:
            low_zero = tl.full([COLUMNS], 8.0, tl.float32)
            high_zero = low_zero
        low = ((pairs & 15).to(tl.float32) - low_zero[:, None]) * low_scale[:, None]
        high = ((pairs >> 4).to(tl.float32) - high_zero[:, None]) * high_scale[:, None]
        is_x = is_row[:, None] & is_there[None, :]
        some = tl.load(low_x + first, mask=is_x, other=0.0)
        sums += tl.dot(some, tl.trans(low.to(dtype)), input_precision="ieee")
        others = tl.load(low_x + first + 32, mask=is_x, other=0.0)
        sums += tl.dot(others, tl.trans(high.to(dtype)), input_precision="ieee")
    of_out = row[:, None] * num_out + column[None, :]
    tl.store(out + of_out, sums.to(dtype), mask=is_row[:, None] & is_column[None, :])


def int8_product(
    x,  # (num_rows, SIZE)
    levels,  # (num_out, SIZE) int8
    scale,  # (num_out, SIZE / GROUP)
    out,  # (num_rows, num_out)
    num_rows,
    num_out,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # SIZE, or a multiple of PIECE
    ROWS: tl.constexpr,  # at least num_rows
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,  # numbers of a row at a time
):
    """out = x @ (levels * scale).T."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_out
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    number = tl.arange(0, PIECE)
    matrix = levels + column.to(tl.int64)[:, None] * SIZE + number[None, :]
    groups = column.to(tl.int64) * (SIZE // GROUP)
    dtype = x.dtype.element_ty
    sums = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for first in range(0, SIZE, PIECE):
        is_there = first + number < SIZE
        some_levels = tl.load(matrix + first, mask=is_column[:, None] & is_there[None, :], other=0)
        own_scale = tl.load(scale + groups + first // GROUP, mask=is_column, other=0.0).to(tl.float32)
        weights = (some_levels.to(tl.float32) * own_scale[:, None]).to(dtype)
        some = tl.load(
            x + row[:, None] * SIZE + first + number[None, :],
            mask=is_row[:, None] & is_there[None, :],
            other=0.0,
        )
        sums += tl.dot(some, tl.trans(weights), input_precision="ieee")
    of_out = row[:, None] * num_out + column[None, :]
    tl.store(out + of_out, sums.to(dtype), mask=is_row[:, None] & is_column[None, :])
