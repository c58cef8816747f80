"""Decoders computed by torch: the reference for every other executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...kv.kinds import KVKind
from ...models.executor import Accepts, any_value, one_of
from ...models.matrices import DecoderLayerWeights, DecoderWeights, EmbeddingTable
from ...models.parameters import COMPUTE_DTYPES
from ...models.spec import Activation, DecoderSpec
from ...step.batch import Int64s, StepBatch
from .activations import activation
from .attention import SpanPlan, paged_attention, plan_attention
from .linear import Linear, product_of
from .norm import HeadRMSNorm, RMSNorm
from .rope import RopeTable, rotate_
from .storage import TorchInt8KVStorage, TorchKVStorage, TorchPool
from .tensors import int64s, to_numpy, to_torch, torch_dtype

IMPLEMENTED: Mapping[str, Accepts] = {
    "dtype": one_of(*COMPUTE_DTYPES),
    "vocab_size": any_value,
    "hidden_size": any_value,
    "intermediate_size": any_value,
    "num_layers": any_value,
    "num_heads": any_value,
    "num_kv_heads": any_value,
    "head_dim": any_value,
    "norm_eps": any_value,
    "attention_scale": any_value,
    "activation": one_of(*Activation),
    "rotary.dim": any_value,
    "rotary.frequencies": any_value,
    "rotary.factor": any_value,
    "max_context": any_value,
    "windows": any_value,
    "qkv_bias": any_value,
    "output_bias": any_value,
    "mlp_bias": any_value,
    "head_norms": any_value,
    "tied_head": any_value,
}

_STORAGES: dict[KVKind, type[TorchKVStorage] | type[TorchInt8KVStorage]] = {
    KVKind.MODEL: TorchKVStorage,
    KVKind.INT8: TorchInt8KVStorage,
}


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers share in one forward pass."""

    kv: TorchPool
    slots: torch.Tensor  # (T,) int64
    cos: torch.Tensor  # (T, 1, rotary_dim)
    sin: torch.Tensor
    plans: dict[int | None, tuple[SpanPlan, ...]]  # by sliding window


