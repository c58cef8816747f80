"""The torch executor of encoders and classifiers, in padded batches whose padding is masked;
positions are rotations, or scores that depend on the distance of two tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from ...models.encoder_weights import EncoderLayerWeights, EncoderWeights
from ...models.executor import SIZES, Accepts, Floats, TextBatch, any_of, none_of, one_of
from ...models.fields import Norm
from ...models.matrices import LayerNormWeights, StoredProjection, Tensor
from ...models.parameters import COMPUTE_DTYPES
from ...models.relative_positions import bias_buckets, disentangled_buckets
from ...models.rotary import Rotary
from ...models.spec import Activation, EncoderSpec, Pooling
from .layers import LayerNorm, Product, activation, product_of
from .tensors import int64s, to_numpy, to_torch, torch_dtype

IMPLEMENTED: Mapping[str, Accepts] = {
    **SIZES,
    **any_of(
        "head_dim gated pre_norm embedding_size embedding_norm final_norm norm_bias qkv_bias output_bias "
        "mlp_bias max_positions position_offset type_vocab_size windows rotary rotary.dim "
        "rotary.frequencies rotary.factor local_rotary local_rotary.dim local_rotary.frequencies "
        "local_rotary.factor position_bias position_bias.num_buckets position_bias.max_distance "
        "disentangled disentangled.span disentangled.max_distance dense normalize num_labels head_bias "
        "head_norm"
    ),
    "dtype": one_of(*COMPUTE_DTYPES),
    "norm": one_of(Norm.LAYER),
    "activation": one_of(*Activation),
    **none_of("output_norms head_norms is_bounded rotary.interleaved local_rotary.interleaved"),
    "turned_parts": one_of(1),
    "pooling": one_of(*Pooling),
    "head_activation": one_of(*Activation),
}


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

        `queries` and `keys` are (N, heads, L, head_dim); `qkv` is the layer's projection,
        or that of positions alone.
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
        # (2 or 3, heads, head_dim, buckets)
        split = rows.view(len(rows), -1, spec.num_heads, spec.head_dim).permute(1, 2, 3, 0)
        index = buckets.expand(*queries.shape[:2], length, length)
        of_queries = (queries @ split[1]).gather(3, index)
        of_keys = (keys @ split[0]).gather(3, index.transpose(2, 3)).transpose(2, 3)
        return (of_queries + of_keys) * spec.attention_scale


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = heads.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(heads.dtype)


class TorchEncoderExecutor:
    """An `EncoderExecutor` of one encoder. One forward pass at a time. Activations are (N, L,
    hidden_size).
    """

    runs_layers_together = False

    def __init__(self, spec: EncoderSpec, weights: EncoderWeights) -> None:
        self._spec = spec
        self._dtype = torch_dtype(spec.dtype)
        self._device = device = torch.device(weights.device)
        self._words = to_torch(weights.words)
        self._positions, self._types = _optional(weights.positions), _optional(weights.types)
        self._norm = None if weights.norm is None else _layer_norm(weights.norm, spec)
        self._projection = None if weights.projection is None else product_of(weights.projection, device)
        self._distances = LayerDistances(
            spec,
            self._dtype,
            _optional(weights.relative),
            None if weights.relative_norm is None else _layer_norm(weights.relative_norm, spec),
        )
        rotations = Rotations(spec, self._dtype, device)
        self._layers = [
            EncoderLayer(spec, layer, index, device, rotations, self._distances)
            for index, layer in enumerate(weights.layers)
        ]
        self._final_norm = None if weights.final_norm is None else _layer_norm(weights.final_norm, spec)
        self._dense = None if weights.dense is None else product_of(weights.dense, device)
        self._head_activation = activation(spec.head_activation)
        self._head_norm = None if weights.head_norm is None else _layer_norm(weights.head_norm, spec)
        self._scores = None if weights.scores is None else product_of(weights.scores, device)
        self._sentence = [product_of(StoredProjection((matrix,)), device) for matrix in weights.sentence]

    @property
    def name(self) -> str:
        return "torch"

    @torch.inference_mode()
    def embed(self, batch: TextBatch) -> torch.Tensor:
        mask = self._mask(batch)  # (N, L)
        tokens = int64s(batch.tokens, self._device)
        # Pad with a token whose embedding has arrived: others may not have, and could hold NaN.
        padded = tokens[0].repeat(mask.shape)
        padded[mask] = tokens
        first, length = self._spec.position_offset, mask.shape[1]
        x = F.embedding(padded, self._words).to(self._dtype)
        if self._types is not None:
            types = torch.zeros_like(padded)
            if batch.types is not None:
                types[mask] = int64s(batch.types, self._device)
            x = x + F.embedding(types, self._types).to(self._dtype)
        if self._positions is not None:
            x = x + self._positions[first : first + length].to(self._dtype)
        if self._norm is not None:
            x = self._norm(x)
        return x if self._projection is None else self._projection(x)

    @torch.inference_mode()
    def layers(self, batch: TextBatch, first: int, end: int, x: torch.Tensor) -> torch.Tensor:
        mask = self._mask(batch)
        visible = None if bool(mask.all()) else mask[:, None, None, :]  # the kernel is faster without a mask
        for layer in self._layers[first:end]:
            x = layer(x, visible)
        return x

    @torch.inference_mode()
    def finish(self, batch: TextBatch, x: torch.Tensor) -> Floats:
        spec = self._spec
        if self._final_norm is not None:
            x = self._final_norm(x)
        pooled = pool_states(x, self._mask(batch), spec.pooling)
        if self._dense is not None and self._scores is not None:
            dense = self._head_activation(self._dense(pooled.to(self._dtype)))
            if self._head_norm is not None:
                dense = self._head_norm(dense)
            return to_numpy(self._scores(dense).float())
        for product, layer in zip(self._sentence, spec.dense, strict=True):
            pooled = product(pooled).float()
            if layer.activation is not None:
                pooled = activation(layer.activation)(pooled)
        return to_numpy(F.normalize(pooled, dim=-1) if spec.normalize else pooled)

    def _mask(self, batch: TextBatch) -> torch.Tensor:
        """(N, L) bool: True except for padding. A row's tokens come first."""
        lengths = int64s(batch.starts, self._device).diff()
        return torch.arange(int(lengths.max()), device=self._device) < lengths.unsqueeze(1)


