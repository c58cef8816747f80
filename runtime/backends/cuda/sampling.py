"""Sampling on the device: from logits to the next tokens, all rows together, with one small copy to
the host.

The order and precision are those of `step/sampling.py`; only the numbers of the race are generated
differently (`kernels/race.py`), so that a device can make each by itself. A sequence's draws do not
depend on the other sequences of its batch.

Rows with top-k or top-p draw among the NARROW best candidates, which are sorted. A flag for each
row, copied to the host with the tokens, tells whether these included all eligible candidates; the
rare row for which they did not is drawn again among all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import GrammarError
from ...step.requests import TokenLogprob
from ...step.sampling import not_finite
from ...step.state import Choice, Chosen, SamplingState
from .launch import Launcher
from .tables import Downlink, Numbers, Uplink, as_floats, bits
from .variants import PIECE, race_variant

NARROW = 1024


class DeviceSampler:
    """Sampler of one device. Not thread-safe."""

    def __init__(self, device: torch.device, launch: Launcher, *, narrow: int = NARROW) -> None:
        self._uplink = Uplink(device)
        self._downlink = Downlink(device)
        self._launch = launch
        self._narrow = narrow
        self.num_redraws = 0

    def choose(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Chosen]:
        """Choose tokens like `choose_tokens`. Returns once the device has finished all work
        enqueued before.
        """
        if not states:
            self._downlink.wait()
            return []
        if all(state.is_plain_greedy for state in states):
            best, tokens = logits.max(dim=-1)
            answer = self._downlink.fetch(torch.cat([tokens.double(), best.double()])).reshape(2, -1)
            chosen: list[Chosen] = [*map(Choice, answer[0].astype(np.int64).tolist())]
            for row in np.flatnonzero(~np.isfinite(answer[1])).tolist():
                chosen[row] = not_finite()
            return chosen
        choices = self._choose(logits, states, self._narrow)
        again = [number for number, choice in enumerate(choices) if choice is None]
        if again:
            self.num_redraws += len(again)
            redrawn = self._choose(logits[again], [states[number] for number in again], logits.shape[1])
            for number, choice in zip(again, redrawn, strict=True):
                choices[number] = choice
        return [choice for choice in choices if choice is not None]

    def _choose(
        self, logits: torch.Tensor, states: Sequence[SamplingState], width: int
    ) -> list[Chosen | None]:
        """Choose with `width` candidates; None for a row that needs more."""
        scores = self._adjusted(logits, states)
        masks = _Masks.of(states, scores.shape[1])
        legal = masks.applied(scores, self._uplink)
        best, tokens = legal.max(dim=-1)
        is_complete = torch.ones_like(best, dtype=torch.float64)
        drawing = [number for number, state in enumerate(states) if state.params.temperature != 0]
        if drawing:
            self._draw(legal, best, tokens, is_complete, drawing, states, width)
        results = [tokens.double(), best.double(), is_complete]
        asked = [number for number, state in enumerate(states) if state.num_top_logprobs is not None]
        logprobs = _Logprobs.of(scores, tokens, asked, states, self._uplink) if asked else None
        if logprobs is not None:
            results += logprobs.on_device()
        answer = self._downlink.fetch(torch.cat(results))
        chosen, highest, complete = answer[: 3 * len(states)].reshape(3, -1)
        choices: list[Chosen | None] = [*map(Choice, chosen.astype(np.int64).tolist())]
        if logprobs is not None:
            for number, logprob in logprobs.read(answer[3 * len(states) :]).items():
                choices[number] = Choice(int(chosen[number]), logprob)
        for number in np.flatnonzero(complete == 0).tolist():
            choices[number] = None
        for number in np.flatnonzero(~np.isfinite(highest)).tolist():
            choices[number] = not_finite()
        for number, error in masks.errors.items():
            choices[number] = error
        return choices

    # -- bias and penalties ----------------------------------------------------------------------------------

    def _adjusted(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
        """Logits with bias and penalties: a new tensor, unless there are none."""
        biases, repeated, penalised = _Sparse(), _Sparse(), _Sparse()
        for row, state in enumerate(states):
            params = state.params
            for token, value in params.logit_bias:
                biases.add(row, token, value)
            if params.repetition_penalty != 1.0:
                repeated.extend(row, state.seen, [params.repetition_penalty] * len(state.seen))
            if params.presence_penalty or params.frequency_penalty:
                values = [
                    params.presence_penalty + params.frequency_penalty * count
                    for count in state.output_counts.values()
                ]
                penalised.extend(row, state.output_counts, values)
        if not (biases.rows or repeated.rows or penalised.rows):
            return logits
        sent = self._uplink.send([*biases.parts(), *repeated.parts(), *penalised.parts()])
        scores = logits.clone()
        if biases.rows:
            scores.index_put_((sent[0], sent[1]), as_floats(sent[2]).float(), accumulate=True)
        if repeated.rows:
            old, penalty = scores[sent[3], sent[4]], as_floats(sent[5]).float()
            scores[sent[3], sent[4]] = torch.where(old > 0, old / penalty, old * penalty)
        if penalised.rows:
            scores[sent[6], sent[7]] -= as_floats(sent[8]).float()
        return scores

    # -- drawing ---------------------------------------------------------------------------------------------

    def _draw(
        self,
        scores: torch.Tensor,
        best: torch.Tensor,
        tokens: torch.Tensor,
        is_complete: torch.Tensor,
        drawing: Sequence[int],
        states: Sequence[SamplingState],
        width: int,
    ) -> None:
        """Draw for the `drawing` rows: writes tokens, and into `is_complete` whether the candidates
        sufficed.
        """
        vocab_size = scores.shape[1]
        narrow: list[int] = []
        free: list[int] = []
        for number in drawing:
            params = states[number].params
            is_narrow = 0 < params.top_k < vocab_size or params.top_p < 1.0
            (narrow if is_narrow else free).append(number)
        for numbers, is_narrow in ((free, False), (narrow, True)):
            if not numbers:
                continue
            asked = _RowParameters.of(numbers, states, vocab_size, self._uplink)
            relative = (scores[asked.rows] - best[asked.rows, None]) / asked.temperature[:, None]
            if is_narrow:
                drawn, complete = self._draw_narrow(relative, asked, min(width, vocab_size))
                is_complete[asked.rows] = complete.double()
            else:
                relative.masked_fill_(relative < asked.log_min_p[:, None], -math.inf)
                drawn = self._race(relative, None, asked)
            tokens[asked.rows] = drawn

    def _draw_narrow(
        self, relative: torch.Tensor, asked: _RowParameters, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(R,) tokens, and (R,) bool: whether all eligible candidates were among the `width` best."""
        size = relative.shape[1]
        values, ids = relative.topk(width, dim=-1)
        # Ties go to the lowest id, as in a full sort.
        ids, order = ids.sort(dim=-1)
        values, order_by_value = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(1, order_by_value)
        kth = values.gather(1, asked.top_k.clamp(1, width)[:, None] - 1)
        has_k = asked.top_k > 0
        kept = (values >= kth) | ~has_k[:, None]
        mass = values.exp().double() * kept
        total = torch.where(has_k, mass.sum(-1), relative.exp().double().sum(-1))
        before = mass.cumsum(-1) - mass
        # Exactly 0 mass before the first, so that even top_p = 0 keeps one token.
        before[:, 0] = -1.0
        kept &= (before < (asked.top_p * total)[:, None]) | (asked.top_p >= 1.0)[:, None]
        lowest = values.masked_fill(~kept, math.inf).amin(-1)
        # Tokens beyond the candidates score no higher than the last of them. The candidates are
        # therefore complete if the worst kept one scores higher than the last, and, since top-p is
        # a share of it, so does the worst of top-k.
        last = values[:, -1]
        complete = (lowest > last) & (~has_k | (kth.squeeze(1) > last))
        if width == size:
            complete = torch.ones_like(complete)
        kept &= values >= asked.log_min_p[:, None]
        places = self._race(values.masked_fill(~kept, -math.inf), ids, asked)
        return ids.gather(1, places[:, None]).squeeze(1), complete

    def _race(self, scores: torch.Tensor, ids: torch.Tensor | None, asked: _RowParameters) -> torch.Tensor:
        """(R,) the index of the winner in each row of scores (R, size)."""
        num_rows, size = scores.shape
        num_pieces = -(-size // PIECE)
        quotients = scores.new_empty((num_rows, num_pieces), dtype=torch.float64)
        places = asked.seeds.new_empty((num_rows, num_pieces))
        self._launch(
            race_variant(has_tokens=ids is not None),
            (num_rows, num_pieces),
            *(scores.contiguous(), places if ids is None else ids.contiguous(), asked.seeds, asked.indexes),
            *(quotients, places, size),
        )
        return places.gather(1, quotients.argmax(-1, keepdim=True)).squeeze(1)


@dataclass(frozen=True, slots=True)
class _Masks:
    """The tokens that grammars and limits allow, for the rows that have any."""

    rows: list[int]
    words: list[Numbers]  # one array a row: bit t % 64 of word t // 64 is token t's
    # Rows whose grammar exceeded its limits, or which have no token left.
    errors: dict[int, GrammarError]

    @classmethod
    def of(cls, states: Sequence[SamplingState], vocab_size: int) -> _Masks:
        masks = cls([], [], {})
        for row, state in enumerate(states):
            try:
                words = state.mask(vocab_size)
            except GrammarError as error:
                masks.errors[row] = error
                continue
            if words is None:
                continue
            whole = np.zeros(2 * -(-vocab_size // 64), dtype=np.uint32)
            whole[: len(words)] = words
            masks.rows.append(row)
            masks.words.append(whole.view(np.int64))
        return masks

    def applied(self, scores: torch.Tensor, uplink: Uplink) -> torch.Tensor:
        """Scores (R, vocab) with minus infinity for disallowed tokens: a new tensor if there are
        any.
        """
        if not self.rows:
            return scores
        sent = uplink.send([np.array(self.rows, dtype=np.int64), *self.words])
        words = torch.stack(sent[1:])  # (rows, words)
        places = torch.arange(64, device=words.device)
        bits = ((words[:, :, None] >> places) & 1).reshape(len(self.rows), -1)[:, : scores.shape[1]]
        legal = scores.clone()
        legal[sent[0]] = scores[sent[0]].masked_fill(bits == 0, -math.inf)
        return legal


class _Sparse:
    """Values for single tokens of single rows."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._tokens: list[int] = []
        self._values: list[float] = []

    def add(self, row: int, token: int, value: float) -> None:
        self.extend(row, [token], [value])

    def extend(
        self, row: int, tokens: Sequence[int] | dict[int, int] | dict[int, None], values: list[float]
    ) -> None:
        self.rows += [row] * len(values)
        self._tokens += tokens
        self._values += values

    def parts(self) -> list[Numbers]:
        return [np.array(self.rows, np.int64), np.array(self._tokens, np.int64), bits(self._values)]


@dataclass(frozen=True, slots=True)
class _RowParameters:
    """Sampling parameters of some rows, on the device, (R,) each."""

    rows: torch.Tensor  # int64
    seeds: torch.Tensor
    indexes: torch.Tensor
    top_k: torch.Tensor  # int64; 0: all
    top_p: torch.Tensor  # fp64
    temperature: torch.Tensor  # fp32
    log_min_p: torch.Tensor  # fp32; -inf: any

    @classmethod
    def of(
        cls, numbers: Sequence[int], states: Sequence[SamplingState], vocab_size: int, uplink: Uplink
    ) -> _RowParameters:
        own = [states[number] for number in numbers]
        params = [state.params for state in own]
        integers = (
            list(numbers),
            [_signed(state.seed) for state in own],
            [state.num_outputs for state in own],
            [each.top_k if each.top_k < vocab_size else 0 for each in params],
        )
        floats = (
            [each.top_p for each in params],
            [each.temperature for each in params],
            [math.log(each.min_p) if each.min_p > 0 else -math.inf for each in params],
        )
        sent = uplink.send([*(np.array(part, np.int64) for part in integers), *map(bits, floats)])
        top_p, temperature, log_min_p = (as_floats(part) for part in sent[4:])
        rows, seeds, indexes, top_k = sent[:4]
        return cls(rows, seeds, indexes, top_k, top_p, temperature.float(), log_min_p.float())


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log probabilities of the rows that request them, on their way to the host."""

    numbers: Sequence[int]
    num_top: Sequence[int]
    own: torch.Tensor  # (R,) fp32
    values: torch.Tensor  # (R, largest number requested) fp32, with their `tokens`
    tokens: torch.Tensor
    chosen: torch.Tensor  # (R,)

    @classmethod
    def of(
        cls,
        scores: torch.Tensor,
        tokens: torch.Tensor,
        numbers: Sequence[int],
        states: Sequence[SamplingState],
        uplink: Uplink,
    ) -> _Logprobs:
        (rows,) = uplink.send([np.array(numbers, np.int64)])
        logprobs = torch.log_softmax(scores[rows], dim=-1)
        num_top = [min(states[number].num_top_logprobs or 0, scores.shape[1]) for number in numbers]
        chosen = tokens[rows]
        values, found = logprobs.topk(max(num_top), dim=-1)
        return cls(numbers, num_top, logprobs.gather(1, chosen[:, None]).squeeze(1), values, found, chosen)

    def on_device(self) -> list[torch.Tensor]:
        parts = (self.own, self.chosen, self.values.reshape(-1), self.tokens.reshape(-1))
        return [part.double() for part in parts]

    def read(self, answer: np.ndarray) -> dict[int, TokenLogprob]:
        """The log probabilities by row, from the host copy of `on_device`."""
        num = len(self.numbers)
        own, chosen, rest = answer[:num], answer[num : 2 * num], answer[2 * num :]
        values, tokens = rest.reshape(2, num, -1)
        found: dict[int, TokenLogprob] = {}
        for place, number in enumerate(self.numbers):
            pairs = zip(tokens[place, : self.num_top[place]], values[place], strict=False)
            top = tuple((int(token), float(value)) for token, value in pairs if value > -math.inf)
            found[number] = TokenLogprob(int(chosen[place]), float(own[place]), top)
        return found


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
