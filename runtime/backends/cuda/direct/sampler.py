"""Sampling on the device: from logits to the next tokens, all rows together, one copy each way.

The order and precision are those of `step/sampling.py`; the numbers of the race are Philox's, so that
a device can make each by itself. A sequence's draws do not depend on the other sequences of its batch
(`kernels/choose.cuh`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .....loader.device.driver.base import Driver
from ....errors import GrammarError
from ....step.requests import TokenLogprob
from ....step.sampling import not_finite
from ....step.state import Choice, Chosen, SamplingState
from .arguments import Adjust, Choose, Request, Result, Weighed
from .memory import Array
from .program import Kernels
from .sources import CHOOSE
from .staging import Packer, Room

NONE = 0xFFFFFFFF
PIECE = 4096  # of a race's block, as in the source
_CHOOSE_THREADS, _RACE_THREADS = 1024, 256
_ALIGNMENT_BYTES = 256


class TokenSampler:
    """The sampler of one stream. Not thread-safe."""

    def __init__(self, driver: Driver, kernels: Kernels, stream: int) -> None:
        self._driver = driver
        self._kernels = kernels
        self._stream = stream
        self._asked = Room(driver, stream)
        self._answer = Room(driver, stream)
        # What only the device needs: scores, and what kernels leave each other.
        self._scratch = 0
        self._scratch_bytes = 0
        self._done = driver.event()

    def wait(self) -> None:
        """Wait until all work queued on the stream is done."""
        self._driver.record(self._done, self._stream)
        self._driver.synchronize(self._done)

    def choose(self, logits: Array, states: Sequence[SamplingState]) -> list[Chosen]:
        """Choose tokens like `choose_tokens`, for the first rows of logits (R, vocab) fp32, which are
        not changed. Returns once the device has finished all work queued before. Raises `CudaError`.
        """
        if not states:
            self.wait()
            return []
        asked = _Asked(states, logits.shape[1])
        self._asked.at_least(asked.packer.size_bytes)
        asked.packer.write(self._asked.host)
        self._asked.upload(asked.packer.size_bytes)
        num, max_top = len(states), max(1, asked.max_top)
        result_bytes, top_bytes = num * ctypes.sizeof(Result), 4 * num * max_top
        self._answer.at_least(result_bytes + 2 * top_bytes)
        arguments = self._arguments(logits, asked, max_top, result_bytes, top_bytes)
        self._launch(arguments, asked, num)
        num_bytes = result_bytes + (2 * top_bytes if asked.max_top else 0)
        self._answer.download(num_bytes)
        self.wait()
        host = self._answer.host
        results = (Result * num).from_buffer_copy(host[:result_bytes].tobytes())
        tops = host[result_bytes : result_bytes + 2 * top_bytes].view(np.uint32).reshape(2, num, max_top)
        return [
            asked.errors.get(row) or _choice(results[row], state, tops[:, row])
            for row, state in enumerate(states)
        ]

    def close(self) -> None:
        self._asked.close()
        self._answer.close()
        self._driver.free_event(self._done)
        if self._scratch_bytes:
            self._driver.free(self._scratch)
            self._scratch_bytes = 0

    def _arguments(
        self, logits: Array, asked: _Asked, max_top: int, result_bytes: int, top_bytes: int
    ) -> Choose:
        num, vocab_size = len(asked.states), logits.shape[1]
        num_pieces = -(-vocab_size // PIECE)
        sizes = {
            "scores": 4 * vocab_size * len(asked.adjusted),
            "weighed": num * ctypes.sizeof(Weighed),
            "quotients": 8 * num * num_pieces,
            "winners": 4 * num * num_pieces,
        }
        places: dict[str, int] = {}
        total_bytes = 0
        for name, size_bytes in sizes.items():
            places[name] = total_bytes
            total_bytes += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._take_scratch(total_bytes)
        answer, given = self._answer.address, self._asked.address
        return Choose(
            logits=logits.address,
            requests=given + asked.requests,
            tokens=given + asked.tokens,
            values=given + asked.values,
            words=given + asked.words,
            results=answer,
            top_tokens=answer + result_bytes,
            top_logprobs=answer + result_bytes + top_bytes,
            vocab=vocab_size,
            max_top=max_top,
            **{name: self._scratch + place for name, place in places.items()},
        )

    def _take_scratch(self, size_bytes: int) -> None:
        if size_bytes <= self._scratch_bytes:
            return
        if self._scratch_bytes:
            self._driver.synchronize_stream(self._stream)
            self._scratch_bytes = 0
            self._driver.free(self._scratch)
        self._scratch = self._driver.alloc(size_bytes)
        self._scratch_bytes = size_bytes

    def _launch(self, arguments: Choose, asked: _Asked, num: int) -> None:
        launches = []
        launch = self._kernels.launch
        if asked.adjusted:
            adjust = Adjust(arguments, self._asked.address + asked.rows)
            launches.append(launch(CHOOSE, "adjust", (len(asked.adjusted),), _CHOOSE_THREADS, adjust))
        launches.append(launch(CHOOSE, "weigh", (num,), _CHOOSE_THREADS, arguments))
        if asked.draws:
            num_pieces = -(-arguments.vocab // PIECE)
            launches.append(launch(CHOOSE, "race", (num, num_pieces), _RACE_THREADS, arguments))
        launches.append(launch(CHOOSE, "conclude", (num,), _CHOOSE_THREADS, arguments))
        for each in launches:
            self._driver.launch(each, self._stream)


class _Asked:
    """The choices that a step asks for, packed as the kernels read them. Attributes that are integers are
    offsets in the packed bytes.
    """

    def __init__(self, states: Sequence[SamplingState], vocab_size: int) -> None:
        self.states = states
        self.vocab_size = vocab_size
        self.errors: dict[int, GrammarError] = {}
        self.adjusted: list[int] = []  # rows with bias or penalties
        self.draws = any(state.params.temperature != 0 for state in states)
        self.max_top = max((state.num_top_logprobs or 0 for state in states), default=0)
        self._tokens: list[npt.NDArray[np.uint32]] = []
        self._values: list[npt.NDArray[np.float32]] = []
        self._words: list[npt.NDArray[np.uint32]] = []
        self._num_tokens = self._num_words = 0
        requests = (Request * len(states))(*[self._request(row, state) for row, state in enumerate(states)])
        self.packer = Packer()
        self.requests = self.packer.add(bytes(requests))
        self.rows = self.packer.add(np.array(self.adjusted, np.uint32))
        self.tokens = self.packer.add(_joined(self._tokens, np.uint32))
        self.values = self.packer.add(_joined(self._values, np.float32))
        self.words = self.packer.add(_joined(self._words, np.uint32))

    def _request(self, row: int, state: SamplingState) -> Request:
        params = state.params
        top = state.num_top_logprobs
        request = Request(
            seed=state.seed,
            index=state.num_outputs,
            top_p=min(params.top_p, 1.0),
            temperature=params.temperature,
            log_min_p=math.log(params.min_p) if params.min_p > 0 else -math.inf,
            repetition_penalty=params.repetition_penalty,
            top_k=min(params.top_k, self.vocab_size),
            num_top=NONE if top is None else min(top, self.vocab_size),
            first_word=self._add_mask(row, state),
            scores_row=NONE,
        )
        self._add_lists(row, state, request)
        return request

    def _add_mask(self, row: int, state: SamplingState) -> int:
        try:
            words = state.mask(self.vocab_size)
        except GrammarError as error:
            self.errors[row] = error
            return NONE
        if words is None:
            return NONE
        first = self._num_words
        self._words.append(words)
        self._num_words += len(words)
        return first

    def _add_lists(self, row: int, state: SamplingState, request: Request) -> None:
        params = state.params
        biases: dict[int, float] = {}
        for token, value in params.logit_bias:
            biases[token] = biases.get(token, 0.0) + value
        seen = list(state.seen) if params.repetition_penalty != 1.0 else []
        has_penalties = bool(params.presence_penalty or params.frequency_penalty)
        outputs = list(state.output_counts) if has_penalties else []
        if not (biases or seen or outputs):
            return
        request.scores_row = len(self.adjusted)
        self.adjusted.append(row)
        counts = np.array(list(state.output_counts.values()) if outputs else [], np.float32)
        penalties = np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
        request.bias_begin = self._num_tokens
        request.bias_end = request.bias_begin + len(biases)
        request.repeated_end = request.bias_end + len(seen)
        request.penalised_end = request.repeated_end + len(outputs)
        self._num_tokens = request.penalised_end
        self._tokens.append(np.array([*biases, *seen, *outputs], np.uint32))
        added = np.array([*biases.values(), *[0.0] * len(seen)], np.float32)
        self._values.append(np.concatenate([added, penalties]))


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _choice(result: Result, state: SamplingState, tops: npt.NDArray[np.uint32]) -> Chosen:
    """`tops` (2, max_top): tokens, and the bits of their log probabilities."""
    if not math.isfinite(result.best):
        return not_finite()
    if state.num_top_logprobs is None:
        return Choice(result.token)
    tokens, logprobs = tops[0, : result.num_top], tops[1, : result.num_top].view(np.float32)
    best = tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True))
    return Choice(result.token, TokenLogprob(result.token, result.logprob, best))
