"""Positions in an encoder's attention, in torch: rotations, and scores that depend on the distance
of two tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...models.relative_positions import bias_buckets, disentangled_buckets
from ...models.rotary import Rotary
from ...models.spec import EncoderSpec
from .layers import LayerNorm, Product
from .tensors import int64s


class Rotations:
    """Rotation of queries and keys by their positions, in fp32, rounded once."""

    def __init__(self, spec: EncoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._tables: dict[bool, tuple[torch.Tensor, torch.Tensor]] = {}  # by whether the layer has a window

    def turned(
        self, queries: torch.Tensor, keys: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, (N, heads, L, head_dim) each; unchanged if the layer has no
        rotation.
        """
        rotary = self._spec.rotary if window is None else self._spec.local_rotary
        if rotary is None:
            return queries, keys
        cos, sin = self._table(rotary, window is not None, queries.shape[2])
        return _turned(queries, cos, sin), _turned(keys, cos, sin)

    def _table(self, rotary: Rotary, is_local: bool, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, (length, rotary.dim / 2) each, fp32 numbers that the model's dtype
        holds.
        """
        found = self._tables.get(is_local)
        if found is None or len(found[0]) < length:
            cos, sin = (
                torch.from_numpy(table).to(self._device, self._dtype).float()
                for table in rotary.tables(0, max(length, 512))
            )
            found = self._tables[is_local] = cos, sin
        return found[0][:length], found[1][:length]


class LayerDistances:
    """A position bias, or disentangled positions, added to the scaled scores."""

    def __init__(
        self,
        spec: EncoderSpec,
        dtype: torch.dtype,
        table: torch.Tensor | None,
        norm: LayerNorm | None,
    ) -> None:
        """`table` and `norm` are `EncoderWeights.relative` and its norm. Reads no weights."""
        self._spec = spec
        self._dtype = dtype
        self._table = table
        self._norm = norm

    def bias(self, queries: torch.Tensor, keys: torch.Tensor, qkv: Product) -> torch.Tensor | None:
        """The bias (1 or N, heads, L, L), in the model's dtype; None if scores do not depend on
        distance.

        `queries` and `keys` are (N, heads, L, head_dim); `qkv` is the layer's projection.
        """
        spec, table, length = self._spec, self._table, queries.shape[2]
        if table is None:
            return None
        places = torch.arange(length, device=queries.device)
        numbers = places - places[:, None] + length - 1  # (L, L): index of the distance key - query
        if spec.position_bias is not None:
            buckets = int64s(bias_buckets(spec.position_bias, length - 1), queries.device)[numbers]
            return F.embedding(buckets, table).to(self._dtype).permute(2, 0, 1).unsqueeze(0)
        assert spec.disentangled is not None
        buckets = int64s(disentangled_buckets(spec.disentangled, length - 1), queries.device)[numbers]
        rows = table.to(self._dtype)
        rows = qkv(rows if self._norm is None else self._norm(rows))
        split = rows.view(len(rows), 3, spec.num_heads, -1).permute(
            1, 2, 3, 0
        )  # (3, heads, head_dim, buckets)
        index = buckets.expand(*queries.shape[:2], length, length)
        of_queries = (queries @ split[1]).gather(3, index)
        of_keys = (keys @ split[0]).gather(3, index.transpose(2, 3)).transpose(2, 3)
        return (of_queries + of_keys) * spec.attention_scale


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = heads.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(heads.dtype)
