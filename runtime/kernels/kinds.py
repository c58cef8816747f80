"""A decoder's products by kind (`choice.py`): what they are is told by their shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..models.converted import ConvertedLinear
from ..models.linear import Linear, Projection, SideBySide
from ..models.quantized import QuantizedLinear
from .choice import PRODUCT_SIZES, SIZES

if TYPE_CHECKING:
    from ..models.decoder import Decoder, DecoderLayer


class ModelProduct(NamedTuple):
    """One matrix of a model."""

    kind: str
    linear: Linear | QuantizedLinear
    sizes: Sequence[int]  # of PRODUCT_SIZES: the numbers of rows that it is computed for
    dtype: torch.dtype  # of its inputs


def kind_of(projection: Projection) -> str:
    """The kind of one product: the dtype and shape (out x in) of its weights."""
    if isinstance(projection, SideBySide):
        return " + ".join(kind_of(part) for part in projection.parts)
    if isinstance(projection, Linear):
        num_out, num_in = projection.weight.shape
        return f"{_name(projection.weight.dtype)} {num_out}x{num_in}"
    if isinstance(projection, QuantizedLinear):
        zeros = "" if projection.zero is None else " with zeros"
        return f"int{projection.bits}/{projection.group_size} {len(projection.weight)}x{projection.num_in}{zeros}"
    return type(projection).__name__


def kind_of_layer(layer: DecoderLayer) -> str:
    return "layer: " + ", ".join(kind_of(projection) for projection in projections_of(layer))


def projections_of(layer: DecoderLayer) -> tuple[Projection, ...]:
    return layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down


def linears_of(projection: Projection, dtype: torch.dtype) -> Iterator[Linear | QuantizedLinear]:
    """Those parts of it that are matrices of floats as they are computed with, or of integers, for inputs of this
    dtype. The weights must be exact: what comes as GPTQ or AWQ store it is converted by then, or here.
    """
    if isinstance(projection, SideBySide):
        for part in projection.parts:
            yield from linears_of(part, dtype)
    elif isinstance(projection, ConvertedLinear):
        yield from projection.linears(dtype)
    elif isinstance(projection, Linear | QuantizedLinear):
        yield projection


def products_of_layer(decoder: Decoder, layer: DecoderLayer) -> list[ModelProduct]:
    """In the order in which a step comes to them."""
    return [
        _product(linear, PRODUCT_SIZES, decoder.dtype)
        for projection in projections_of(layer)
        for linear in linears_of(projection, decoder.dtype)
    ]


def products_of(decoder: Decoder) -> list[ModelProduct]:
    """All such products in the order in which a step comes to them. The head's rows are one a sequence, not one a
    token.
    """
    products = [each for layer in decoder.layers for each in products_of_layer(decoder, layer)]
    for linear in linears_of(decoder.head, decoder.dtype):
        product = _product(linear, SIZES, decoder.dtype)
        products.append(product._replace(kind=f"head {product.kind}"))
    return products


def _product(linear: Linear | QuantizedLinear, sizes: Sequence[int], dtype: torch.dtype) -> ModelProduct:
    """Integers do not tell what is computed in: most often in bf16, which goes without saying."""
    kind = kind_of(linear)
    if isinstance(linear, QuantizedLinear) and dtype is not torch.bfloat16:
        kind += f" in {_name(dtype)}"
    return ModelProduct(kind, linear, sizes, dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
