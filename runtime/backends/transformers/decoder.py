"""Decoders computed by transformers, sequence by sequence.

The pool's slots hold tokens instead of keys and values. The engine shares, copies and spills its
blocks like those of any other pool; the library keeps the keys and values, whose caches are found
again by these tokens as long as they fit. Otherwise the sequence is computed again from its first
token.
"""

from __future__ import annotations

import inspect
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

from ...errors import ModelError
from ...kv.storage import Bytes, KVKind
from ...models.executor import ComputeDtype, Floats
from ...step.backend import OnLayer
from ...step.batch import Int64s, SequenceSpan, StepBatch
from ...tensors import DType, reserved

_MOST_TOKENS = 1 << 20
_UNSTATED_TOKENS = 2_048  # of models whose settings name no length
_CACHE_NAMES = ("cache", "past_key_values")  # the former since transformers 5.24
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


@dataclass(frozen=True, slots=True)
class TransformersLimits:
    """The fields of the engine's `DecoderLimits` and `EncoderLimits`."""

    vocab_size: int
    max_context: int
    labels: tuple[str, ...] = ()

    @property
    def max_tokens(self) -> int:
        return self.max_context


def limits_of(settings: Any, labels: tuple[str, ...] = (), *, most: int | None = None) -> TransformersLimits:
    """`settings` is a PretrainedConfig; `most` bounds the tokens further."""
    settings = settings.get_text_config()
    stated = (getattr(settings, key, None) for key in _LENGTH_KEYS)
    length = next((value for value in stated if isinstance(value, int) and value > 0), _UNSTATED_TOKENS)
    offset = 0
    # Its positions begin after the padding's.
    if "roberta" in str(getattr(settings, "model_type", "")):
        offset = int(settings.pad_token_id or 0) + 1
    return TransformersLimits(
        int(settings.vocab_size), min(length - offset, most or _MOST_TOKENS, _MOST_TOKENS), labels
    )


class TokenPool:
    """A `KVPool`."""

    num_kv_heads = 1
    head_dim = 1
    dtype = DType.I64
    element_bytes = 8

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._tokens = reserved((num_blocks, block_size), np.int64)

    @property
    def size_bytes(self) -> int:
        return self._tokens.nbytes

    @property
    def layout(self) -> str:
        return f"tokens[{self.block_size}]"

    def write(self, slots: Int64s, tokens: Int64s) -> None:
        self._tokens.reshape(-1)[slots] = tokens

    def context(self, span: SequenceSpan) -> list[int]:
        """All tokens of the sequence, including those of this step."""
        held: list[int] = self._tokens[list(span.blocks)].reshape(-1)[: span.context_len].tolist()
        return held

    def copy_out(self, blocks: Sequence[int], into: Bytes) -> None:
        into[:] = self._tokens[list(blocks)].view(np.uint8)

    def copy_in(self, blocks: Sequence[int], content: Bytes) -> None:
        self._tokens[list(blocks)] = content.view(np.int64)

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        self._tokens[target, :num_tokens] = self._tokens[source, :num_tokens]


@dataclass(frozen=True, slots=True)
class NamedExecutor:
    """A stand-in for an executor, with its name for logs and metrics."""

    name: str
    numerics: str


