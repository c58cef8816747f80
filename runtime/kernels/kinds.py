"""A decoder's products by kind (`choice.py`), without looking at what is in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..models.linear import Linear, Projection, SideBySide
from ..models.quantized import QuantizedLinear
from .choice import PRODUCT_SIZES, SIZES

if TYPE_CHECKING:
    from ..models.decoder import Decoder, DecoderLayer


def kind_of(projection: Projection) -> str:
    """The kind of one product: the dtype and shape (out x in) of its weights."""
    if isinstance(projection, SideBySide):
        return " + ".join(kind_of(part) for part in projection.parts)
    if isinstance(projection, Linear):
        num_out, num_in = projection.weight.shape
        return f"{str(projection.weight.dtype).removeprefix('torch.')} {num_out}x{num_in}"
    if isinstance(projection, QuantizedLinear):
        return f"int{projection.bits}/{projection.group_size} {len(projection.weight)}x{projection.num_in}"
    return type(projection).__name__


def kind_of_layer(layer: DecoderLayer) -> str:
    return "layer: " + ", ".join(kind_of(projection) for projection in projections_of(layer))


def projections_of(layer: DecoderLayer) -> tuple[Projection, ...]:
    return layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down


def linears_of(projection: Projection) -> Iterator[Linear]:
    """Those parts of it that are plain matrices."""
    if isinstance(projection, SideBySide):
        for part in projection.parts:
            yield from linears_of(part)
    elif isinstance(projection, Linear):
        yield projection


def products_of(decoder: Decoder) -> list[tuple[str, Linear, Sequence[int]]]:
    """All plain products in the order in which a step comes to them: kind, the product, and the numbers of rows (of
    PRODUCT_SIZES) that it is computed for. The head's rows are one a sequence, not one a token.
    """
    products: list[tuple[str, Linear, Sequence[int]]] = []
    for layer in decoder.layers:
        for projection in projections_of(layer):
            products += [(kind_of(linear), linear, PRODUCT_SIZES) for linear in linears_of(projection)]
    products += [(f"head {kind_of(linear)}", linear, SIZES) for linear in linears_of(decoder.head)]
    return products
