"""Measures of how well an approximation of a decoder's weights preserves its behaviour, over a
text; and access to the hidden states that enter a decoder's head.

Both models read the same tokens, independent of their own predictions, in independent windows; so
every next token is judged with the same context. Logits exist for a few rows at a time only.
Acceptance is measured by real drafting: the approximation continues greedily from several places,
and the exact model reads the result, as the engine does when it verifies. This module does not know
the source of weights.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ModelError
from ..kv.storage import KVKind
from ..models.decoder import Decoder
from ..step.batch import Int64s
from .sequences import Sequences

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

WINDOW_TOKENS = 512
DRAFTED_TOKENS = 32  # at each place
MAX_PLACES = 64
# Of a model: with less context there is nothing to draft.
MIN_CONTEXT = 8
CONTEXT_TOKENS = 128  # before each place
# Of text, for each place: a short text has fewer places.
_PLACE_TOKENS = 32
_PLACES_AT_ONCE = 8  # bounds the keys and values
# Logits of one model at a time; comparing them takes about 8 times as much memory.
_MAX_SLICE_ELEMENTS = 4 << 20


class RecordingExecutor:
    """A decoder's executor that keeps the normed inputs of its last head: `recorded`, (R, hidden_size) fp32."""

    def __init__(self, decoder: Decoder) -> None:
        self.recorded: Floats
        self._executor = decoder.executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def logits(self, x: Any, rows: Int64s) -> Any:
        """Like `Executor.logits`."""
        self.recorded = self._executor.states(x, rows)
        return self._executor.logits(x, rows)


@contextmanager
def recorded_states(decoder: Decoder) -> Iterator[RecordingExecutor]:
    """Record the decoder's states inside the context. The decoder must have no other users."""
    own = decoder.executor
    recording = decoder.executor = RecordingExecutor(decoder)
    try:
        yield recording
    finally:
        decoder.executor = own


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """The number of drafted tokens that the exact model would have chosen."""

    drafted: int  # tokens at each place
    # At each place: the number of tokens before the first rejected one.
    accepted: tuple[int, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accepted)

    @property
    def mean_error(self) -> float:
        """The mean's standard error; 0 with only one place."""
        spread = statistics.stdev(self.accepted) if len(self.accepted) > 1 else 0.0
        return spread / math.sqrt(len(self.accepted))

    @property
    def whole_share(self) -> float:
        """The share of places at which all drafted tokens were accepted."""
        return self.accepted.count(self.drafted) / len(self.accepted)


@dataclass(frozen=True, slots=True)
class DecoderQuality:
    """The quality of an approximation p' of a model p. Distributions are those of the next token,
    at temperature 1.
    """

    predictions: int  # judged next tokens
    exact_perplexity: float
    perplexity: float
    perplexity_ratio: float  # the approximation's over the exact one's
    perplexity_ratio_error: float  # its standard error, estimated from this text
    # Share of next tokens with the same most likely token.
    agreement: float
    total_variation: float  # mean of ½ Σ |p - p'|
    kl_nats: float  # mean of Σ p log(p / p')
    # Mean over the predictions, between the last hidden states, the head's inputs.
    hidden_cosine: float
    worst_hidden_cosine: float
    accepted: DraftAcceptance
    # Of the exact model drafting for itself.
    exact_accepted: DraftAcceptance


