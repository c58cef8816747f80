"""A low-rank adapter as a value: y += factor · (x Aᵀ) Bᵀ at some projections of some layers.

Storage exists when these values are made, and never moves; a layer's content is there once its gate opens, as with
the weights of a model. It does not know where adapters come from.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from ..tensors import Tensor
from .decoder_config import DecoderConfig

MAX_RANK = 512  # of one module


class AdapterPlace(enum.IntEnum):
    """The projections of a layer that adapters know: those of `DecoderLayerWeights` with these names, and of its
    `MambaWeights`.
    """

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3
    MAMBA_INPUTS = 4
    MAMBA_OUTPUT = 5


class AdapterPart(Struct, frozen=True, eq=False):
    """Columns [first, first + num_out) of a projection's output gain factor · low @ b."""

    b: Tensor  # (rank, num_out) F32 or BF16: B, transposed
    first: int
    factor: float

    @property
    def rank(self) -> int:
        return self.b.shape[0]

    @property
    def num_out(self) -> int:
        return self.b.shape[1]


class AdapterSite(Struct, frozen=True, eq=False):
    """Its addition to one projection: low = x @ a.T, whose columns belong to the parts in turn."""

    a: Tensor  # (ranks of all parts together, num_in) F32 or BF16
    parts: tuple[AdapterPart, ...]  # ascending by `first`, none over another


class AdapterWeights(Struct, frozen=True, eq=False, weakref=True):
    layers: tuple[
        Mapping[AdapterPlace, AdapterSite], ...
    ]  # of each layer of the model; most have all places or none
    size_bytes: int

    @property
    def max_low(self) -> int:
        """The most low numbers of a row at one site."""
        return max((site.a.shape[0] for layer in self.layers for site in layer.values()), default=0)


class Adapter(Protocol):
    """One that rows of a step have. Hashable by identity."""

    @property
    def weights(self) -> AdapterWeights:
        """Once `opens` was true for a layer."""

    @property
    def is_complete(self) -> bool:
        """True if all layers are there."""

    def opens(self, layer: int, timeout_s: float | None) -> bool:
        """True if that layer is there, now or within this time; None: however long. Raises the load's error."""


class Module(Struct, frozen=True):
    """A module of one layer that an adapter may change, as a checkpoint names it: "self_attn.q_proj"."""

    name: str
    place: AdapterPlace
    first: int  # column of the place's output
    num_out: int
    num_in: int


def modules_of(config: DecoderConfig, layer: int) -> tuple[Module, ...]:
    """The modules of a layer that adapters may change. Of a mixture of experts: those of attention and of
    the shared expert. Of latents: what makes them, what makes queries or their low rank, and the output. None where
    inputs are rounded."""
    if config.quantization is not None and config.quantization.is_ternary:
        return ()
    names, latent = config.names, config.latent
    shape, qkv_sizes = config.shape_of(layer), config.qkv_sizes(layer)
    query_size = config.num_heads * shape.head_dim
    if latent is not None:
        queries = config.num_heads * (latent.plain_dim + config.rope.rotary_dim)
        qkv_sizes = (latent.query_rank or queries, config.head_dim)
        query_size = config.num_heads * latent.value_dim
    found: list[Module] = []
    if config.mamba is not None and config.is_mamba(layer):
        num_in, num_out = config.hidden_size, config.mamba.projected
        found.append(Module(f"{names.mamba}in_proj", AdapterPlace.MAMBA_INPUTS, 0, num_out, num_in))
        num_in, num_out = config.mamba.num_values, config.hidden_size
        found.append(Module(f"{names.mamba}out_proj", AdapterPlace.MAMBA_OUTPUT, 0, num_out, num_in))
    if config.delta_nets is not None and config.is_delta_net(layer):
        inputs = tuple(f"{names.delta_net}{name}" for name in names.delta_net_inputs)
        found += _stacked(AdapterPlace.QKV, inputs, config.delta_nets.projected, config.hidden_size)
        num_values = config.delta_nets.num_values
        found.append(
            Module(f"{names.delta_net}out_proj", AdapterPlace.OUTPUT, 0, config.hidden_size, num_values)
        )
    elif config.convolves(layer):
        before, _, after = names.convolution
        found += _stacked(AdapterPlace.QKV, (before,), (3 * config.hidden_size,), config.hidden_size)
        found.append(Module(after, AdapterPlace.OUTPUT, 0, config.hidden_size, config.hidden_size))
    elif config.attends(layer):
        found += _stacked(AdapterPlace.QKV, names.qkv[: len(qkv_sizes)], qkv_sizes, config.hidden_size)
        found.append(Module(names.output, AdapterPlace.OUTPUT, 0, config.hidden_size, query_size))
    if not config.has_mlp(layer):
        return tuple(found)
    inner, gate_up, down = shape.intermediate_size, names.gate_up, names.down
    if config.experts is not None and config.experts.layers[layer]:
        inner = inner if config.experts.joins_mlp else config.experts.shared_size
        prefix = names.shared_expert
        gate_up = tuple(f"{prefix}{name}" for name in names.expert_gate_up)
        down = f"{prefix}{names.expert_down}"
    if inner:
        sizes = (inner,) * (2 if config.gated_mlp else 1)
        found += _stacked(AdapterPlace.GATE_UP, gate_up, sizes, config.hidden_size)
        found.append(Module(down, AdapterPlace.DOWN, 0, config.hidden_size, inner))
    return tuple(found)


def _stacked(
    place: AdapterPlace, names: tuple[str, ...], sizes: tuple[int, ...], num_in: int
) -> list[Module]:
    if len(names) == 1:
        return [Module(names[0], place, 0, sum(sizes), num_in)]
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        Module(name, place, first, size, num_in)
        for name, first, size in zip(names, firsts, sizes, strict=True)
    ]
