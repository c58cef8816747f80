"""BERT-type encoders (BERT, RoBERTa, XLM-RoBERTa): texts as tokens in, one embedding a text out.

Texts of about the same length share a padded batch, whose padding is masked away. As with decoders,
building reads no tensor's content, and each layer of a forward pass first waits at its own gate. It knows
no text and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..errors import ContextLengthError, RequestError
from ..weights import Weights
from .activations import activation
from .compute_dtype import ComputeDtype, ComputePolicy
from .config import EncoderConfig
from .expanded import expansion_of
from .linear import take_linear, take_stacked
from .norm import LayerNorm
from .parameters import Parameters, check_computable
from .pooling import pool

MAX_BATCH_TOKENS = 8_192  # of one padded batch: bounds the memory of activations whatever is asked for


class Encoder:
    """A model and its weights. One forward pass at a time; the caller sees to it."""

    def __init__(self, config: EncoderConfig, weights: Weights, policy: ComputePolicy | None = None) -> None:
        """Computes in the dtype that `policy` chooses, or in that of the stored weights. Raises `ModelError` when a
        tensor is missing or does not fit `config`.
        """
        root = _root(weights)
        word_name = f"{root}embeddings.word_embeddings.weight"
        word_embeddings = weights.tensor(word_name)
        check_computable(word_name, word_embeddings)
        self.config = config
        self.num_columns = config.hidden_size  # of what `embed` gives
        stored = word_embeddings.dtype
        if policy is None or word_embeddings.device.type != "cpu":
            self.computes = ComputeDtype.as_stored(stored)
        else:
            self.computes = policy.choose(stored, is_quantised=False)
        self.dtype = self.computes.compute
        expansion = expansion_of(self.computes)

        entry = Parameters(weights, f"{root}embeddings.", stored)
        hidden_size = config.hidden_size
        self._words = entry.take("word_embeddings.weight", config.vocab_size, hidden_size)
        self._positions = entry.take("position_embeddings.weight", config.max_positions, hidden_size)
        self._types = entry.take("token_type_embeddings.weight", config.type_vocab_size, hidden_size)
        self._norm = _take_layer_norm(entry, "LayerNorm", config)
        self._entry_gate = entry.row_gate("word_embeddings.weight")
        self._layers = [
            EncoderLayer(
                config, Parameters(weights, f"{root}encoder.layer.{index}.", stored, expansion=expansion)
            )
            for index in range(config.num_layers)
        ]

    @torch.inference_mode()
    def embed(self, token_lists: Sequence[Sequence[int]]) -> torch.Tensor:
        """One embedding a text, (N, hidden_size) fp32, in the order of the texts.

        Tokens include the special ones. Blocks until the weights are there, layer by layer, and raises the
        load's error if they will not be. Raises `ContextLengthError` or `RequestError` for a text that is
        too long, is empty, or has an unknown token.
        """
        for position, tokens in enumerate(token_lists):
            self._check(tokens, position)
        embeddings = torch.empty((len(token_lists), self.num_columns))
        for batch in batches_by_length([len(tokens) for tokens in token_lists]):
            embeddings[batch] = self._embed_batch([token_lists[index] for index in batch]).cpu()
        return embeddings

    def _embed_batch(self, token_lists: Sequence[Sequence[int]]) -> torch.Tensor:
        lengths = torch.tensor([len(tokens) for tokens in token_lists])
        length = int(lengths.max())
        padded = torch.tensor([[*tokens, *[0] * (length - len(tokens))] for tokens in token_lists])  # (N, L)
        mask = torch.arange(length) < lengths.unsqueeze(1)  # (N, L)
        is_padded = not bool(mask.all())

        self._entry_gate(padded)
        padded, mask = padded.to(self._words.device), mask.to(self._words.device)
        visible = mask[:, None, None, :] if is_padded else None  # the kernel is faster without a mask
        first = self.config.position_offset
        x = F.embedding(padded, self._words).to(self.dtype)
        x = x + self._types[0].to(self.dtype) + self._positions[first : first + length].to(self.dtype)
        x = self._norm(x)  # (N, L, hidden_size)
        for layer in self._layers:
            layer.gate()
            x = layer(x, visible)
        return self._finish(x, mask)

    def _finish(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """states (N, L, hidden_size), mask (N, L) → a row for each text, fp32."""
        pooled = pool(states, mask, self.config.pooling)
        return F.normalize(pooled, dim=-1) if self.config.normalize else pooled

    def _check(self, tokens: Sequence[int], position: int) -> None:
        limit = self.config.max_tokens
        if not tokens:
            raise RequestError(f"input {position} has no tokens", param="input")
        if len(tokens) > limit:
            raise ContextLengthError(
                f"input {position} has {len(tokens)} tokens, but this model takes up to {limit}",
                param="input",
            )
        if min(tokens) < 0 or max(tokens) >= self.config.vocab_size:
            raise RequestError(
                f"input {position} has a token outside the vocabulary of {self.config.vocab_size}",
                param="input",
            )


class EncoderLayer:
    """x = norm(x + attention(x)), then norm(x + mlp(x)). x is (N, L, hidden_size)."""

    def __init__(self, config: EncoderConfig, parameters: Parameters) -> None:
        hidden_size, inner_size = config.hidden_size, config.intermediate_size
        self.num_heads = config.num_heads
        names = [f"attention.self.{part}" for part in ("query", "key", "value")]
        self.qkv = take_stacked(parameters, [(name, hidden_size) for name in names], hidden_size, bias=True)
        self.output = take_linear(parameters, "attention.output.dense", hidden_size, hidden_size, bias=True)
        self.attention_norm = _take_layer_norm(parameters, "attention.output.LayerNorm", config)
        self.up = take_linear(parameters, "intermediate.dense", hidden_size, inner_size, bias=True)
        self.activation = activation(config.activation)
        self.down = take_linear(parameters, "output.dense", inner_size, hidden_size, bias=True)
        self.mlp_norm = _take_layer_norm(parameters, "output.LayerNorm", config)
        self.gate = parameters.gate()

    def __call__(self, x: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        x = self.attention_norm(x + self._attend(x, visible))
        return self.mlp_norm(x + self.down(self.activation(self.up(x))))

    def _attend(self, x: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        """`visible` (N, 1, 1, L) says which keys are no padding; None: all."""
        split = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1)  # (N, L, 3, heads, head_dim)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)  # (N, heads, L, head_dim) each
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible)
        return self.output(attended.transpose(1, 2).flatten(2))


def batches_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the texts in batches of similar length.

    A batch has at most MAX_BATCH_TOKENS tokens, padding included, or is a single text.
    """
    batches: list[list[int]] = []
    # Longest first: the first of a batch is then the length that the others are padded to.
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        batch = batches[-1] if batches else None
        if batch is None or lengths[batch[0]] * (len(batch) + 1) > MAX_BATCH_TOKENS:
            batches.append([index])
        else:
            batch.append(index)
    return batches


def _root(weights: Weights) -> str:
    """What stands before the encoder's own names: nothing, or its name within a model with a head."""
    for root in ("", "bert.", "roberta."):
        if f"{root}embeddings.word_embeddings.weight" in weights:
            return root
    return ""


def _take_layer_norm(parameters: Parameters, name: str, config: EncoderConfig) -> LayerNorm:
    # Checkpoints that were converted from TensorFlow call the two gamma and beta.
    weight, bias = ("gamma", "beta") if f"{name}.gamma" in parameters else ("weight", "bias")
    return LayerNorm(
        parameters.take_norm(f"{name}.{weight}", config.hidden_size),
        parameters.take_norm(f"{name}.{bias}", config.hidden_size),
        config.norm_eps,
    )
