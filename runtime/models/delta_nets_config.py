"""Gated delta nets in a decoder's config.json, as validated values."""

from __future__ import annotations

import enum

from msgspec import Struct


class DeltaOrder(enum.IntEnum):
    """The order of the numbers that a gated delta net's inputs make of a row, by the core's numbers."""

    APART = 0  # all queries, keys, values, gates, betas, decays
    GROUPED = 1  # of each key head queries, keys, values and gates, then betas and decays of each
    SPLIT = 2  # all queries, keys, values, gates; then of each key head betas and decays
    TILED = 3  # apart, where value heads with the same key head have as many others between them as there are key heads


class DeltaNets(Struct, frozen=True):
    """Gated delta nets in place of some layers' attention: linear attention over a state of fixed size, in fp32.

    Queries, keys and values are convolved as `ShortConvolutions` are, and pass SiLU. Each value head has a matrix of
    (key_size, value_size); value heads share key heads as the heads of attention share keys.
    """

    num_key_heads: int
    num_value_heads: int  # a multiple of these
    key_size: int  # of a head
    value_size: int
    convolution_size: int  # tokens, a row's own included
    layers: tuple[bool, ...]  # whether each layer is one; others attend
    order: DeltaOrder = DeltaOrder.APART

    @property
    def projected(self) -> tuple[int, ...]:
        """Numbers of a row that each of `LayerNames.delta_net_inputs` makes."""
        if self.order is DeltaOrder.GROUPED:
            return self.num_channels + self.num_values, 2 * self.num_value_heads
        if self.order is DeltaOrder.SPLIT:
            return self.num_channels, self.num_values, 2 * self.num_value_heads
        return self.num_channels, self.num_values, self.num_value_heads, self.num_value_heads

    @property
    def num_values(self) -> int:
        return self.num_value_heads * self.value_size

    @property
    def num_channels(self) -> int:
        """Those that are convolved."""
        return 2 * self.num_key_heads * self.key_size + self.num_values

    @property
    def state_size(self) -> int:
        """Numbers of a layer's state of one sequence: the convolution's last inputs, and the matrices."""
        return (self.convolution_size - 1) * self.num_channels + self.num_values * self.key_size
