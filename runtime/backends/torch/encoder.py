"""Encoders and classifiers computed by torch, in padded batches whose padding is masked away."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from ...models.executor import Accepts, Floats, TextBatch, any_value, one_of
from ...models.matrices import EncoderLayerWeights, EncoderWeights, LayerNormWeights
from ...models.parameters import COMPUTE_DTYPES
from ...models.spec import Activation, EncoderSpec, Pooling
from .activations import activation
from .linear import product_of
from .norm import LayerNorm
from .tensors import int64s, to_numpy, to_torch, torch_dtype

IMPLEMENTED: Mapping[str, Accepts] = {
    "dtype": one_of(*COMPUTE_DTYPES),
    "vocab_size": any_value,
    "hidden_size": any_value,
    "intermediate_size": any_value,
    "num_layers": any_value,
    "num_heads": any_value,
    "head_dim": any_value,
    "norm_eps": any_value,
    "attention_scale": any_value,
    "activation": one_of(*Activation),
    "max_positions": any_value,
    "type_vocab_size": any_value,
    "position_offset": any_value,
    "pooling": one_of(*Pooling),
    "normalize": any_value,
    "num_labels": any_value,
}


class TorchEncoderExecutor:
    """One encoder's batches, an `EncoderExecutor`. One forward pass at a time. Activations are (N, L, hidden_size)."""

    runs_layers_together = False

    def __init__(self, spec: EncoderSpec, weights: EncoderWeights) -> None:
        self._spec = spec
        self._dtype = torch_dtype(spec.dtype)
        self._device = device = torch.device(weights.device)
        self._words, self._positions = to_torch(weights.words), to_torch(weights.positions)
        self._types = to_torch(weights.types)
        self._norm = _layer_norm(weights.norm, spec)
        self._layers = [EncoderLayer(spec, layer, device) for layer in weights.layers]
        self._dense = None if weights.dense is None else product_of(weights.dense, device)
        self._scores = None if weights.scores is None else product_of(weights.scores, device)

    @property
    def name(self) -> str:
        return "torch"

    @torch.inference_mode()
    def embed(self, batch: TextBatch) -> torch.Tensor:
        mask = self._mask(batch)  # (N, L)
        tokens = int64s(batch.tokens, self._device)
        # With a word that is there: others may not have arrived, and what they hold could be NaN.
        padded = tokens[0].repeat(mask.shape)
        padded[mask] = tokens
        first, length = self._spec.position_offset, mask.shape[1]
        x = F.embedding(padded, self._words).to(self._dtype)
        x = x + self._types[0].to(self._dtype) + self._positions[first : first + length].to(self._dtype)
        return self._norm(x)

    @torch.inference_mode()
    def layers(self, batch: TextBatch, first: int, end: int, x: torch.Tensor) -> torch.Tensor:
        mask = self._mask(batch)
        visible = None if bool(mask.all()) else mask[:, None, None, :]  # the kernel is faster without a mask
        for layer in self._layers[first:end]:
            x = layer(x, visible)
        return x

    @torch.inference_mode()
    def finish(self, batch: TextBatch, x: torch.Tensor) -> Floats:
        if self._dense is not None and self._scores is not None:
            return to_numpy(self._scores(torch.tanh(self._dense(x[:, 0]))).float())
        pooled = _pool(x, self._mask(batch), self._spec.pooling)
        return to_numpy(F.normalize(pooled, dim=-1) if self._spec.normalize else pooled)

    def _mask(self, batch: TextBatch) -> torch.Tensor:
        """(N, L) bool: what is no padding. A row's tokens come first."""
        lengths = int64s(batch.starts, self._device).diff()
        return torch.arange(int(lengths.max()), device=self._device) < lengths.unsqueeze(1)


class EncoderLayer:
    """x = norm(x + attention(x)), then norm(x + mlp(x)). x is (N, L, hidden_size)."""

    def __init__(self, spec: EncoderSpec, weights: EncoderLayerWeights, device: torch.device) -> None:
        self.num_heads = spec.num_heads
        self.scale = spec.attention_scale
        self.qkv = product_of(weights.qkv, device)
        self.output = product_of(weights.output, device)
        self.attention_norm = _layer_norm(weights.attention_norm, spec)
        self.up = product_of(weights.up, device)
        self.activation = activation(spec.activation)
        self.down = product_of(weights.down, device)
        self.mlp_norm = _layer_norm(weights.mlp_norm, spec)

    def __call__(self, x: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        x = self.attention_norm(x + self._attend(x, visible))
        return self.mlp_norm(x + self.down(self.activation(self.up(x))))

    def _attend(self, x: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        """`visible` (N, 1, 1, L) says which keys are no padding; None: all."""
        split = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1)  # (N, L, 3, heads, head_dim)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)  # (N, heads, L, head_dim) each
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, scale=self.scale)
        return self.output(attended.transpose(1, 2).flatten(2))


def _layer_norm(weights: LayerNormWeights, spec: EncoderSpec) -> LayerNorm:
    return LayerNorm(to_torch(weights.weight), to_torch(weights.bias), spec.norm_eps)


def _pool(states: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """states (N, L, hidden), mask (N, L) bool → (N, hidden) fp32."""
    if pooling is Pooling.CLS:
        return states[:, 0].float()
    counted = mask.unsqueeze(-1).float()
    return (states.float() * counted).sum(1) / counted.sum(1)