class EncoderLayer:
    """x = norm(x + attention(x)), then norm(x + mlp(x)); with prior norms x + attention(norm(x)),
    and likewise. x is (N, L, hidden_size).
    """

    def __init__(
        self,
        spec: EncoderSpec,
        weights: EncoderLayerWeights,
        index: int,
        device: torch.device,
        rotations: Rotations,
        distances: LayerDistances,
    ) -> None:
        self.spec = spec
        self.num_heads = spec.num_heads
        self.scale = spec.attention_scale
        self.window = spec.windows[index]
        self.rotations = rotations
        self.distances = distances
        self.qkv = product_of(weights.qkv, device)
        self.position_qk = (
            self.qkv if weights.position_qk is None else product_of(weights.position_qk, device)
        )
        self.output = product_of(weights.output, device)
        self.attention_norm = None
        if weights.attention_norm is not None:
            self.attention_norm = _layer_norm(weights.attention_norm, spec)
        self.up = product_of(weights.up, device)
        self.activation = activation(spec.activation)
        self.down = product_of(weights.down, device)
        self.mlp_norm = _layer_norm(weights.mlp_norm, spec)

    def __call__(self, x: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        if self.spec.pre_norm:
            normed = x if self.attention_norm is None else self.attention_norm(x)
            x = x + self._attend(normed, visible)
            return x + self._mlp(self.mlp_norm(x))
        assert self.attention_norm is not None
        x = self.attention_norm(x + self._attend(x, visible))
        return self.mlp_norm(x + self._mlp(x))

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        if not self.spec.gated:
            return self.down(self.activation(inner))
        gate, up = inner.chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)

    def _attend(self, x: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        """Attention. `visible` (N, 1, 1, L) is False for keys of padding; None: all are visible."""
        split = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1)  # (N, L, 3, heads, head_dim)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)  # (N, heads, L, head_dim) each
        queries, keys = self.rotations.turned(queries, keys, self.window)
        mask = self._windowed(visible, x.shape[1], x.device)
        bias = self.distances.bias(queries, keys, self.position_qk)
        if bias is not None:
            mask = bias if mask is None else torch.where(mask, bias, float("-inf"))
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=self.scale)
        return self.output(attended.transpose(1, 2).flatten(2))

    def _windowed(
        self, visible: torch.Tensor | None, length: int, device: torch.device
    ) -> torch.Tensor | None:
        """The visible keys within the layer's window. A row of padding sees itself, so that no row
        is without keys.
        """
        if self.window is None or length <= self.window + 1:
            return visible
        places = torch.arange(length, device=device)
        distances = (places[:, None] - places).abs()  # (L, L)
        near = distances <= self.window
        return near if visible is None else (near & visible) | (distances == 0)


def _optional(tensor: Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else to_torch(tensor)


def _layer_norm(weights: LayerNormWeights, spec: EncoderSpec) -> LayerNorm:
    return LayerNorm(to_torch(weights.weight), _optional(weights.bias), spec.norm_eps)


def pool_states(states: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """states (N, L, hidden), mask (N, L) bool → (N, hidden) fp32."""
    if pooling is Pooling.CLS:
        return states[:, 0].float()
    lengths = mask.sum(1)
    if pooling is Pooling.LAST:
        return states[torch.arange(len(states), device=states.device), lengths - 1].float()
    counted = mask.unsqueeze(-1).float()
    if pooling is Pooling.MAX:
        return states.float().masked_fill(~mask.unsqueeze(-1), float("-inf")).amax(1)
    if pooling is Pooling.WEIGHTED_MEAN:
        counted = counted * torch.arange(1, states.shape[1] + 1, device=states.device).unsqueeze(-1)
    total = counted.sum(1)
    return (states.float() * counted).sum(1) / (total.sqrt() if pooling is Pooling.MEAN_SQRT else total)
