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

from dataclasses import dataclass

import torch

from ...loader.format.manifest import Tier
from ..engine.batch import StepBatch
from ..kv.attention import SpanPlan, paged_attention, plan_attention
from ..kv.storage import KVStorage
from ..weights import Weights
from .activations import activation
from .config import DecoderConfig
from .forward_pass import ForwardPass, OnLayer
from .linear import Linear, take_linear, take_stacked
from .norm import HeadRMSNorm, RMSNorm
from .parameters import Parameters, check_computable
from .rope import RopeTable, rotate_


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers share in one forward pass."""

    kv: KVStorage
    slots: torch.Tensor  # (T,) int64
    cos: torch.Tensor  # (T, 1, rotary_dim)
    sin: torch.Tensor
    plans: dict[int | None, tuple[SpanPlan, ...]]  # by sliding window


class Decoder:
    """A model and its weights. One forward pass at a time; the caller sees to it."""

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        """Raises `ModelError` when a tensor is missing or does not fit `config`."""
        root = "" if "embed_tokens.weight" in weights else "model."
        embeddings = weights.tensor(f"{root}embed_tokens.weight")
        check_computable(f"{root}embed_tokens.weight", embeddings)
        self.config = config
        self.num_layers = config.num_layers
        self.dtype = embeddings.dtype

        entry = Parameters(weights, root, self.dtype)
        self.embeddings = entry.take("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.entry_gate = entry.row_gate("embed_tokens.weight")

        self.layers = [
            DecoderLayer(config, index, Parameters(weights, f"{root}layers.{index}.", self.dtype))
            for index in range(config.num_layers)
        ]

        final = Parameters(weights, "", self.dtype)
        self.norm = RMSNorm(final.take_norm(f"{root}norm.weight", config.hidden_size), config.norm_eps)
        head_name = f"{root}embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        self.head = Linear(final.take(head_name, config.vocab_size, config.hidden_size))
        self.head_gate = final.gate()

        self._rope = RopeTable(config.rope, config.max_context, self.dtype)

    def new_kv(self, num_blocks: int, block_size: int) -> KVStorage:
        """Empty storage of the right shape; `num_blocks` times `kv_block_bytes`."""
        config = self.config
        return KVStorage(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self.dtype,
            device=self.embeddings.device,
        )

    def kv_block_bytes(self, block_size: int) -> int:
        config = self.config
        return KVStorage.block_bytes(
            config.num_layers, config.num_kv_heads, config.head_dim, block_size, self.dtype
        )

    @torch.inference_mode()
    def forward(
        self,
        batch: StepBatch,
        kv: KVStorage,
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
        under_way = ForwardPass(self, batch, kv, tier=tier, on_layer=on_layer)
        while not under_way.is_done:
            under_way.advance()
        return under_way.logits

    def begin(self, batch: StepBatch, kv: KVStorage, *, on_layer: OnLayer | None = None) -> ForwardPass:
        """The same step with exact weights, to be taken layer by layer as they come."""
        return ForwardPass(self, batch, kv, on_layer=on_layer)

    def want(self, tokens: torch.Tensor, tier: Tier) -> None:
        """Have what a forward pass over these tokens begins with sent for, up to this tier. Returns at once."""
        self.entry_gate.want(tokens, tier)

    def plan(self, batch: StepBatch, kv: KVStorage) -> Step:
        """What the layers will share in one forward pass. Computes with no weights."""
        cos, sin = self._rope.rows(batch.positions, max(span.context_len for span in batch.spans))
        plans = {
            window: plan_attention(batch.spans, kv, num_heads=self.config.num_heads, window=window)
            for window in set(self.config.windows)
        }
        return Step(kv, batch.slots, cos, sin, plans)


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
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up))


def _take_head_norm(config: DecoderConfig, parameters: Parameters) -> HeadRMSNorm:
    return HeadRMSNorm(
        parameters.take_norm("self_attn.q_norm.weight", config.head_dim),
        parameters.take_norm("self_attn.k_norm.weight", config.head_dim),
        config.num_heads,
        config.norm_eps,
    )
