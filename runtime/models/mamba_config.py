"""Mamba-2 layers in a decoder's config.json, as validated values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from .fields import MAX_HEAD_DIM, MAX_HEADS, Fields

_MAX_CONVOLUTION = 16
_STATE_STEP = 4  # divides the size of a state
_MAX_STATE_SIZE = 256
_KINDS = {
    **dict.fromkeys(("mamba", "linear_attention"), True),
    **dict.fromkeys(("attention", "full_attention"), False),
}


class Mamba(Struct, frozen=True):
    """Mamba-2 layers in place of some layers' attention: selective state spaces over a state of fixed size, in fp32
    (arXiv 2405.21060).

    Values, keys (B) and queries (C) are convolved, and pass SiLU. Each head has a matrix of (state_size, head_dim);
    heads of a group share keys, queries, and the norm of their outputs.
    """

    num_heads: int
    num_groups: int  # equal runs of heads
    head_dim: int
    state_size: int
    convolution_size: int  # tokens, a row's own included
    layers: tuple[bool, ...]  # whether each layer is one; others attend
    has_bias: bool  # of the projections before and behind
    has_convolution_bias: bool

    @property
    def num_values(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Those that are convolved."""
        return self.num_values + 2 * self.num_groups * self.state_size

    @property
    def projected(self) -> int:
        """Numbers of a row that are made of the layer's input: gates, channels, and a time step of each head."""
        return self.num_values + self.num_channels + self.num_heads

    @property
    def layer_state_size(self) -> int:
        """Numbers of a layer's state of one sequence: the convolution's last inputs, and the matrices."""
        return (self.convolution_size - 1) * self.num_channels + self.num_values * self.state_size


def read_layers(config: Fields, num_layers: int, key: str = "layer_types") -> list[bool]:
    """A flag for each layer, True if it is a Mamba-2 layer, by `key`, which must be there; the others attend, at least
    one of them.
    """
    kinds = config.texts(key) or []
    if len(kinds) != num_layers or not set(kinds) <= set(_KINDS) or all(_KINDS[kind] for kind in kinds):
        raise config.wrong(
            key, f"but must say mamba or attention for each of {num_layers} layers, and this at least once"
        )
    return [_KINDS[kind] for kind in kinds]


def read_mamba(config: Fields, hidden_size: int, layers: Sequence[bool]) -> Mamba | None:
    """The Mamba-2 layers as Bamba's and Granite's files state them; None where there are none. Raises `ModelError`."""
    if not any(layers):
        return None
    num_heads = config.integer("mamba_n_heads", low=1, high=MAX_HEADS, default=128)
    num_groups = config.integer("mamba_n_groups", low=1, high=num_heads, default=1)
    if num_heads % num_groups:
        raise config.wrong("mamba_n_groups", f"but must divide mamba_n_heads, {num_heads}")
    num_values = hidden_size * config.integer("mamba_expand", low=1, high=1 << 10, default=2)
    head_dim, rest = divmod(num_values, num_heads)
    if config.get("mamba_d_head") not in (None, "auto"):
        head_dim = config.integer("mamba_d_head", low=1, high=MAX_HEAD_DIM)
    if rest or not 1 <= head_dim <= MAX_HEAD_DIM or head_dim * num_heads != num_values:
        raise config.wrong(
            "mamba_n_heads",
            f"but heads of mamba_d_head numbers must have mamba_expand * hidden_size, {num_values}",
        )
    state_size = config.integer("mamba_d_state", low=_STATE_STEP, high=_MAX_STATE_SIZE, default=256)
    if state_size % _STATE_STEP:
        raise config.wrong("mamba_d_state", f"but must be a multiple of {_STATE_STEP}")
    if not _limits_nothing(config.get("time_step_limit")):
        raise config.wrong("time_step_limit", "which is not supported")
    return Mamba(
        num_heads,
        num_groups,
        head_dim,
        state_size,
        convolution_size=config.integer("mamba_d_conv", low=1, high=_MAX_CONVOLUTION, default=4),
        layers=tuple(layers),
        has_bias=config.boolean("mamba_proj_bias", default=False),
        has_convolution_bias=config.boolean("mamba_conv_bias", default=True),
    )


def _limits_nothing(limits: Any) -> bool:
    """True of none, and of 0 to infinity, which transformers 5 writes as an object."""
    if limits is None:
        return True
    if not isinstance(limits, list) or len(limits) != 2 or limits[0] != 0:
        return False
    return limits[1] in ({"__float__": "Infinity"}, math.inf)