class TorchExecutor:
    """One decoder's steps, an `Executor`. One forward pass at a time."""

    runs_layers_together = False

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights) -> None:
        self.spec = spec
        self.dtype = torch_dtype(spec.dtype)
        self.device = torch.device(weights.device)
        self.embeddings = Embeddings(weights.embeddings, self.dtype)
        self.layers_of = [
            DecoderLayer(spec, index, layer, self.device) for index, layer in enumerate(weights.layers)
        ]
        self.norm = RMSNorm(to_torch(weights.norm), spec.norm_eps)
        self.head = product_of(weights.head, self.device)
        self.rope = RopeTable(spec.rotary, spec.max_context, self.dtype)

    @property
    def name(self) -> str:
        return "torch"

    @property
    def numerics(self) -> str:
        return "torch"  # last bits depend on its version, the processor and the company: no promise is made

    @torch.inference_mode()
    def embed(self, batch: StepBatch) -> torch.Tensor:
        return self.embeddings(int64s(batch.tokens, self.device))

    @torch.inference_mode()
    def begin(self, batch: StepBatch, kv: Any) -> Any:
        positions = int64s(batch.positions, self.device)
        cos, sin = self.rope.rows(positions, max(span.context_len for span in batch.spans))
        plans = {
            window: plan_attention(batch.spans, kv, num_heads=self.spec.num_heads, window=window)
            for window in set(self.spec.windows)
        }
        return Step(kv, int64s(batch.slots, self.device), cos, sin, plans)

    @torch.inference_mode()
    def layers(self, step: Any, first: int, end: int, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers_of[first:end]:
            x = layer(x, step)
        return x

    @torch.inference_mode()
    def logits(self, x: torch.Tensor, rows: Int64s) -> Any:
        return to_numpy(self.head_of(x[int64s(rows, self.device)]))

    def head_of(self, x: torch.Tensor) -> torch.Tensor:
        """(R, vocab_size) fp32 of what the last layer made of these rows (R, hidden_size)."""
        states = self.norm(x)
        if isinstance(self.head, Linear) and self.head.weight.dtype is not states.dtype:
            return self.head.in_float32(states)
        return self.head(states).float()

    @torch.inference_mode()
    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    @torch.inference_mode()
    def select(self, x: torch.Tensor, rows: Int64s) -> torch.Tensor:
        return x[int64s(rows, self.device)]

    def new_kv(self, num_blocks: int, block_size: int, kind: KVKind) -> Any:
        spec = self.spec
        return _STORAGES[kind](
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=spec.dtype,
            device=self.device,
        )

    def kv_block_bytes(self, block_size: int, kind: KVKind) -> int:
        spec = self.spec
        return _STORAGES[kind].block_bytes(
            spec.num_layers, spec.num_kv_heads, spec.head_dim, block_size, spec.dtype
        )


class Embeddings:
    """A row for each token, of floats, or of int8 with a scale for each group. Rows are made in `dtype`."""

    __slots__ = ("dtype", "scale", "weight")

    def __init__(self, table: EmbeddingTable, dtype: torch.dtype) -> None:
        self.weight = to_torch(table.weight)
        self.scale = None if table.scale is None else to_torch(table.scale)
        self.dtype = dtype

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of these tokens, (T,) integers → (T, hidden). Reads no others."""
        rows = F.embedding(tokens, self.weight)
        if self.scale is None:
            return rows.to(self.dtype)
        scales = F.embedding(tokens, self.scale).to(torch.float32)
        grouped = rows.view(*scales.shape, -1).to(torch.float32) * scales.unsqueeze(-1)
        return grouped.view(rows.shape).to(self.dtype)


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)). x is (T, hidden_size)."""

    def __init__(
        self, spec: DecoderSpec, index: int, weights: DecoderLayerWeights, device: torch.device
    ) -> None:
        self.index = index
        self.attention_norm = RMSNorm(to_torch(weights.attention_norm), spec.norm_eps)
        self.attention = Attention(spec, index, weights, device)
        self.mlp_norm = RMSNorm(to_torch(weights.mlp_norm), spec.norm_eps)
        self.mlp = GatedMLP(spec, weights, device)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x may be changed."""
        x = x + self.attention(self.attention_norm(x), step)
        return x + self.mlp(self.mlp_norm(x))


class Attention:
    """Grouped-query attention with rotary positions over the sequences' cached keys and values."""

    def __init__(
        self, spec: DecoderSpec, layer: int, weights: DecoderLayerWeights, device: torch.device
    ) -> None:
        self.layer = layer
        self.num_heads = spec.num_heads
        self.num_rotated = spec.num_heads + spec.num_kv_heads  # queries and keys; values are not rotated
        self.head_dim = spec.head_dim
        self.window = spec.windows[layer]
        self.scale = spec.attention_scale
        self.qkv = product_of(weights.qkv, device)
        self.head_norm: HeadRMSNorm | None = None
        if weights.query_norm is not None and weights.key_norm is not None:
            self.head_norm = HeadRMSNorm(
                to_torch(weights.query_norm), to_torch(weights.key_norm), spec.num_heads, spec.norm_eps
            )
        self.output = product_of(weights.output, device)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        heads = self.qkv(x).view(len(x), -1, self.head_dim)  # (T, query + key + value heads, head_dim)
        rotated = heads[:, : self.num_rotated]
        if self.head_norm is not None:
            self.head_norm.apply_(rotated)
        rotate_(rotated, step.cos, step.sin)
        step.kv.write(self.layer, step.slots, heads[:, self.num_heads :])
        attended = paged_attention(
            heads[:, : self.num_heads], step.kv, self.layer, step.plans[self.window], self.scale
        )
        return self.output(attended)


class GatedMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, spec: DecoderSpec, weights: DecoderLayerWeights, device: torch.device) -> None:
        self.gate_up = product_of(weights.gate_up, device)
        self.activation = activation(spec.activation)
        self.down = product_of(weights.down, device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up))
