"""Attention over latents in torch: keys and values of all heads as products with one latent a token."""

from __future__ import annotations

import torch

from ...models.decoder_config import LayerRotary
from ...models.matrices import DecoderLayerWeights
from ...models.spec import DecoderSpec
from .attention import TorchStep, paged_attention
from .layers import Linear, RMSNorm, product_of, rotation
from .tensors import to_torch


class AttentionOverLatents:
    """A head's queries times its rows for keys attend to latents, and sums of latents times its rows for values are its
    output: the pool has one row a token, of the latent and a turned key.
    """

    def __init__(
        self, spec: DecoderSpec, layer: int, weights: DecoderLayerWeights, device: torch.device
    ) -> None:
        latent = spec.latent
        assert latent is not None
        assert weights.key_norm is not None
        assert weights.key_value_up is not None
        assert weights.qkv is not None
        assert weights.output is not None
        self.kv_layer = spec.kv_layers()[layer]
        self.num_heads, self.head_dim = spec.num_heads, spec.head_dim
        self.rank, self.plain_dim = latent.rank, latent.plain_dim
        self.scale = spec.attention_scale
        self.rotate = rotation(interleaved=spec.rotary.interleaved, wide=spec.wide_rotary)
        self.down = product_of(weights.qkv, device)
        self.latent_norm = RMSNorm(to_torch(weights.key_norm), latent.norm_eps, spec.norm)
        self.query_norm: RMSNorm | None = None
        if weights.query_norm is not None and weights.query_up is not None:
            self.query_norm = RMSNorm(to_torch(weights.query_norm), latent.norm_eps, spec.norm)
            self.query_up = product_of(weights.query_up, device)
        self.key_value_up = product_of(weights.key_value_up, device)
        self.output = product_of(weights.output, device)
        self.identity = torch.eye(self.rank, device=device)

    def __call__(self, x: torch.Tensor, step: TorchStep) -> torch.Tensor:
        down = self.down(x)
        queries, stored = down[:, : -self.head_dim], down[:, -self.head_dim :].contiguous()
        turns = step.turns[LayerRotary.MAIN]
        stored[:, : self.rank] = self.latent_norm(stored[:, : self.rank])
        self.rotate(stored[:, None, self.rank :], *turns)
        step.kv.write(self.kv_layer, step.slots, stored)
        if self.query_norm is not None:
            queries = self.query_up(self.query_norm(queries))
        heads = queries.reshape(len(x), self.num_heads, -1)
        ups = self._ups(x.dtype)  # (heads, plain_dim + value_dim, rank)
        made = x.new_empty(len(x), self.num_heads, self.head_dim)
        made[..., self.rank :] = heads[..., self.plain_dim :]
        self.rotate(made[..., self.rank :], *turns)
        plain = heads[..., : self.plain_dim].transpose(0, 1)
        made[..., : self.rank] = (plain @ ups[:, : self.plain_dim]).transpose(0, 1)
        attended = paged_attention(made, step.kv, self.kv_layer, step.plans[None], self.scale)
        sums = attended.view(made.shape)[..., : self.rank].transpose(0, 1)
        values = (sums @ ups[:, self.plain_dim :].transpose(1, 2)).transpose(0, 1)
        return self.output(values.reshape(len(x), -1))

    def _ups(self, dtype: torch.dtype) -> torch.Tensor:
        """Each head's rows for keys, and then for values."""
        up = self.key_value_up
        rows = up.weight if isinstance(up, Linear) else up(self.identity).T
        return rows.to(dtype).view(self.num_heads, -1, self.rank)
