"""Decoders that embed or classify: the states of a text's tokens become one embedding, or a row of scores.

A text attends only to its own tokens, earlier ones or all, in keys and values that exist while its batch is computed.
Of the head at most the rows of two tokens are read, whose logits are a score. Layers follow arriving weights as in
generation. It knows no text and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ...loader.format.nibbles import unpack_nibbles
from ..errors import ModelError
from ..step.batch import Int64s, SequenceSpan, StepBatch
from ..tensors import DType, Tensor, to_float32
from ..weights import Gate, Weights
from .decoder import Decoder
from .decoder_config import DecoderConfig
from .encoder import DenseTensors, batches_by_length, check_text, take_dense
from .encoder_config import labels_of
from .executor import ComputeDtype, Executor, Floats
from .fields import Fields
from .matrices import BlockMatrix, DenseMatrix, IntegerMatrix, Matrix, Projection
from .parameters import Parameters
from .pooling import normalize, pooled, through, through_dense
from .pooling_config import CLASSIFIER_TOKENS, ScoreTokens, SentenceConfig, score_tokens_of, sentence_of
from .rope_config import MAX_POSITIONS
from .spec import Pooling

CLASSIFIER = "ForSequenceClassification"
STEP_TOKENS = (
    1_024  # of one pass: bounds activations; keys and values are those of a batch, or of one long text
)
_BLOCK_TOKENS = 16


class PooledDecoderConfig(Struct, frozen=True):
    """A decoder, and how its token states become one embedding or a row of scores."""

    decoder: DecoderConfig
    sentence: SentenceConfig
    labels: tuple[str, ...]  # of a classifier, in the order of its scores; others have none
    pad_token: int | None  # a classifier judges the last token that is another one
    max_tokens: int  # of one text, special tokens included
    score_tokens: ScoreTokens | None = None  # of a classifier whose scores are logits of its head

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @classmethod
    def from_json(
        cls,
        data: Mapping[str, Any],
        *,
        modules: Any = None,
        pooling: Any = None,
        sentence_bert: Any = None,
        logit_score: Any = None,
        dense: Mapping[str, Any] | None = None,
        max_context: int | None = None,
    ) -> PooledDecoderConfig:
        """The arguments are those of `EncoderConfig.from_json`; texts have up to `max_context` tokens. Without a
        modules.json an embedding is the last token's state, at unit length.

        Raises `ModelError` naming the key that is missing, wrong or not supported.
        """
        fields = Fields(data)
        decoder = DecoderConfig.from_json(data).admitting(max_context or 0)
        is_classifier = any(name.endswith(CLASSIFIER) for name in fields.texts("architectures") or ())
        score_tokens = score_tokens_of(
            modules,
            logit_score,
            decoder.vocab_size,
            of_classifier=is_classifier and fields.states(CLASSIFIER_TOKENS),
        )
        if score_tokens is None:  # the head is not needed, and the embeddings stand in for it
            decoder = replace(decoder, tie_word_embeddings=True)
        limits = Fields({} if sentence_bert is None else sentence_bert, file="sentence_bert_config.json")
        stated = limits.optional_integer("max_seq_length", low=1, high=MAX_POSITIONS)
        if modules is None and pooling is None:
            pooling = {"pooling_mode": "lasttoken"}
        of_sentence = modules if score_tokens is None else None
        sentence = sentence_of(of_sentence, pooling, dense or {}, decoder.hidden_size)
        for layer in sentence.dense:
            if layer.activation not in ("", "tanh"):
                raise ModelError(
                    f"{layer.folder}/config.json: the activation {layer.activation} is not supported behind a decoder",
                    hint="Supported: Identity and Tanh.",
                )
        labels = labels_of(fields) if is_classifier else ()
        return cls(
            decoder,
            sentence,
            labels if score_tokens is None else ("LABEL_0",),
            fields.optional_integer("pad_token_id", low=-1, high=decoder.vocab_size),
            min(decoder.max_context, stated or MAX_POSITIONS, max_context or MAX_POSITIONS),
            score_tokens,
        )


class PooledDecoder:
    """A model and its weights. Not thread-safe: the caller runs one forward pass at a time."""

    def __init__(
        self,
        config: PooledDecoderConfig,
        decoder: Decoder,
        weights: Weights,
        dense: DenseTensors | None = None,
    ) -> None:
        """Raises `ModelError` when a tensor of a head or a Dense module is missing or does not fit."""
        self.config = config
        self._decoder = decoder
        self._scores: DenseMatrix | None = None
        self._scores_gate: Gate | None = None
        self._score_rows: DenseMatrix | None = None  # once they are there
        self._dense = tuple(take_dense(layer, dense or {}) for layer in config.sentence.dense)
        if config.score_tokens is not None:
            _check_head(decoder.weights.head)
        elif config.labels:
            own = Parameters(weights, "")
            self._scores = DenseMatrix(
                own.take("score.weight", len(config.labels), config.decoder.hidden_size), None
            )
            self._scores_gate = own.gate()
        dense_size = (
            config.sentence.dense[-1].num_out if config.sentence.dense else config.decoder.hidden_size
        )
        self.num_columns = len(config.labels) or dense_size  # of the result of `embed`

    @property
    def computes(self) -> ComputeDtype:
        return self._decoder.computes

    @property
    def dtype(self) -> DType:
        """Of activations."""
        return self._decoder.dtype

    @property
    def device(self) -> str:
        return self._decoder.device

    @property
    def executor(self) -> Executor:
        return self._decoder.executor

    @property
    def routes_apart(self) -> bool:
        """True if no stage reads all experts of a layer."""
        return self._decoder.routes_apart

    def embed(
        self, token_lists: Sequence[Sequence[int]], type_lists: Sequence[Sequence[int] | None] | None = None
    ) -> Floats:
        """One row for each text, (N, num_columns) fp32: its embedding, or a classifier's scores. As
        `Encoder.embed`; there are no types.
        """
        for position, tokens in enumerate(token_lists):
            check_text(tokens, position, max_tokens=self.config.max_tokens, vocab_size=self.config.vocab_size)
        rows = np.empty((len(token_lists), self.num_columns), np.float32)
        for batch in batches_by_length([len(tokens) for tokens in token_lists], STEP_TOKENS):
            rows[batch] = self._rows_of([token_lists[index] for index in batch])
        return rows

    def _rows_of(self, texts: Sequence[Sequence[int]]) -> Floats:
        sentence = self.config.sentence
        if self.config.score_tokens is not None:
            # What follows the last token is scored, also if that one pads.
            return self._scored(
                self._states(texts, [[len(tokens) - 1] for tokens in texts]), self.config.score_tokens
            )
        if self._scores is not None and self._scores_gate is not None:
            states = self._states(texts, [[self._last(tokens)] for tokens in texts])
            self._scores_gate()
            return through(self._scores, states)
        mode = Pooling(sentence.pooling)
        if mode is Pooling.LAST:
            rows = self._states(texts, [[len(tokens) - 1] for tokens in texts])
        else:
            starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
            rows = pooled(
                self._states(texts, [range(len(tokens)) for tokens in texts]), starts, mode, DType.F32
            )
        rows = through_dense(self._dense, [layer.activation for layer in sentence.dense], rows)
        if sentence.normalize:
            normalize(rows)
        return rows

    def _scored(self, states: Floats, tokens: ScoreTokens) -> Floats:
        """(N, 1): the logit of the true token, less that of the false one. `states` exist, so the head does."""
        if self._score_rows is None:
            wanted = [tokens.true] if tokens.false is None else [tokens.true, tokens.false]
            self._score_rows = _rows_of_head(self._decoder.weights.head.matrices()[0], wanted)
        logits = through(self._score_rows, states) * np.float32(self.config.decoder.logits_scale)
        if (cap := self.config.decoder.logit_cap) is not None:
            logits = np.float32(cap) * np.tanh(logits / np.float32(cap))
        scores: Floats = logits[:, :1] - logits[:, 1:] if tokens.false is not None else logits
        return scores

    def _last(self, tokens: Sequence[int]) -> int:
        """The last token that is no padding, as transformers finds it."""
        others = (at for at in range(len(tokens) - 1, -1, -1) if tokens[at] != self.config.pad_token)
        return next(others, 0)

    def _states(self, texts: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> Floats:
        """(R, hidden_size): the normed states of the wanted positions, ascending, of one text after the other. Several
        texts have up to `STEP_TOKENS` together.
        """
        num_blocks = [-(-len(tokens) // _BLOCK_TOKENS) for tokens in texts]
        first_blocks = np.cumsum([0, *num_blocks]).tolist()
        longest = max(map(len, texts))
        # Where tokens see later ones, too, a text is one pass.
        step_tokens = longest if self.config.decoder.is_bidirectional else STEP_TOKENS
        kv = self._decoder.new_kv(first_blocks[-1], _BLOCK_TOKENS)
        states = []
        for begin in range(0, longest, step_tokens):
            batch = _batch_of(texts, begin, step_tokens, first_blocks)
            rows = [
                span.start + position - begin
                for span, positions in zip(batch.spans, wanted, strict=True)
                for position in positions
                if begin <= position < begin + span.length
            ]
            states.append(self._pass(batch, kv, np.array(rows, np.int64)))
        return np.concatenate(states)

    def _pass(self, batch: StepBatch, kv: Any, rows: Int64s) -> Floats:
        under_way = self._decoder.begin(batch, kv)
        while not under_way.is_at_head:
            under_way.advance()
        return under_way.states(rows)


def _batch_of(
    texts: Sequence[Sequence[int]], begin: int, step_tokens: int, first_blocks: Sequence[int]
) -> StepBatch:
    """The next `step_tokens` of each text from position `begin` on; text i has blocks from first_blocks[i] on."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[SequenceSpan] = []
    for number, text in enumerate(texts):
        end = min(len(text), begin + step_tokens)
        block = first_blocks[number]
        blocks = tuple(range(block, block - (-end // _BLOCK_TOKENS)))
        spans.append(SequenceSpan(len(tokens), end - begin, end, blocks))
        tokens += text[begin:end]
        positions += range(begin, end)
        slots += range(block * _BLOCK_TOKENS + begin, block * _BLOCK_TOKENS + end)
    split = np.array([tokens, positions, slots], np.int64)
    return StepBatch(split[0], split[1], split[2], tuple(spans), np.empty(0, np.int64))


def _check_head(head: Projection) -> None:
    """Raise `ModelError` if `_rows_of_head` does not read the head."""
    if not head.is_settled or not isinstance(head.matrices()[0], DenseMatrix | IntegerMatrix | BlockMatrix):
        raise ModelError(
            "the scores are logits of tokens (LogitScore, or classifier_from_token), which are not made of a head in "
            "this number format",
            hint="Use a model whose lm_head is not quantised.",
        )


def _rows_of_head(matrix: Matrix, rows: Sequence[int]) -> DenseMatrix:
    """These rows of the head in fp32, with their biases."""
    bias = None if matrix.bias is None else to_float32(matrix.bias.on_host(), matrix.bias.dtype)[rows]
    stored = matrix.weight.on_host()[rows]
    weight: Floats
    if isinstance(matrix, BlockMatrix):
        weight = matrix.block.to_floats(stored.reshape(-1, matrix.block.block_bytes)).reshape(len(rows), -1)
    elif isinstance(matrix, IntegerMatrix):
        zero = None if matrix.zero is None else matrix.zero.on_host()[rows].astype(np.float32)[:, :, None]
        levels = (unpack_nibbles(stored) if matrix.bits == 4 else stored).astype(np.float32)
        scale = to_float32(matrix.scale.on_host()[rows], matrix.scale.dtype)[:, :, None]
        groups = levels.reshape(len(rows), -1, matrix.group_size)
        weight = ((groups - (zero if zero is not None else 8 * (matrix.bits == 4))) * scale).reshape(
            len(rows), -1
        )
    else:
        weight = to_float32(stored, matrix.weight.dtype)
    return DenseMatrix(Tensor(DType.F32, weight), None if bias is None else Tensor(DType.F32, bias))
