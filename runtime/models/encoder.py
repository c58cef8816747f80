"""Encoders: texts as tokens in, one embedding a text out, or a row of scores.

Texts of about the same length share a batch. As with decoders, building reads no tensor's content, and each layer of a
forward pass first waits at its own gate. A classifier's scores are logits, label by label (`score_functions.py` makes
probabilities of them). A pair of texts, as rerankers take them, is one text whose tokens have types. It knows no text
and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..dtypes import DType
from ..errors import ContextLengthError, RequestError
from .encoder_config import EncoderConfig
from .executor import ComputeDtype, EncoderExecutor, TextBatch
from .matrices import EncoderWeights
from .spec import EncoderSpec

MAX_BATCH_TOKENS = 8_192  # of one batch, as if padded: bounds the memory of activations whatever is asked for


class Encoder:
    """A model and its weights. One forward pass at a time; the caller sees to it."""

    def __init__(
        self,
        config: EncoderConfig,
        spec: EncoderSpec,
        weights: EncoderWeights,
        executor: EncoderExecutor,
        computes: ComputeDtype,
    ) -> None:
        self.config = config
        self.spec = spec
        self.computes = computes
        self.weights = weights
        self.executor = executor
        self.num_columns = spec.num_columns  # of what `embed` gives

    @property
    def dtype(self) -> DType:
        """Of activations."""
        return self.spec.dtype

    @property
    def device(self) -> str:
        return self.weights.device

    def embed(
        self, token_lists: Sequence[Sequence[int]], type_lists: Sequence[Sequence[int] | None] | None = None
    ) -> npt.NDArray[np.float32]:
        """One row a text, (N, num_columns): its embedding, or a classifier's scores, in the order of the texts.

        Tokens include the special ones. `type_lists` has a type for each token of a pair of texts, None for a single
        one; models without a table of types ignore it. Blocks until the weights are there, layer by layer, and raises
        the load's error if they will not be. Raises `ContextLengthError` or `RequestError` for a text that is too long,
        is empty, or has an unknown token or type.
        """
        for position, tokens in enumerate(token_lists):
            self._check(tokens, position)
        type_lists = type_lists or [None] * len(token_lists)
        for position, (tokens, types) in enumerate(zip(token_lists, type_lists, strict=True)):
            self._check_types(tokens, types, position)
        rows = np.empty((len(token_lists), self.num_columns), np.float32)
        for batch in batches_by_length([len(tokens) for tokens in token_lists]):
            rows[batch] = self._embed_batch(
                [token_lists[index] for index in batch], [type_lists[index] for index in batch]
            )
        return rows

    def _embed_batch(
        self, token_lists: Sequence[Sequence[int]], type_lists: Sequence[Sequence[int] | None]
    ) -> npt.NDArray[np.float32]:
        tokens = np.array([token for tokens in token_lists for token in tokens], dtype=np.int64)
        starts = np.zeros(len(token_lists) + 1, dtype=np.int64)
        np.cumsum([len(tokens) for tokens in token_lists], out=starts[1:])
        types: npt.NDArray[np.int64] | None = None
        if any(type_lists):
            types = np.zeros(len(tokens), dtype=np.int64)
            for own, start in zip(type_lists, starts.tolist(), strict=False):
                types[start : start + len(own or ())] = own or ()
        batch, weights, executor = TextBatch(tokens, starts, types), self.weights, self.executor
        weights.entry_gate(tokens)
        x = executor.embed(batch)
        if executor.runs_layers_together and all(layer.gate.opens(0.0) for layer in weights.layers):
            x = executor.layers(batch, 0, len(weights.layers), x)
        else:
            for index, layer in enumerate(weights.layers):
                layer.gate()
                x = executor.layers(batch, index, index + 1, x)
        if weights.head_gate is not None:
            weights.head_gate()
        return executor.finish(batch, x)

    def _check_types(self, tokens: Sequence[int], types: Sequence[int] | None, position: int) -> None:
        if types is None:
            return
        table = self.weights.types
        most = max(types) if table is None else table.array.shape[0] - 1
        if len(types) != len(tokens) or not 0 <= min(types) <= max(types) <= most:
            raise RequestError(
                f"input {position} has a token type that the model does not have", param="input"
            )

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