def compare_decoders(
    approximate: Decoder,
    exact: Decoder,
    tokens: Sequence[int],
    *,
    prefix: Sequence[int] = (),
    kv: KVKind = KVKind.MODEL,
) -> DecoderQuality:
    """Run both over `tokens`, at least 2.

    `prefix` is the model's expected start of every text, `kv` the storage format of the
    approximation's keys and values. Raises `ModelError` for a token outside the vocabulary, and for
    logits that are not finite. Memory in addition to the models: a few hundred MiB at most, of
    logits and of keys and values.
    """
    vocab_size = exact.config.vocab_size
    if max(tokens) >= vocab_size:
        raise ModelError(
            f"the tokenizer made token {max(tokens)}, but the model's vocabulary has {vocab_size}",
            hint="Check that the tokenizer and the weights belong to the same model.",
        )
    if exact.config.max_context < MIN_CONTEXT:
        raise ModelError(
            f"the model's context of {exact.config.max_context} tokens is too short to judge a draft in"
        )
    windows = list(cut_windows(tokens, prefix, min(WINDOW_TOKENS, exact.config.max_context)))
    figures = np.concatenate([_judge_window(approximate, exact, window, kv) for window in windows])
    if not np.isfinite(figures).all():
        raise ModelError(
            "the logits of this model are not finite numbers",
            hint="Check the artifact with `teneral verify`: its bytes may be damaged.",
        )
    exact_loss, loss, agrees, variation, divergence, cosine = figures.T
    ratio = math.exp(float((loss - exact_loss).mean()))
    spread = float((loss - exact_loss).std(ddof=1)) if len(figures) > 1 else 0.0
    contexts, drafted = _places(tokens, prefix, exact.config.max_context)
    return DecoderQuality(
        predictions=len(figures),
        exact_perplexity=math.exp(float(exact_loss.mean())),
        perplexity=math.exp(float(loss.mean())),
        perplexity_ratio=ratio,
        perplexity_ratio_error=ratio * spread / math.sqrt(len(figures)),
        agreement=float(agrees.mean()),
        total_variation=float(variation.mean()),
        kl_nats=max(0.0, float(divergence.mean())),  # rounding may make it slightly negative
        hidden_cosine=float(cosine.mean()),
        worst_hidden_cosine=float(cosine.min()),
        accepted=_draft_and_verify(approximate, exact, contexts, drafted, kv),
        # Equal bits in any batch are equal choices: nothing to compute, which halves the time.
        exact_accepted=DraftAcceptance(drafted, (drafted,) * len(contexts))
        if exact.is_batch_invariant
        else _draft_and_verify(exact, exact, contexts, drafted, KVKind.MODEL),
    )


def cut_windows(tokens: Sequence[int], prefix: Sequence[int], window_tokens: int) -> Iterator[list[int]]:
    """The text in pieces, each after the prefix; a rest too short for a prediction is left out."""
    step = window_tokens - len(prefix)
    for begin in range(0, len(tokens), step):
        window = [*prefix, *tokens[begin : begin + step]]
        if len(window) > 1:
            yield window