class TransformersDecoder:
    """A `DecoderLike`. One forward pass at a time."""

    device = "cpu"

    def __init__(self, module: Any, settings: Any, computes: ComputeDtype) -> None:
        self.config = limits_of(settings)
        self.computes = computes
        self.executor = NamedExecutor("transformers", f"transformers/{transformers.__version__}")
        self._module = module
        takes = inspect.signature(module.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in takes), None)
        self._cuts_logits = "logits_to_keep" in takes
        self._is_stateful = bool(getattr(module, "_is_stateful", False))
        self._token_bytes = _token_bytes(settings, computes.dtype)
        # By the sequence's tokens, oldest first.
        self._past: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self._past_tokens = 0

    @property
    def dtype(self) -> DType:
        return self.computes.dtype

    @property
    def numerics(self) -> str:
        return self.executor.numerics

    def kv_block_bytes(self, block_size: int, *, kind: KVKind = KVKind.MODEL) -> int:
        """The approximate size of transformers' cache for this number of tokens."""
        return block_size * self._token_bytes

    def new_kv(self, num_blocks: int, block_size: int, *, kind: KVKind = KVKind.MODEL) -> TokenPool:
        """Make the pool. Raises `ModelError` for any other kind of keys and values than the
        model's.
        """
        if kind is not KVKind.MODEL:
            raise ModelError(
                "transformers keeps keys and values in the model's dtype", hint="Leave --kv-dtype out."
            )
        return TokenPool(num_blocks, block_size)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, kv: TokenPool, *, on_layer: OnLayer | None = None) -> Floats:
        """Logits (R, vocab) fp32 of the batch's `logit_rows`."""
        started_s = time.monotonic()
        kv.write(batch.slots, batch.tokens)
        out = np.empty((len(batch.logit_rows), self.config.vocab_size), np.float32)
        for span in batch.spans:
            end = span.start + span.length
            wanted = np.flatnonzero((batch.logit_rows >= span.start) & (batch.logit_rows < end))
            rows = batch.logit_rows[wanted] - span.start
            scored = [each for each in batch.scored if span.start <= each.start < end]
            spread = [each.start - span.start + row for each in scored for row in range(each.length)]
            logits = self._logits(span, kv, [*rows.tolist(), *spread])
            out[wanted] = logits[: len(rows)]
            place = len(rows)
            for each in scored:
                each.scores.add(each.position, logits[place : place + each.length])
                place += each.length
        self._forget(kv.num_blocks * kv.block_size)
        if on_layer is not None:
            on_layer(0, "layers", started_s, time.monotonic())
        return out

    def _logits(self, span: SequenceSpan, kv: TokenPool, rows: list[int]) -> Floats:
        """Logits (len(rows), vocab) fp32 of these rows of the span."""
        tokens = kv.context(span)
        known = len(tokens) - span.length
        past = self._past.pop(tuple(tokens[:known]), None)
        if past is not None:
            self._past_tokens -= known
        # Recurrent states continue by one token only; several begin from nothing in some models.
        if past is None or (self._is_stateful and span.length > 1):
            past, known = None, 0
        given: dict[str, Any] = {"input_ids": torch.tensor([tokens[known:]])}
        # The span's first row, among the rows computed now.
        first = len(tokens) - span.length - known
        places = [first + row for row in rows]
        given["use_cache"] = self._cache_name is not None
        if self._cache_name is not None:
            given[self._cache_name] = past
        if self._cuts_logits:
            # Keeping 0 rows means all rows, so keep at least the last one.
            given["logits_to_keep"] = torch.tensor(places or [len(tokens) - known - 1])
        result = self._module(**given)
        kept = None if self._cache_name is None else getattr(result, self._cache_name, None)
        if kept is not None:
            self._past[tuple(tokens)] = kept
            self._past_tokens += len(tokens)
        logits = result.logits[0, : len(places)] if self._cuts_logits else result.logits[0, places]
        found: Floats = logits.float().numpy()
        return found

    def _forget(self, max_tokens: int) -> None:
        """Evict the oldest caches, down to the pool's size in tokens."""
        while self._past_tokens > max_tokens:
            tokens, _ = self._past.popitem(last=False)
            self._past_tokens -= len(tokens)


def _token_bytes(settings: Any, dtype: DType) -> int:
    """The bytes of one token's keys and values in all layers, whose heads may differ (Gemma 4)."""
    settings = settings.get_text_config()
    num_layers = int(settings.num_hidden_layers)
    layers = getattr(settings, "per_layer_config", None) or [settings] * num_layers
    return 2 * sum(map(_kv_width, layers)) * dtype.size_bytes + 8


def _kv_width(layer: Any) -> int:
    heads = getattr(layer, "num_key_value_heads", None)
    head_dim = getattr(layer, "head_dim", None)
    return int(heads * head_dim if heads and head_dim else layer.hidden_size)
