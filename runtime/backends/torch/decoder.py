"""The torch executor of decoders: the reference for every other executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...kv.storage import KVKind
from ...models.decoder_config import LayerRotary
from ...models.executor import SIZES, WITHOUT_NATIVE, Accepts, any_of, one_of
from ...models.fields import Norm
from ...models.matrices import DecoderLayerWeights, DecoderWeights, EmbeddingTable
from ...models.parameters import COMPUTE_DTYPES
from ...models.rotary import query_factors
from ...models.spec import Activation, DecoderSpec
from ...step.batch import Int64s, SequenceSpan, StepBatch
from ...tensors import Tensor
from .attention import TorchStep, paged_attention, plan_attention
from .expanded import block_rows
from .latent import AttentionOverLatents
from .layers import (
    HeadNorm,
    Linear,
    RMSNorm,
    RopeTable,
    product_of,
    rotation,
)
from .mlp import GatedMLP, Mixture, layer_product
from .storage import Extent, TorchInt8KVStorage, TorchKVStorage, TorchPool
from .tensors import int64s, to_numpy, to_torch, torch_dtype

IMPLEMENTED: Mapping[str, Accepts] = {
    **SIZES,
    **WITHOUT_NATIVE,
    **any_of(
        "num_kv_heads head_dim input_norms output_norms inner_norms rounds_inputs is_parallel "
        "parallel_norms interleaved_qkv learned_positions experts experts.num experts.num_used experts.size "
        "experts.layers experts.sum_to_1 experts.rounds_weights experts.has_bias experts.swiglu "
        "experts.swiglu.alpha experts.swiglu.limit experts.shares experts.wide_scores "
        "experts.has_correction experts.num_groups experts.num_groups_used experts.sum_eps experts.factor "
        "experts.shared_size experts.has_shared_gate experts.weighs_inputs convolutions convolutions.size "
        "convolutions.layers convolutions.has_bias latent latent.rank latent.query_rank latent.plain_dim "
        "latent.value_dim latent.norm_eps sinks score_cap logit_cap embedding_scale residual_scale "
        "logits_scale rotary.dim rotary.frequencies rotary.factor rotary.interleaved local_rotary "
        "local_rotary.dim local_rotary.frequencies local_rotary.factor local_rotary.interleaved "
        "layer_rotary wide_rotary max_context windows chunked_windows query_scaling query_scaling.interval "
        "query_scaling.strength query_scaling.layers is_bidirectional qkv_bias output_bias mlp_bias "
        "gated_mlp norm_bias head_bias head_norms joint_head_norms late_head_norms tied_head"
    ),
    "dtype": one_of(*COMPUTE_DTYPES),
    "norm": one_of(*Norm),
    "experts.joins_mlp": one_of(False),
    "activation": one_of(*Activation),
}

_STORAGES: dict[KVKind, type[TorchKVStorage] | type[TorchInt8KVStorage]] = {
    KVKind.MODEL: TorchKVStorage,
    KVKind.INT8: TorchInt8KVStorage,
}


class TorchExecutor:
    """An `Executor` of one decoder. One forward pass at a time."""

    is_batch_invariant = False
    runs_layers_together = False
    takes_adapters = False
    # Its products depend on the batch: the router could choose others when it is computed again.
    routes_apart = False
    scores_in_strips = False

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights) -> None:
        self.spec = spec
        self.dtype = torch_dtype(spec.dtype)
        self.device = torch.device(weights.device)
        self.embeddings = Embeddings(weights.embeddings, self.dtype, spec.embedding_scale)
        table = None if weights.positions is None else EmbeddingTable(weights.positions)
        self.positions = None if table is None else Embeddings(table, self.dtype)
        self.layers_of = [
            DecoderLayer(spec, index, layer, self.device) for index, layer in enumerate(weights.layers)
        ]
        self.norm = _required_norm(weights.norm, spec, weights.norm_bias)
        self.head = product_of(weights.head, self.device)
        turned_in = torch.float32 if spec.wide_rotary else self.dtype
        self.rope = RopeTable(spec.rotary, spec.max_context, turned_in)
        self.local_rope: RopeTable | None = None
        if spec.local_rotary is not None:
            self.local_rope = RopeTable(spec.local_rotary, spec.max_context, turned_in)

    @property
    def name(self) -> str:
        return "torch"

    @property
    def numerics(self) -> str:
        # The last bits depend on torch's version, the processor and the batch: no promise is made.
        return "torch"

    @torch.inference_mode()
    def embed(self, batch: StepBatch) -> torch.Tensor:
        rows = self.embeddings(int64s(batch.tokens, self.device))
        return rows if self.positions is None else rows + self.positions(int64s(batch.positions, self.device))

    @torch.inference_mode()
    def begin(self, batch: StepBatch, kv: Any) -> Any:
        positions = int64s(batch.positions, self.device)
        end = max(span.context_len for span in batch.spans)
        turns = {LayerRotary.MAIN: self.rope.rows(positions, end)}
        if self.local_rope is not None:
            turns[LayerRotary.LOCAL] = self.local_rope.rows(positions, end)
        plans = {
            window: plan_attention(
                batch.spans,
                kv,
                num_heads=self.spec.num_heads,
                window=window,
                is_chunked=self.spec.chunked_windows,
                is_bidirectional=self.spec.is_bidirectional,
            )
            for window in set(self.spec.windows)
        }
        seen: tuple[tuple[SequenceSpan, Extent], ...] = ()
        if self.spec.convolutions is not None:
            more = self.spec.convolutions.size - 1
            firsts = [max(0, span.context_len - span.length - more) for span in batch.spans]
            seen = tuple(
                (span, kv.extent(span, first)) for span, first in zip(batch.spans, firsts, strict=True)
            )
        scales: torch.Tensor | None = None
        if self.spec.query_scaling is not None:
            factors = torch.from_numpy(query_factors(self.spec.query_scaling, batch.positions))
            scales = factors.to(self.device).view(-1, 1, 1)
        return TorchStep(kv, int64s(batch.slots, self.device), turns, plans, seen, scales)

    @torch.inference_mode()
    def layers(self, step: Any, first: int, end: int, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers_of[first:end]:
            x = layer(x, step)
        return x

    @torch.inference_mode()
    def logits(self, x: torch.Tensor, rows: Int64s) -> Any:
        return to_numpy(self.head_of(x[int64s(rows, self.device)]))

    def states(self, x: torch.Tensor, rows: Int64s) -> Any:
        return to_numpy(self.norm(x[int64s(rows, self.device)]).float())

    def head_of(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (R, vocab_size) fp32 from the last layer's rows (R, hidden_size)."""
        states = self.norm(x)
        if isinstance(self.head, Linear) and self.head.weight.dtype is not states.dtype:
            logits = self.head.in_float32(states)
        else:
            logits = self.head(states).float()
        if self.spec.logits_scale != 1.0:
            logits = logits * self.spec.logits_scale
        cap = self.spec.logit_cap
        return logits if cap is None else torch.tanh(logits / cap).mul_(cap)

    @torch.inference_mode()
    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    @torch.inference_mode()
    def select(self, x: torch.Tensor, rows: Int64s) -> torch.Tensor:
        return x[int64s(rows, self.device)]

    def new_kv(self, num_blocks: int, block_size: int, kind: KVKind) -> Any:
        return _STORAGES[kind](self.spec.kv_shape(num_blocks, block_size), device=self.device)

    def kv_block_bytes(self, block_size: int, kind: KVKind) -> int:
        return _STORAGES[kind].block_bytes(self.spec.kv_shape(1, block_size))


