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
    """Mamba-2 layers in place of some layers' attention, or parallel to it: selective state spaces over a state of
    fixed size, in fp32 (arXiv 2405.21060).

    Values, keys (B) and queries (C) are convolved, and pass SiLU. Each head has a matrix of (state_size, head_dim);
    heads of a group share keys, queries, and the norm of their outputs, where there is one.
    """

    num_heads: int
    num_groups: int  # equal runs of heads
    head_dim: int
    state_size: int
    convolution_size: int  # tokens, a row's own included
    layers: tuple[bool, ...]  # whether each layer is one; others attend
    has_bias: bool  # of the projection before it
    has_convolution_bias: bool
    has_output_bias: bool  # of the projection behind it
    has_norm: bool = True
    is_parallel: bool = False  # of the same inputs; both outputs are added
    # Of gates, values, keys, queries and time steps, as projections make them: products are rounded.
    scales: tuple[float, float, float, float, float] = (1.0,) * 5
    output_scale: float = 1.0  # likewise of outputs parallel to attention

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


class MambaKeys(Struct, frozen=True):
    """The keys of a config.json: by default Bamba's, Granite's and Falcon-H1's."""

    heads: str = "mamba_n_heads"
    groups: str = "mamba_n_groups"
    head_dim: str = "mamba_d_head"
    state: str = "mamba_d_state"
    convolution: str = "mamba_d_conv"
    bias: str = "mamba_proj_bias"
    convolution_bias: str = "mamba_conv_bias"


_KEYS = MambaKeys()


def read_mamba(
    config: Fields, layers: Sequence[bool], num_values: int | None, keys: MambaKeys = _KEYS
) -> Mamba | None:
    """The Mamba-2 layers; None where there are none. `num_values` is what all heads together have; None: any number.
    Raises `ModelError`.
    """
    if not any(layers):
        return None
    num_heads = config.integer(keys.heads, low=1, high=MAX_HEADS, default=128)
    num_groups = config.integer(keys.groups, low=1, high=num_heads, default=1)
    if num_heads % num_groups:
        raise config.wrong(keys.groups, f"but must divide {keys.heads}, {num_heads}")
    head_dim = None if num_values is None else num_values // num_heads
    if head_dim is None or config.get(keys.head_dim) not in (None, "auto"):
        head_dim = config.integer(keys.head_dim, low=1, high=MAX_HEAD_DIM)
    if not 1 <= head_dim <= MAX_HEAD_DIM or num_values not in (None, head_dim * num_heads):
        raise config.wrong(
            keys.heads, f"but heads of {keys.head_dim} numbers must have {num_values} numbers together"
        )
    state_size = config.integer(keys.state, low=_STATE_STEP, high=_MAX_STATE_SIZE, default=256)
    if state_size % _STATE_STEP:
        raise config.wrong(keys.state, f"but must be a multiple of {_STATE_STEP}")
    if not _limits_nothing(config.get("time_step_limit")):
        raise config.wrong("time_step_limit", "which is not supported")
    has_bias = config.boolean(keys.bias, default=False)
    return Mamba(
        num_heads,
        num_groups,
        head_dim,
        state_size,
        convolution_size=config.integer(keys.convolution, low=1, high=_MAX_CONVOLUTION, default=4),
        layers=tuple(layers),
        has_bias=has_bias,
        has_convolution_bias=config.boolean(keys.convolution_bias, default=True),
        has_output_bias=has_bias,
    )


def expanded(config: Fields, hidden_size: int) -> int:
    """The numbers of all heads in files that state them as a multiple of `hidden_size`."""
    return hidden_size * config.integer("mamba_expand", low=1, high=1 << 10, default=2)


def _limits_nothing(limits: Any) -> bool:
    """True of none, and of 0 to infinity, which transformers 5 writes as an object."""
    if limits is None:
        return True
    if not isinstance(limits, list) or len(limits) != 2 or limits[0] != 0:
        return False
    return limits[1] in ({"__float__": "Infinity"}, math.inf)
