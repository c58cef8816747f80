"""Projections whose weights come as GPTQ or AWQ store them: converted when they are first needed, and then kept.

The tensors that were loaded stay where they are; beside them is one converted copy. Before the tensors are exact
nothing is kept, since what was made of them would not become exact with them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ..errors import ModelError
from ..weights import Gate
from .foreign import Converted, ForeignMatrix, convert
from .parameters import Parameters
from .quantization_config import QuantizationConfig
from .quantized import QuantizedLinear


class ConvertedLinear:
    """Several matrices of the same input, one below the other: (T, K) → (T, N), all of their N joined."""

    def __init__(
        self, matrices: Sequence[ForeignMatrix], biases: Sequence[torch.Tensor | None], gate: Gate
    ) -> None:
        """`gate` is that of the matrices' tensors."""
        self._matrices = tuple(matrices)
        self._biases = tuple(biases)
        self._gate = gate
        self._converting = threading.Lock()  # so that there is one copy
        self._kept: tuple[_Ordered, ...] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Blocks for the conversion the first time. Raises `ModelError` for content that cannot be meant."""
        products = [product(x) for product in self._products(x.dtype)]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def plain_parts(self, dtype: torch.dtype) -> tuple[QuantizedLinear, ...] | None:
        """What it consists of, for inputs of this dtype; None if the order of their columns must be changed first. The
        weights must be exact.
        """
        products = self._products(dtype)
        if any(product.columns is not None for product in products):
            return None
        return tuple(product.linear for product in products)

    def linears(self, dtype: torch.dtype) -> tuple[QuantizedLinear, ...]:
        """The products that it makes for inputs of this dtype, whatever order their columns are in. The weights must be
        exact.
        """
        return tuple(product.linear for product in self._products(dtype))

    def _products(self, dtype: torch.dtype) -> tuple[_Ordered, ...]:
        if self._kept is not None:
            return self._kept
        with self._converting:
            products = self._kept or self._convert(dtype)
            if self._gate.opens(0.0):
                self._kept = products
            return products

    def _convert(self, dtype: torch.dtype) -> tuple[_Ordered, ...]:
        found = [convert(matrix) for matrix in self._matrices]
        if len(found) > 1 and _can_join(found):
            found = [_joined(found)]
            biases = [_joined_biases(self._matrices, self._biases, dtype)]
        else:
            biases = [None if bias is None else bias.to(dtype) for bias in self._biases]
        return tuple(_Ordered(one, bias) for one, bias in zip(found, biases, strict=True))


class _Ordered:
    """A product whose columns are in an order of their own."""

    def __init__(self, converted: Converted, bias: torch.Tensor | None) -> None:
        self.columns = converted.columns
        self.linear = QuantizedLinear(converted.weight, converted.scale, converted.zero, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x if self.columns is None else x[:, self.columns])


def _can_join(found: Sequence[Converted]) -> bool:
    """Whether they are of one kind, with their columns in one order, as q, k and v have them."""
    first = found[0]

    def is_alike(other: Converted) -> bool:
        if first.columns is None or other.columns is None:
            is_ordered_alike = first.columns is other.columns
        else:
            is_ordered_alike = torch.equal(first.columns, other.columns)
        return (
            is_ordered_alike
            and (first.zero is None) == (other.zero is None)
            and first.weight.dtype == other.weight.dtype
            and first.scale.shape[1] == other.scale.shape[1]
        )

    return all(map(is_alike, found[1:]))


def _joined(found: Sequence[Converted]) -> Converted:
    zeros = [one.zero for one in found if one.zero is not None]
    return Converted(
        torch.cat([one.weight for one in found]),
        torch.cat([one.scale for one in found]),
        torch.cat(zeros) if zeros else None,
        found[0].columns,
    )


def _joined_biases(
    matrices: Sequence[ForeignMatrix], biases: Sequence[torch.Tensor | None], dtype: torch.dtype
) -> torch.Tensor | None:
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            torch.zeros(matrix.num_out, dtype=dtype) if bias is None else bias.to(dtype)
            for matrix, bias in zip(matrices, biases, strict=True)
        ]
    )


def take_converted(
    parameters: Parameters, names_and_sizes: Sequence[tuple[str, int]], num_in: int, *, bias: bool
) -> ConvertedLinear:
    """One projection to all the (name, num_out), whose tensors are `name`.qweight and so on. A bias that is there
    counts even if the model has none without being quantised: some tools write it. Raises `ModelError`.
    """
    matrices = [_take_foreign(parameters, name, num_in, num_out) for name, num_out in names_and_sizes]
    biases = [
        parameters.take(f"{name}.bias", num_out) if bias or f"{name}.bias" in parameters else None
        for name, num_out in names_and_sizes
    ]
    kinds = ("qweight", "qzeros", "scales", "g_idx")
    gate = parameters.gate_of([f"{name}.{kind}" for name, _ in names_and_sizes for kind in kinds])
    return ConvertedLinear(matrices, biases, gate)


def _take_foreign(parameters: Parameters, name: str, num_in: int, num_out: int) -> ForeignMatrix:
    config = parameters.quantization
    full_name = parameters.full_name(name)
    if config is None or config.method not in ("gptq", "awq"):
        raise ModelError(
            f"tensor {full_name}.qweight is there, but config.json does not say that the model is of GPTQ or AWQ",
            hint="Do the config.json and the weights belong to the same model?",
        )
    is_awq = config.method == "awq"
    per_word = 32 // config.bits
    num_groups = _num_groups(config, full_name, num_in)
    packed = num_out if is_awq else num_in
    if packed % per_word or num_out % per_word:
        raise ModelError(f"{full_name} of shape ({num_out}, {num_in}) does not fill whole words of 32 bits")
    shape = (num_in, num_out // per_word) if is_awq else (num_in // per_word, num_out)
    order_name = f"{name}.g_idx"
    return ForeignMatrix(
        full_name,
        parameters.take_as(f"{name}.qweight", shape, torch.int32),
        parameters.take_as(f"{name}.qzeros", (num_groups, num_out // per_word), torch.int32),
        parameters.take_as(
            f"{name}.scales", (num_groups, num_out), torch.float16, torch.bfloat16, torch.float32
        ),
        parameters.take_as(order_name, (num_in,), torch.int32)
        if not is_awq and order_name in parameters
        else None,
        config.bits,
        is_awq,
        config.stores_zero_minus_one,
    )


def _num_groups(config: QuantizationConfig, name: str, num_in: int) -> int:
    group_size = config.group_size or num_in
    if num_in % group_size:
        raise ModelError(
            f"{name} has {num_in} columns, which are no multiple of the group_size {group_size} of config.json"
        )
    return num_in // group_size