def _judge_window(approximate: Decoder, exact: Decoder, window: Sequence[int], kv: KVKind) -> Doubles:
    """Measure every next token in the window: (len(window) - 1, 6), the measures of `judge` and the
    cosine of the hidden states.
    """
    inputs, targets = window[:-1], np.array(window[1:])
    num_rows = max(1, _MAX_SLICE_ELEMENTS // exact.config.vocab_size)
    run, exact_run = Sequences(approximate, 1, len(inputs), kv), Sequences(exact, 1, len(inputs))
    figures = []
    with recorded_states(approximate) as recording, recorded_states(exact) as exact_recording:
        for begin in range(0, len(inputs), num_rows):
            rows = inputs[begin : begin + num_rows]
            logits, states = _read(run, recording, rows)
            exact_logits, exact_states = _read(exact_run, exact_recording, rows)
            judged = judge(logits, exact_logits, targets[begin : begin + num_rows])
            figures.append(np.concatenate([judged, _cosines(states, exact_states)[:, None]], axis=1))
    return np.concatenate(figures)


def _read(run: Sequences, recording: RecordingExecutor, tokens: Sequence[int]) -> tuple[Floats, Floats]:
    """Logits (T, vocab_size) and hidden states (T, hidden_size) of these tokens."""
    return run.feed({0: tokens}, num_logits=len(tokens)), recording.recorded


def judge(approximate: Floats, exact: Floats, targets: npt.NDArray[np.int64]) -> Doubles:
    """Logits (R, vocab_size) of both and the next tokens (R,) → (R, 5): the exact loss, the
    approximate one, agreement of the most likely tokens, total variation, divergence.
    """
    (log_p, p), (log_q, q) = _distribution(exact), _distribution(approximate)
    rows = np.arange(len(targets))
    return np.stack(
        [
            -log_p[rows, targets].astype(np.float64),
            -log_q[rows, targets].astype(np.float64),
            (approximate.argmax(-1) == exact.argmax(-1)).astype(np.float64),
            np.abs(p - q).sum(-1, dtype=np.float64) / 2,
            (p * (log_p - log_q)).sum(-1, dtype=np.float64),
        ],
        axis=1,
    )


def _distribution(logits: Floats) -> tuple[Floats, Floats]:
    """The logarithms of the probabilities, and the probabilities."""
    logs = logits - logits.max(-1, keepdims=True)
    powers = np.exp(logs)
    sums = powers.sum(-1, keepdims=True)
    logs -= np.log(sums)
    powers /= sums
    return logs, powers


def _cosines(ours: Floats, theirs: Floats) -> Doubles:
    """(R,), between the rows of both."""
    unit, other = (
        rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True) for rows in (ours, theirs)
    )
    cosines: Doubles = (unit * other).sum(axis=1)
    return cosines


def _places(tokens: Sequence[int], prefix: Sequence[int], max_context: int) -> tuple[list[list[int]], int]:
    """The context of each place where drafting begins, and the number of tokens to draft there."""
    drafted = min(DRAFTED_TOKENS, max_context // 2)
    room = min(CONTEXT_TOKENS, max_context - drafted) - len(prefix)
    num_places = max(1, min(MAX_PLACES, len(tokens) // _PLACE_TOKENS))
    ends = [(place + 1) * len(tokens) // (num_places + 1) for place in range(num_places)]
    return [[*prefix, *tokens[max(0, end - room) : end]] for end in ends], drafted


def _draft_and_verify(
    model: Decoder, exact: Decoder, contexts: Sequence[Sequence[int]], drafted: int, kv: KVKind
) -> DraftAcceptance:
    """Draft with `model` from each context, and verify with `exact`.

    Tokens that end a text are not special here: the tokens after them are compared as well.
    """
    drafts = [
        draft
        for begin in range(0, len(contexts), _PLACES_AT_ONCE)
        for draft in _continue_greedily(model, contexts[begin : begin + _PLACES_AT_ONCE], drafted, kv)
    ]
    run = Sequences(exact, 1, max(map(len, contexts)) + drafted)
    accepted = []
    for context, draft in zip(contexts, drafts, strict=True):
        run.clear()
        chosen = run.feed({0: [*context, *draft[:-1]]}, num_logits=drafted).argmax(-1).tolist()
        wrong = (
            place for place, (ours, theirs) in enumerate(zip(draft, chosen, strict=True)) if ours != theirs
        )
        accepted.append(next(wrong, drafted))
    return DraftAcceptance(drafted, tuple(accepted))


def _continue_greedily(
    model: Decoder, contexts: Sequence[Sequence[int]], count: int, kv: KVKind
) -> list[list[int]]:
    """`count` tokens after each context, all contexts a step."""
    run = Sequences(model, len(contexts), max(map(len, contexts)) + count, kv)
    starts = [run.feed({number: context}, num_logits=1).argmax(-1) for number, context in enumerate(contexts)]
    chosen = [np.concatenate(starts)]
    while len(chosen) < count:
        work = {number: [token] for number, token in enumerate(chosen[-1].tolist())}
        chosen.append(run.feed(work, num_logits=1).argmax(-1))
    drafts: list[list[int]] = np.stack(chosen, axis=1).tolist()  # (contexts, count)
    return drafts