class Embeddings:
    """An embedding table of floats, or of int8 with a scale for each group.

    Rows are made in `dtype`, then multiplied by `factor`.
    """

    __slots__ = ("block", "dtype", "factor", "scale", "weight")

    def __init__(self, table: EmbeddingTable, dtype: torch.dtype, factor: float = 1.0) -> None:
        self.factor = factor
        self.weight = to_torch(table.weight)
        self.scale = None if table.scale is None else to_torch(table.scale)
        self.dtype = dtype
        self.block = table.block

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of these tokens, (T,) integers → (T, hidden). Reads no others."""
        rows = self._rows(tokens)
        return rows if self.factor == 1.0 else rows * self.factor

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.block is not None:
            return block_rows(self.block, self.weight[tokens]).to(self.dtype)
        rows = F.embedding(tokens, self.weight)
        if self.scale is None:
            return rows.to(self.dtype)
        scales = F.embedding(tokens, self.scale).to(torch.float32)
        grouped = rows.view(*scales.shape, -1).to(torch.float32) * scales.unsqueeze(-1)
        return grouped.view(rows.shape).to(self.dtype)


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); each addend may have a norm and a scale of its
    own. x is (T, hidden_size).
    """

    def __init__(
        self, spec: DecoderSpec, index: int, weights: DecoderLayerWeights, device: torch.device
    ) -> None:
        self.index = index
        self.residual_scale = spec.residual_scale
        self.is_parallel = spec.is_parallel
        self.attention_norm = _norm(weights.attention_norm, spec, weights.attention_norm_bias)
        self.mixer: Attention | AttentionOverLatents | ShortConvolution
        if weights.convolution is not None:
            self.mixer = ShortConvolution(spec, index, weights, weights.convolution, device)
        else:
            attention = Attention if spec.latent is None else AttentionOverLatents
            self.mixer = attention(spec, index, weights, device)
        self.attention_output_norm = _norm(weights.attention_output_norm, spec)
        self.mlp_norm = _norm(weights.mlp_norm, spec, weights.mlp_norm_bias)
        self.mlp: GatedMLP | Mixture = (
            Mixture(spec, weights, device)
            if weights.experts
            else GatedMLP(
                spec, weights.gate_up, weights.down, device, inner_norm=_norm(weights.mlp_inner_norm, spec)
            )
        )
        self.mlp_output_norm = _norm(weights.mlp_output_norm, spec)

    @property
    def attention(self) -> Attention:
        """Of a layer that attends."""
        assert isinstance(self.mixer, Attention)
        return self.mixer

    def __call__(self, x: torch.Tensor, step: TorchStep) -> torch.Tensor:
        """May change x."""
        normed = x if self.attention_norm is None else self.attention_norm(x)
        before = x
        x = self._sum(x, self.mixer(normed, step), self.attention_output_norm)
        if not self.is_parallel:
            normed = x if self.mlp_norm is None else self.mlp_norm(x)
        elif self.mlp_norm is not None:
            normed = self.mlp_norm(before)
        return self._sum(x, self.mlp(normed), self.mlp_output_norm)

    def _sum(self, x: torch.Tensor, more: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        if norm is not None:
            more = norm(more)
        return x + more if self.residual_scale == 1.0 else x + more * self.residual_scale


def _norm(weight: Tensor | None, spec: DecoderSpec, bias: Tensor | None = None) -> RMSNorm | None:
    return None if weight is None else _required_norm(weight, spec, bias)


def _required_norm(weight: Tensor, spec: DecoderSpec, bias: Tensor | None) -> RMSNorm:
    own = None if bias is None else to_torch(bias)
    return RMSNorm(to_torch(weight), spec.norm_eps, spec.norm, own)


class Attention:
    """Grouped-query attention with rotary positions over the sequences' cached keys and values."""

    def __init__(
        self, spec: DecoderSpec, layer: int, weights: DecoderLayerWeights, device: torch.device
    ) -> None:
        self.kv_layer = spec.kv_layers()[layer]
        self.num_heads = spec.num_heads
        self.num_rotated = spec.num_heads + spec.num_kv_heads  # queries and keys; values are not rotated
        self.head_dim = spec.head_dim
        self.window = spec.windows[layer]
        self.scales_queries = spec.scales_queries(layer)
        self.scale = spec.attention_scale
        self.has_interleaved_qkv = spec.interleaved_qkv
        self.cap = spec.score_cap
        self.rotary = spec.layer_rotary[layer]
        self.rotate = rotation(interleaved=spec.rotary.interleaved, wide=spec.wide_rotary)
        assert weights.qkv is not None
        assert weights.output is not None
        self.qkv = layer_product(spec, weights.qkv, device)
        self.head_norm: HeadNorm | None = None
        self.has_late_norms = spec.late_head_norms
        queries, keys = _norm(weights.query_norm, spec), _norm(weights.key_norm, spec)
        if queries is not None and keys is not None:
            for norm in (queries, keys):
                norm.weight = norm.weight.to(device)  # one that no checkpoint has is made on the host
            self.head_norm = HeadNorm(queries, keys, spec.num_heads, is_joint=spec.joint_head_norms)
        self.output = layer_product(spec, weights.output, device)
        self.inner_norm = _norm(weights.attention_inner_norm, spec)
        self.sinks = None if weights.sinks is None else to_torch(weights.sinks)

    def __call__(self, x: torch.Tensor, step: TorchStep) -> torch.Tensor:
        heads = self.qkv(x).view(len(x), -1, self.head_dim)  # (T, query + key + value heads, head_dim)
        if self.has_interleaved_qkv:
            heads = heads.view(len(x), -1, 3, self.head_dim).transpose(1, 2).flatten(1, 2)
        rotated = heads[:, : self.num_rotated]
        if self.head_norm is not None and not self.has_late_norms:
            self.head_norm.apply_(rotated)
        if self.rotary is not LayerRotary.NONE:
            self.rotate(rotated, *step.turns[self.rotary])
        if self.head_norm is not None and self.has_late_norms:
            self.head_norm.apply_(rotated)
        step.kv.write(self.kv_layer, step.slots, heads[:, self.num_heads :])
        queries = heads[:, : self.num_heads]
        if self.scales_queries and step.query_scales is not None:
            queries = (queries * step.query_scales).to(queries.dtype)
        attended = paged_attention(
            queries, step.kv, self.kv_layer, step.plans[self.window], self.scale, self.cap, self.sinks
        )
        return self.output(attended if self.inner_norm is None else self.inner_norm(attended))


class ShortConvolution:
    """output(c · convolution(b · x)) of the thirds b, c, x of each row. The pool keeps b · x of all tokens."""

    def __init__(
        self, spec: DecoderSpec, layer: int, weights: DecoderLayerWeights, taps: Tensor, device: torch.device
    ) -> None:
        self.kv_layers = range(*spec.kv_layers()[layer : layer + 2])
        self.shape = (2 * spec.num_kv_heads, spec.head_dim)  # of a token in one of these layers
        assert weights.qkv is not None
        assert weights.output is not None
        self.thirds = product_of(weights.qkv, device)
        self.taps = to_torch(taps)
        self.bias = None if weights.convolution_bias is None else to_torch(weights.convolution_bias)
        self.output = product_of(weights.output, device)

    def __call__(self, x: torch.Tensor, step: TorchStep) -> torch.Tensor:
        b, c, x = self.thirds(x).chunk(3, dim=-1)
        size = len(self.kv_layers) * self.shape[0] * self.shape[1]
        kept = F.pad(b * x, (0, size - x.shape[-1])).view(len(x), len(self.kv_layers), *self.shape)
        for number, kv_layer in enumerate(self.kv_layers):
            step.kv.write(kv_layer, step.slots, kept[:, number])
        rows = [self._convolve(step.kv, span, extent, x.shape[-1]) for span, extent in step.seen]
        return self.output(c * torch.cat(rows))

    def _convolve(self, kv: TorchPool, span: SequenceSpan, extent: Extent, hidden_size: int) -> torch.Tensor:
        """(span.length, hidden_size)"""
        heads = torch.cat([half for kv_layer in self.kv_layers for half in kv.read(kv_layer, extent)])
        seen = heads.transpose(1, 2).reshape(-1, extent.count)[:hidden_size]
        padded = F.pad(seen, (span.length + self.taps.shape[-1] - 1 - extent.count, 0)).unsqueeze(0)
        taps = self.taps.to(seen.dtype)
        bias = None if self.bias is None else self.bias.to(seen.dtype)
        return F.conv1d(padded, taps, bias, groups=hidden_size)[0].T
