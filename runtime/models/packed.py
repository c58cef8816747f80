"""A product over a second copy of its weights, in the order that some library multiplies with faster.

A model knows no more of it than this: it asks, and computes the product itself where it gets none. Whose copies there
are, and where one is worth its memory, is decided elsewhere (`kernels/prepack.py`). The weights stay where they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

Compute = Callable[
    [torch.Tensor, torch.Tensor | None], torch.Tensor
]  # x (T, in), bias (out,) → (T, out) of x's dtype

logger = logging.getLogger(__name__)


class CannotPackError(Exception):
    """A library, or this processor, has no such copies; the product is computed without, as before."""


class Copy:
    """Computes with a copy, for some numbers of rows."""

    __slots__ = ("_compute", "_table")

    def __init__(self, compute: Compute, table: bytes) -> None:
        """For as many rows as `table` has 1 at; its last item stands for all numbers beyond it (`choice.table_of`)."""
        self._compute = compute
        self._table = table

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """x (T, in) @ weight.T + bias, (T, out), in inference mode; None where it is not for so many rows. Once it
        fails it is for none any more: of a library that we may not know, nobody's request is to fail.
        """
        if not self.takes(len(x)):
            return None
        try:
            return self._compute(x, bias)
        except Exception:
            logger.exception("a copy of weights failed: this product is computed without it from now on")
            self._table = bytes(1)
            return None

    def takes(self, num_rows: int) -> bool:
        table = self._table
        return bool(table[min(num_rows, len(table) - 1)])
