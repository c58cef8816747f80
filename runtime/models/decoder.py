"""Decoders of the Llama family: Llama, Mistral, Qwen2 and Qwen3 in one.

They differ in details that `DecoderConfig` states: biases, norms of queries and keys, sliding windows,
rotary variants. Rows of several sequences come back to back, without padding; keys and values live in a
paged `KVStorage`.

Building reads no tensor's content, and neither does a forward pass before it needs it: it begins with those rows of
the embeddings that its tokens have, and each layer first waits at its own gate, so computing follows the weights as
they arrive. It does not know where weights
come from, nor what a request is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...loader.format.manifest import Tier
from ..engine.batch import StepBatch
from ..kv.attention import SpanPlan, paged_attention, plan_attention
from ..kv.int8_storage import Int8KVStorage
from ..kv.kinds import KVKind
from ..kv.storage import KVPool, KVStorage
from ..weights import Weights
from .activations import activation
from .compute_dtype import ComputeDtype, ComputePolicy
from .config import DecoderConfig
from .embeddings import take_embeddings
from .expanded import MIN_COLUMNS, ExpandedLinear, as_columns, expansion_of
from .forward_pass import ForwardPass, OnLayer
from .linear import take_linear, take_stacked
from .norm import HeadRMSNorm, RMSNorm
from .parameters import Parameters, check_computable
from .rope import RopeTable, rotate_

if TYPE_CHECKING:
    from ..cuda.decoder import DeviceKernels, DeviceStep
    from ..cuda.storage import DeviceKVStorage
    from ..kernels.decoder import CompiledStep, DecoderKernels

_STORAGES: dict[KVKind, type[KVStorage] | type[Int8KVStorage]] = {
    KVKind.MODEL: KVStorage,
    KVKind.INT8: Int8KVStorage,
}


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers share in one forward pass."""

    kv: KVPool
    slots: torch.Tensor  # (T,) int64
    cos: torch.Tensor  # (T, 1, rotary_dim)
    sin: torch.Tensor
    plans: dict[int | None, tuple[SpanPlan, ...]]  # by sliding window, for torch's attention
    compiled: CompiledStep | None = None  # computes the layers in torch's place
    on_device: DeviceStep | None = None  # the same, on a CUDA device


