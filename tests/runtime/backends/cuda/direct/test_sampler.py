"""A device draws what the CPU would draw with the same numbers, all rows together, whatever each of them asks for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.direct_kernels import Device, needs_kernels
from tests.support.reference_kernels import device_exponentials

from teneral.runtime.backends.cuda.direct.sampler import TokenSampler
from teneral.runtime.errors import GrammarError, ModelError
from teneral.runtime.step import sampling
from teneral.runtime.step.requests import GenerationRequest, SamplingParams
from teneral.runtime.step.state import Choice, Chosen, SamplingState

VOCAB = 300
pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def cpu_with_a_devices_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers(seed: int, index: int, num: int) -> list[np.ndarray]:
        return [device_exponentials(seed, index, np.arange(num))]

    monkeypatch.setattr(sampling, "exponentials", numbers)


class Rig:
    def __init__(self) -> None:
        self.device = Device()
        self.sampler = TokenSampler(self.device.driver, self.device.kernels, self.device.stream)

    def choose(self, logits: np.ndarray, states: list[SamplingState]) -> list[Chosen]:
        """The logits stay as they are."""
        on_device = self.device.put(logits)
        chosen = self.sampler.choose(on_device, states)
        np.testing.assert_array_equal(self.device.get(on_device), logits)
        return chosen


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.sampler.close()
    made.device.close()


def state(
    prompt: tuple[int, ...] = (1, 2, 3), outputs: Any = (), num_top_logprobs: int | None = None, **params: Any
) -> SamplingState:
    request = GenerationRequest(
        "r", tuple(prompt), sampling=SamplingParams(**params), num_top_logprobs=num_top_logprobs
    )
    made = SamplingState(request)
    for token in outputs:
        made.add(token)
    return made


def logits_like(
    rows: int, seed: int, *, coarse: bool = False, width: float = 2.0, vocab: int = VOCAB
) -> np.ndarray:
    """Coarse ones have many equals, as half precision has."""
    made = np.random.default_rng(seed).standard_normal((rows, vocab)).astype(np.float32) * np.float32(width)
    return (made * 2).round() / 2 if coarse else made


def assert_same(ours: list[Chosen], expected: list[Chosen]) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        assert isinstance(mine, Choice)
        assert isinstance(theirs, Choice)
        assert mine.token == theirs.token
        assert (mine.logprob is None) == (theirs.logprob is None)
        if mine.logprob is not None and theirs.logprob is not None:
            assert math.isclose(mine.logprob.logprob, theirs.logprob.logprob, abs_tol=1e-5)
            assert [token for token, _ in mine.logprob.top] == [token for token, _ in theirs.logprob.top]
            assert [value for _, value in mine.logprob.top] == pytest.approx(
                [value for _, value in theirs.logprob.top], abs=1e-5
            )


PARAMS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.3, 1.0, 3.0]), "seed": st.integers(-(1 << 63), (1 << 63) - 1)},
    optional={
        "top_k": st.sampled_from([1, 2, 7, 64, 65, VOCAB, 10_000]),
        "top_p": st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999]),
        "min_p": st.sampled_from([0.01, 0.2, 1.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.3]),
        "presence_penalty": st.sampled_from([-1.0, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.5]),
        "logit_bias": st.just(((5, 2.0), (6, -100.0), (5, 1.0))),
        "allowed_tokens": st.just(tuple(range(3, 290, 7))),
        "bad_words": st.just(((10,), (3, 17), (4, 5, 24))),
    },
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.tuples(
            PARAMS,
            st.lists(st.integers(0, VOCAB - 1), max_size=6),
            st.sampled_from([None, None, 0, 3]),
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 10**6),
    coarse=st.booleans(),
)
def test_rows_are_chosen_as_the_cpu_chooses_them_one_by_one(
    rig: Rig, rows: Any, seed: int, coarse: bool
) -> None:
    states = [state(outputs=outputs, num_top_logprobs=top, **given) for given, outputs, top in rows]
    logits = logits_like(len(rows), seed, coarse=coarse)
    assert_same(rig.choose(logits, states), sampling.choose_tokens(logits, states))


def test_a_vocabulary_of_several_pieces(rig: Rig) -> None:
    logits = logits_like(3, 1, vocab=9001)
    states = [
        state(temperature=1.0, seed=1),
        state(temperature=0.7, top_k=50, top_p=0.8, seed=2),
        state(temperature=0),
    ]
    assert_same(rig.choose(logits, states), sampling.choose_tokens(logits, states))


def test_of_equals_top_p_keeps_the_lowest_ids_that_it_needs(rig: Rig) -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    drawn = {
        rig.choose(logits, [state(top_p=0.1, temperature=1.0, seed=seed)])[0].token for seed in range(60)
    }  # type: ignore[union-attr]
    assert drawn <= set(range(30))
    assert len(drawn) > 15
    states = [state(top_p=0.99, seed=1, temperature=1.0), state(top_k=3, seed=2, temperature=1.0)]
    flat = np.zeros((2, VOCAB), np.float32)
    assert_same(rig.choose(flat, states), sampling.choose_tokens(flat, states))


def test_top_p_is_a_share_of_all_that_equal_the_kth(rig: Rig) -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :3] = [4.0, 3.5, 3.0]
    for seed in range(20):
        states = [state(top_k=64, top_p=0.4, seed=seed, temperature=1.0)]
        assert_same(rig.choose(logits, states), sampling.choose_tokens(logits, states))


def test_scores_far_apart_and_temperatures_near_zero(rig: Rig) -> None:
    logits = logits_like(4, 3, width=2e4)
    states = [state(temperature=t, top_p=0.9, top_k=20, seed=4) for t in (1e-6, 0.01, 1.0, 100.0)]
    assert_same(rig.choose(logits, states), sampling.choose_tokens(logits, states))


def test_a_rows_draw_does_not_depend_on_its_company(rig: Rig) -> None:
    logits = logits_like(6, 5)
    states = [state(temperature=0.8, top_p=0.9, seed=seed) for seed in range(6)]
    together = rig.choose(logits, states)
    for row in range(6):
        assert rig.choose(logits[row : row + 1], [states[row]]) == [together[row]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error_of_their_row(rig: Rig, bad: float) -> None:
    logits = logits_like(3, 6)
    logits[1, 7] = bad
    for states in ([state(temperature=0)] * 3, [state(temperature=1.0, top_k=3, seed=1)] * 3):
        chosen = rig.choose(logits, states)
        assert isinstance(chosen[1], ModelError)
        expected = sampling.choose_tokens(logits, states)
        assert_same([chosen[0], chosen[2]], [expected[0], expected[2]])


def test_limits_that_leave_nothing_are_an_error_of_their_row(rig: Rig) -> None:
    states = [state(temperature=0, allowed_tokens=(4,), bad_words=((4,),)), state(temperature=0)]
    chosen = rig.choose(logits_like(2, 7), states)
    assert isinstance(chosen[0], GrammarError)
    assert isinstance(chosen[1], Choice)


def test_a_step_without_choices_waits_for_the_device(rig: Rig) -> None:
    numbers = np.zeros(4, np.float32)
    on_device = rig.device.put(np.ones(4, np.float32))
    rig.device.driver.copy_out(numbers.ctypes.data, on_device.address, 16, rig.device.stream)
    assert rig.sampler.choose(on_device, []) == []
    assert numbers.all()


def test_many_rows_and_long_lists_grow_the_rooms(rig: Rig) -> None:
    logits = logits_like(40, 8, vocab=2000)
    prompt = tuple(range(2000))
    states = [state(prompt=prompt, temperature=0.9, repetition_penalty=1.2, seed=row) for row in range(40)]
    assert_same(rig.choose(logits, states), sampling.choose_tokens(logits, states))
