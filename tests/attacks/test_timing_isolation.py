"""The time of an answer tells no tenant what another has asked.

An attacker probes with a prompt that it guesses, and looks at how long the first token takes. In each pair of trials
the victim has asked that very prompt just before one probe, and another of the same length before the other one; which
of them comes first is drawn by lot, so whatever else the machine does concerns both alike. All prompts are new, so no
probe finds what an earlier one left.

Only what the engine's thread computes is measured, by that thread's own clock: a noisy machine hides the signal from
the attacker, and must not hide it from the test. The control has the attacker use the victim's salt, where the signal
has to be seen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

import pytest
import torch
from tests.support.engine_rig import TIMEOUT_S, EngineRig
from tests.support.statistics import area_under_curve
from tests.support.toy_decoder import ToyDecoder, ToyPool

from teneral.runtime.step.batch import StepBatch

NUM_PAIRS = 1_000
NUM_CONTROL_PAIRS = 200
PROMPT_TOKENS = 112
VOCAB_SIZE = 4096  # more than there are prompts
BLOCK_SIZE = 16
VICTIM, ATTACKER = "the victim's salt", "the attacker's salt"


class WorkingDecoder(ToyDecoder):
    """Each token costs something, as it does with a real model, and far less."""

    _weights = torch.ones((640, 640))

    def forward(self, batch: StepBatch, kv: ToyPool, **options: object) -> torch.Tensor:
        self.num_rows = len(batch.tokens)
        torch.ones((len(batch.tokens), 640)) @ self._weights
        return super().forward(batch, kv)


@dataclass
class Probe:
    """What an attacker sees of one answer, and what it must not see."""

    time_s: float
    num_cached_tokens: int
    num_computed_tokens: int


class Range:
    """An engine that serves a victim and an attacker."""

    def __init__(self, rig: EngineRig, chance: random.Random) -> None:
        self._rig = rig
        self._chance = chance
        self._last_s = 0.0
        self._first_tokens = iter(range(VOCAB_SIZE))

    def new_prompt(self) -> tuple[int, ...]:
        first = next(self._first_tokens)  # or it might begin, by chance, as one of the attacker's own
        return (first, *(self._chance.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS - 1)))

    def ask(self, prompt: tuple[int, ...], salt: str) -> Probe:
        """The time is the engine's thread's own, from the end of the answer before to this one's first token."""
        clock: SimpleQueue[float] = SimpleQueue()
        generation = self._rig.submit(
            prompt, max_tokens=1, cache_salt=salt, on_event=lambda event: clock.put(time.thread_time())
        )
        now_s = clock.get(timeout=TIMEOUT_S)
        time_s, self._last_s = now_s - self._last_s, now_s
        assert isinstance(self._rig.model, WorkingDecoder)
        return Probe(time_s, generation.num_cached_tokens, self._rig.model.num_rows)

    def trial(self, salt: str, *, victim_asked_it: bool) -> Probe:
        """Both prompts are made in either trial, and the guess is the attacker's own copy, token by token: objects that
        the victim's request has just used would still be in the processor's caches.
        """
        secret, other = self.new_prompt(), self.new_prompt()
        guess = tuple(int(str(token)) for token in secret)
        self.ask(secret if victim_asked_it else other, VICTIM)
        return self.ask(guess, salt)

    def measure(self, salt: str, num_pairs: int) -> tuple[list[Probe], list[Probe]]:
        """Probes after the victim asked the same, and after it asked something else."""
        probes: dict[bool, list[Probe]] = {True: [], False: []}
        for _ in range(num_pairs):
            for asked in self._chance.sample([True, False], 2):
                probes[asked].append(self.trial(salt, victim_asked_it=asked))
        return probes[True], probes[False]


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def shooting_range(seed: int) -> Iterator[Range]:
    with EngineRig(num_blocks=200, model=WorkingDecoder(vocab_size=VOCAB_SIZE), block_size=BLOCK_SIZE) as rig:
        yield Range(rig, random.Random(seed))


def auc(cached: list[Probe], uncached: list[Probe]) -> float:
    """How well "this one took less time" tells that the victim had asked it."""
    return area_under_curve([probe.time_s for probe in uncached], [probe.time_s for probe in cached])


@pytest.mark.slow
def test_under_another_salt_nothing_tells_what_the_victim_asked(one_thread: None) -> None:
    with shooting_range(seed=1) as target:
        cached, uncached = target.measure(ATTACKER, NUM_PAIRS)
        for probe in (*cached, *uncached):
            assert (probe.num_cached_tokens, probe.num_computed_tokens) == (0, PROMPT_TOKENS)
        assert auc(cached, uncached) == pytest.approx(0.5, abs=0.05)


def test_under_the_victims_salt_the_same_measurement_tells(one_thread: None) -> None:
    """The control: this test can see what it is looking for."""
    with shooting_range(seed=2) as target:
        cached, uncached = target.measure(VICTIM, NUM_CONTROL_PAIRS)
        assert {probe.num_cached_tokens for probe in cached} == {PROMPT_TOKENS - 1}
        assert {probe.num_cached_tokens for probe in uncached} == {0}
        assert auc(cached, uncached) > 0.9


@pytest.mark.parametrize(
    ("positives", "negatives", "area"),
    [
        ([2, 3], [0, 1], 1.0),
        ([0, 1], [2, 3], 0.0),
        ([1, 1], [1, 1], 0.5),
        ([1, 3], [2, 2], 0.5),
        ([2, 3], [1, 2], 0.875),
    ],
)
def test_the_area_under_the_curve_counts_pairs(
    positives: list[int], negatives: list[int], area: float
) -> None:
    assert area_under_curve(positives, negatives) == area