class Decoder:
    """A model and its weights. One forward pass at a time; the caller sees to it."""

    def __init__(self, config: DecoderConfig, weights: Weights, policy: ComputePolicy | None = None) -> None:
        """Computes in the dtype that `policy` chooses, or in that of the stored weights. Raises `ModelError` when a
        tensor is missing or does not fit `config`.
        """
        root = "" if "embed_tokens.weight" in weights else "model."
        self.config = config
        self.num_layers = config.num_layers
        self.computes = computes = _choose(config, weights, f"{root}embed_tokens", policy)
        self.dtype = computes.compute
        expansion = expansion_of(computes)

        def parameters(prefix: str) -> Parameters:
            return Parameters(weights, prefix, computes.stored, config.quantization, expansion)

        entry = parameters(root)
        self.embeddings = take_embeddings(
            entry, "embed_tokens", config.vocab_size, config.hidden_size, self.dtype
        )
        self.entry_gate = entry.row_gate("embed_tokens.weight")

        self.layers = [
            DecoderLayer(config, index, parameters(f"{root}layers.{index}."))
            for index in range(config.num_layers)
        ]

        final = parameters("")
        self.norm = RMSNorm(final.take_norm(f"{root}norm.weight", config.hidden_size), config.norm_eps)
        head_name = _head_name(config, weights, f"{root}embed_tokens")
        self.head = take_linear(final, head_name, config.hidden_size, config.vocab_size, bias=False)
        self.head_gate = final.gate()
        # A head that is no integers may be multiplied in more precision than the layers; logits then keep it.
        self._head_dtype = computes.matrices if isinstance(self.head, ExpandedLinear) else computes.compute

        self.rope = RopeTable(config.rope, config.max_context, self.dtype)
        self.kernels: DecoderKernels | None = None  # for a few rows, once somebody has made them
        self.device_kernels: DeviceKernels | None = None  # for all steps on a CUDA device, likewise
        self._changes: deque[Callable[[], None]] = deque()
        self.weights_gate = weights.gate(weights.names())
        self._weights = weights

    @property
    def device(self) -> torch.device:
        """Where the weights are, and so everything that is computed with them."""
        return self.embeddings.device

    @property
    def weight_bytes(self) -> int:
        """Of all tensors that came with the model."""
        return sum(self._weights.tensor(name).nbytes for name in self._weights.names())

    def new_kv(self, num_blocks: int, block_size: int, *, kind: KVKind = KVKind.MODEL) -> KVPool:
        """Empty storage of the right shape; `num_blocks` times `kv_block_bytes`."""
        config = self.config
        return self._storage(kind)(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self.dtype,
            device=self.device,
        )

    def kv_block_bytes(self, block_size: int, *, kind: KVKind = KVKind.MODEL) -> int:
        """The size of one block in what `new_kv` makes."""
        config = self.config
        return self._storage(kind).block_bytes(
            config.num_layers, config.num_kv_heads, config.head_dim, block_size, self.dtype
        )

    def _storage(self, kind: KVKind) -> type[KVStorage] | type[Int8KVStorage] | type[DeviceKVStorage]:
        if kind is KVKind.MODEL and (self.device.type == "cuda" or self.device_kernels is not None):
            from ..cuda.storage import DeviceKVStorage  # nobody else has one

            return DeviceKVStorage
        return _STORAGES[kind]

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,
        kv: KVPool,
        *,
        tier: Tier = Tier.REFINE,
        on_layer: OnLayer | None = None,
    ) -> torch.Tensor:
        """One step: writes the rows' keys and values into `kv`; returns logits (R, vocab_size) fp32.

        Blocks until the weights are there, layer by layer, and raises the load's error if they will not
        be; `kv` then holds the keys and values of the layers that did run. Token ids must be below
        vocab_size. `tier` is the least that the weights must hold: below REFINE each layer is used as it is by then,
        between two refinements.
        """
        under_way = self.begin(batch, kv, tier=tier, on_layer=on_layer)
        while not under_way.is_done:
            under_way.advance()
        return under_way.logits

    def begin(
        self,
        batch: StepBatch,
        kv: KVPool,
        *,
        tier: Tier = Tier.REFINE,
        on_layer: OnLayer | None = None,
    ) -> ForwardPass:
        """The same step, to be taken layer by layer as the weights come."""
        return ForwardPass(self, batch, kv, tier=tier, on_layer=on_layer)

    def between_steps(self, change: Callable[[], None]) -> None:
        """Have this done before the next step begins, by the thread that computes it: a layer is not to be exchanged
        under a step. Any thread may call it; the change must neither take long nor raise.
        """
        self._changes.append(change)

    def make_changes(self) -> None:
        """Do what waits for a moment between steps: for whoever begins one."""
        while self._changes:
            self._changes.popleft()()

    def want(self, tokens: torch.Tensor, tier: Tier) -> None:
        """Have what a forward pass over these tokens begins with sent for, up to this tier. Returns at once."""
        self.entry_gate.want(tokens, tier)

    def plan(self, batch: StepBatch, kv: KVPool) -> Step:
        """What the layers will share in one forward pass. Computes with no weights."""
        cos, sin = self.rope.rows(batch.positions, max(span.context_len for span in batch.spans))
        if self.device_kernels is not None and self.device_kernels.takes(batch, kv):
            on_device = self.device_kernels.begin(batch, kv, cos, sin)
            return Step(kv, batch.slots, cos, sin, {}, on_device=on_device)
        kernels = self.kernels
        if kernels is not None and isinstance(kv, KVStorage) and kernels.takes(batch):
            return Step(kv, batch.slots, cos, sin, {}, kernels.begin(batch, kv, cos, sin))
        return Step(kv, batch.slots, cos, sin, self._plans(batch, kv))

    def _plans(self, batch: StepBatch, kv: KVPool) -> dict[int | None, tuple[SpanPlan, ...]]:
        return {
            window: plan_attention(batch.spans, kv, num_heads=self.config.num_heads, window=window)
            for window in set(self.config.windows)
        }

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """(R, vocab_size) fp32 of what the last layer made of these rows (R, hidden_size)."""
        if self.device_kernels is not None:
            return self.device_kernels.logits(x)
        logits = self.kernels.logits(x) if self.kernels is not None else None
        if logits is not None:
            return logits
        return self.head(self.norm(x).to(self._head_dtype)).float()


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)). x is (T, hidden_size)."""

    def __init__(self, config: DecoderConfig, index: int, parameters: Parameters) -> None:
        self.index = index
        self.name = f"layers.{index}"
        self.attention_norm = RMSNorm(
            parameters.take_norm("input_layernorm.weight", config.hidden_size), config.norm_eps
        )
        self.attention = Attention(config, index, parameters)
        self.mlp_norm = RMSNorm(
            parameters.take_norm("post_attention_layernorm.weight", config.hidden_size), config.norm_eps
        )
        self.mlp = GatedMLP(config, parameters)
        self.gate = parameters.gate()

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """x may be changed."""
        if step.on_device is not None:
            return step.on_device.layer(self.index, x)
        x = x + self.attention(self.attention_norm(x), step)
        return x + self.mlp(self.mlp_norm(x))


class Attention:
    """Grouped-query attention with rotary positions over the sequences' cached keys and values."""

    def __init__(self, config: DecoderConfig, layer: int, parameters: Parameters) -> None:
        self.layer = layer
        self.num_heads = config.num_heads
        self.num_rotated = config.num_heads + config.num_kv_heads  # queries and keys; values are not rotated
        self.head_dim = config.head_dim
        self.window = config.windows[layer]
        self.scale = config.head_dim**-0.5
        query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = take_stacked(
            parameters,
            [
                ("self_attn.q_proj", query_size),
                ("self_attn.k_proj", key_size),
                ("self_attn.v_proj", key_size),
            ],
            config.hidden_size,
            bias=config.qkv_bias,
        )
        self.head_norm = _take_head_norm(config, parameters) if config.qk_norm else None
        self.output = take_linear(
            parameters, "self_attn.o_proj", query_size, config.hidden_size, bias=config.output_bias
        )

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

    def __init__(self, config: DecoderConfig, parameters: Parameters) -> None:
        hidden_size, inner_size = config.hidden_size, config.intermediate_size
        self.gate_up = take_stacked(
            parameters,
            [("mlp.gate_proj", inner_size), ("mlp.up_proj", inner_size)],
            hidden_size,
            bias=config.mlp_bias,
        )
        self.activation = activation(config.activation)
        self.down = take_linear(parameters, "mlp.down_proj", inner_size, hidden_size, bias=config.mlp_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, down = self.gate_up, self.down
        if (
            isinstance(gate_up, ExpandedLinear)
            and isinstance(down, ExpandedLinear)
            and len(x) >= MIN_COLUMNS
            and x.dtype is gate_up.expansion.dtype
        ):
            # What is in between is the largest of all and stays as it comes; only x's size is turned.
            gate, up = gate_up.of_columns(as_columns(x)).chunk(2)
            return down.of_columns(self.activation(gate).mul_(up))[:, : len(x)].t()
        gate, up = gate_up(x).chunk(2, dim=-1)
        return down(self.activation(gate).mul_(up))


def _choose(
    config: DecoderConfig, weights: Weights, embeddings: str, policy: ComputePolicy | None
) -> ComputeDtype:
    stored = _stored_dtype(config, weights, embeddings)
    if policy is None or weights.tensor(f"{embeddings}.weight").device.type != "cpu":
        return ComputeDtype.as_stored(stored)
    return policy.choose(stored, is_quantised=config.quantization is not None)


def _stored_dtype(config: DecoderConfig, weights: Weights, embeddings: str) -> torch.dtype:
    """That of the embeddings; where these are integers, what config.json says."""
    tensor = weights.tensor(f"{embeddings}.weight")
    if f"{embeddings}.weight_scale" in weights:
        dtype: torch.dtype = getattr(torch, config.dtype or "bfloat16")  # a name that was checked
        return dtype
    if tensor.dtype not in (torch.int8, torch.uint8):  # of these a better complaint follows
        check_computable(f"{embeddings}.weight", tensor)
    return tensor.dtype


def _take_head_norm(config: DecoderConfig, parameters: Parameters) -> HeadRMSNorm:
    return HeadRMSNorm(
        parameters.take_norm("self_attn.q_norm.weight", config.head_dim),
        parameters.take_norm("self_attn.k_norm.weight", config.head_dim),
        config.num_heads,
        config.norm_eps,
    )


def _head_name(config: DecoderConfig, weights: Weights, embeddings: str) -> str:
    """The head's matrix. Where a config says "tied" and the checkpoint holds another head, that counts, as it does for
    transformers; with equal bytes it makes no difference.
    """
    if not config.tie_word_embeddings:
        return "lm_head"
    own, shared = "lm_head.weight", f"{embeddings}.weight"
    if own not in weights or shared not in weights:
        return embeddings
    return embeddings if weights.tensor(own).data_ptr() == weights.tensor(shared).data_ptr() else "lm_head"
