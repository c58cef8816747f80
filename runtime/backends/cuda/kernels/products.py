"""The product of a matrix and one row, the main cost of generation for one sequence.

Only the matrix's traffic matters, each number of which is read once; so there are no tiles of a
product, only sums along its rows, in fp32.

No `from __future__ import annotations` here: Triton reads the annotations.
"""

import triton.language as tl


def row_product(
    x,  # (SIZE,)
    matrix,  # (num_out, SIZE)
    added,  # (num_out,), if ADDS
    out,  # (num_out,), may be `added`
    num_out,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # of the matrix, that a program has
    PIECE: tl.constexpr,  # of a row, at a time
    ADDS: tl.constexpr,
):
    """out = matrix @ x, with ADDS + added."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_out
    start = row.to(tl.int64)[:, None] * SIZE
    sums = tl.full([ROWS, PIECE], 0.0, tl.float32)
    for first in range(0, SIZE, PIECE):
        at = first + tl.arange(0, PIECE)
        is_there = at < SIZE
        numbers = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
        weights = tl.load(matrix + start + at[None, :], mask=is_row[:, None] & is_there[None, :], other=0.0)
        sums += weights.to(tl.float32) * numbers[None, :]
    total = tl.sum(sums, 1)
    if ADDS:
        total += tl.load(added + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=is_row)
