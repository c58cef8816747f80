"""Takes a layer's tensors out of `Weights`, checks them, and remembers them for the layer's gate.

Building a model means taking every tensor that it needs, so a missing or misshapen one is found before
any content has arrived, and a layer's gate covers exactly what the layer took. Only names, shapes and
dtypes are looked at here: content may still be missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ..errors import ModelError
from ..tensors import DType, Tensor
from ..weights import ExpertGate, Gate, RowGate, Strip, Weights

if TYPE_CHECKING:
    from .quantization_config import QuantizationConfig

COMPUTE_DTYPES = (DType.BF16, DType.F16, DType.F32)

_QUANTISED_HINT = "What is supported is in docs/quantize.md; `teneral pack --quantize` writes it."


class Parameters:
    """The tensors whose names start with `prefix`. Make one for each gate."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        quantization: QuantizationConfig | None = None,
        *,
        inputs_first: bool = False,
    ) -> None:
        """`quantization` is what config.json says of quantised matrices; with `inputs_first`, others are (num_in,
        num_out).
        """
        self._weights = weights
        self._prefix = prefix
        self.quantization = quantization
        self.inputs_first = inputs_first
        self._taken: list[str] = []

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `prefix + name`, not copied: bf16, fp16 or fp32, which some checkpoints mix. Raises `ModelError`
        unless it has this shape and one of these dtypes.
        """
        tensor = self._take(name, shape)
        if tensor.dtype in (DType.I8, DType.U8, DType.F8_E4M3):
            raise ModelError(
                f"tensor {self._prefix}{name} is quantised, but there is no {self._prefix}{name}_scale",
                hint="Pack the original model again, with --quantize.",
            )
        check_computable(self._prefix + name, tensor)
        return tensor

    def take_as(self, name: str, shape: tuple[int, ...], *dtypes: DType) -> Tensor:
        """The same, of a tensor that is stored in one of these dtypes."""
        tensor = self._take(name, shape)
        if tensor.dtype not in dtypes:
            raise ModelError(
                f"tensor {self._prefix}{name} is {tensor.dtype.label}, "
                f"but must be {' or '.join(dtype.label for dtype in dtypes)}",
                hint=_QUANTISED_HINT,
            )
        return tensor

    def peek(self, name: str) -> Tensor:
        """The tensor, unchecked, and not counted as taken. Raises `ModelError` when there is none."""
        return self._weights.tensor(self._prefix + name)

    @property
    def prefix(self) -> str:
        return self._prefix

    @property
    def taken(self) -> Sequence[str]:
        """The full names of all that has been taken so far."""
        return self._taken

    def full_name(self, name: str) -> str:
        return self._prefix + name

    def take_norm(self, name: str, length: int) -> Tensor:
        """A norm's vector, of any computable dtype: models in half precision keep some in fp32. Some checkpoints have
        it as one row.
        """
        is_row = len(self._weights.tensor(self._prefix + name).shape) == 2
        tensor = self._take(name, (1, length) if is_row else (length,))
        check_computable(self._prefix + name, tensor)
        return tensor.part(0) if is_row else tensor

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self._weights

    def gate(self) -> Gate:
        """Opens when all that has been taken so far holds its exact values."""
        return self._weights.gate(self._taken)

    def gate_of(self, names: Iterable[str]) -> Gate:
        """Opens when these of the tensors, as far as there are so called ones, hold their exact values."""
        return self._weights.gate([self._prefix + name for name in names])

    @property
    def num_taken(self) -> int:
        """How many tensors have been taken so far."""
        return len(self._taken)

    def expert_gate(self, starts: Sequence[int]) -> ExpertGate:
        """Opens for some of the experts whose tensors were taken last: each one's from `num_taken` = its start on."""
        return self._weights.expert_gate(
            [self._taken[start:end] for start, end in pairwise([*starts, len(self._taken)])]
        )

    def stacked_expert_gate(self, names: Iterable[str]) -> ExpertGate:
        """Opens for some of the experts that are rows of these tensors."""
        return self._weights.stacked_expert_gate([self._prefix + name for name in names])

    def row_gate(self, *tables: str) -> RowGate:
        """Opens for some rows of the matrices `prefix + table` when these, and all else that was taken, are exact."""
        return self._weights.row_gate([self._prefix + table for table in tables], self._taken)

    def strips(self, table: str) -> tuple[Strip, ...]:
        """All rows of the matrix `prefix + table`, each strip behind all else that was taken; none where they arrive
        together.
        """
        return self._weights.strips(self._prefix + table, self._taken)

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        full_name = self._prefix + name
        tensor = self._weights.tensor(full_name)
        if tensor.shape != shape:
            raise ModelError(
                f"tensor {full_name} has shape {tuple(tensor.shape)}, but config.json asks for {shape}",
                hint="Do the config.json and the weights belong to the same model?",
            )
        self._taken.append(full_name)
        return tensor


def check_computable(name: str, tensor: Tensor) -> None:
    """Raises `ModelError` unless the tensor's dtype is one that models are computed in."""
    if tensor.dtype not in COMPUTE_DTYPES:
        raise ModelError(
            f"tensor {name} is {tensor.dtype.label}, which models are not computed in",
            hint="Use its bf16, fp16 or fp32 weights, and `teneral pack --quantize` to have it smaller.",
        )


def stored_dtype(weights: Weights, embeddings: str) -> DType:
    """The dtype of most numbers of the weights, of those that models are computed in. Raises `ModelError` where the
    embeddings, by their full name, are none of these.
    """
    table = weights.tensor(embeddings)
    if table.dtype not in (DType.I8, DType.U8):  # of these a better complaint follows
        check_computable(embeddings, table)
    sizes = dict.fromkeys(COMPUTE_DTYPES, 0)
    for tensor in map(weights.tensor, weights.names()):
        if tensor.dtype in sizes:
            sizes[tensor.dtype] += math.prod(tensor.shape)
    return max(sizes, key=lambda dtype: (sizes[dtype], dtype is table.dtype))
