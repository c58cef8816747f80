"""Products in another dtype than that in which the weights are stored, without a copy of the weights.

A stretch of rows at a time is converted into scratch memory, which all matrices of a model share, and multiplied while
it is in the processor's cache: as fast as if all were stored so, or faster, since less is read. Built over tensors that
may still be without content.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from .compute_dtype import ComputeDtype

SCRATCH_ELEMENTS = 1 << 20  # weights that exist twice at a time; a row of more has room of its own size
MAX_FEW_ROWS = 2  # up to so many rows of input it is faster to read the weights once for each
# From so many rows on weight @ rows.T takes less time than rows @ weight.T: a tenth to a fifth (fp32, AVX2, 2 threads).
MIN_COLUMNS = 16
COLUMN_STEP = 8


class Expansion(threading.local):
    """How the matrices of one model are multiplied, and the scratch memory for it: a thread has its own."""

    def __init__(self, dtype: torch.dtype, *, takes_few_rows_as_stored: bool = False) -> None:
        """`dtype` is that of the products; see `ComputeDtype` for the rest."""
        self.dtype = dtype
        self.takes_few_rows_as_stored = takes_few_rows_as_stored
        self._scratch = torch.empty(0, dtype=dtype)

    @property
    def scratch_bytes(self) -> int:
        """What this thread's takes by now."""
        return self._scratch.nbytes

    def expand(self, rows: torch.Tensor) -> torch.Tensor:
        """rows (N, K) in `dtype`, valid until the next call by this thread."""
        if self._scratch.numel() < rows.numel() or self._scratch.device != rows.device:
            size = max(rows.numel(), SCRATCH_ELEMENTS)
            with torch.inference_mode(False):  # or it could be written to in inference mode only
                self._scratch = torch.empty(size, dtype=self.dtype, device=rows.device)
        return self._scratch[: rows.numel()].view(rows.shape).copy_(rows)


def expansion_of(computes: ComputeDtype) -> Expansion | None:
    """None where products are made in the dtype that is stored."""
    if computes.matrices is computes.stored:
        return None
    return Expansion(computes.matrices, takes_few_rows_as_stored=computes.takes_few_rows_as_stored)


class ExpandedLinear:
    """x @ weight.T + bias. `weight` is (N, K) of any dtype that models are stored in, `bias` (N,) or None."""

    __slots__ = ("bias", "expansion", "weight")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, expansion: Expansion
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.expansion = expansion

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(…, K) → (…, N) of the same dtype."""
        rows = x.reshape(-1, x.shape[-1])
        out = self._as_stored(rows) if self._takes_as_stored(rows) else None
        if out is not None:
            out = out if self.bias is None else out.add_(self.bias.to(out.dtype))
        elif len(rows) < MIN_COLUMNS:
            out = self._of_rows(rows.to(self.expansion.dtype))
        else:
            out = self.of_columns(as_columns(rows.to(self.expansion.dtype)))[:, : len(rows)].t()
        return out.to(x.dtype).contiguous().view(*x.shape[:-1], len(self.weight))

    def of_columns(self, columns: torch.Tensor) -> torch.Tensor:
        """columns (K, C) in the expansion's dtype → (N, C)."""
        out = columns.new_empty(len(self.weight), columns.shape[1])
        for begin, end in self._stretches():
            torch.mm(self.expansion.expand(self.weight[begin:end]), columns, out=out[begin:end])
        return out if self.bias is None else out.add_(self.bias.to(out.dtype).unsqueeze(1))

    def _of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """rows (R, K) in the expansion's dtype → (R, N)."""
        out = rows.new_empty(len(rows), len(self.weight))
        for begin, end in self._stretches():
            torch.mm(rows, self.expansion.expand(self.weight[begin:end]).t(), out=out[:, begin:end])
        return out if self.bias is None else out.add_(self.bias.to(out.dtype))

    def _stretches(self) -> Iterator[tuple[int, int]]:
        """Rows of the weight, half-open."""
        num_out, num_in = self.weight.shape
        step = max(1, SCRATCH_ELEMENTS // num_in)
        for begin in range(0, num_out, step):
            yield begin, min(begin + step, num_out)

    def _takes_as_stored(self, rows: torch.Tensor) -> bool:
        return self.expansion.takes_few_rows_as_stored and len(rows) <= MAX_FEW_ROWS

    def _as_stored(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Row by row, in the dtype of the weights; None where something is too large for it."""
        out = rows.new_empty(len(rows), len(self.weight))
        # One by one: it is several rows at once that take long where a CPU has no products in that dtype.
        for number, row in enumerate(rows.to(self.weight.dtype).unsqueeze(1)):
            out[number] = F.linear(row, self.weight)[0]
        return out if bool(out.isfinite().all()) else None


def as_columns(rows: torch.Tensor) -> torch.Tensor:
    """rows (R, K) → (K, C), where C is R and some columns of zeros, so that the product has no odd ones left over."""
    num_rows, num_in = rows.shape
    columns = rows.new_empty(num_in, -(-num_rows // COLUMN_STEP) * COLUMN_STEP)
    columns[:, :num_rows] = rows.t()
    columns[:, num_rows:] = 0
    return columns
