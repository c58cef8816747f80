"""A device draws what the CPU would draw with the same numbers, all rows together, whatever each of them asks for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

pytest.importorskip("hypothesis", reason="machines that only check a device need not have it")

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.reference_kernels import ReferenceKernels, device_exponentials

from teneral.runtime.backends.cuda.sampling import DeviceSampler
from teneral.runtime.errors import GrammarError, ModelError
from teneral.runtime.step import sampling
from teneral.runtime.step.requests import GenerationRequest, SamplingParams
from teneral.runtime.step.state import Choice, SamplingState

VOCAB = 300
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cpu_with_a_devices_numbers(monkeypatch):
    def numbers(seed, index, num):
        return [device_exponentials(seed, index, np.arange(num))]

    monkeypatch.setattr(sampling, "exponentials", numbers)


def state(prompt=(1, 2, 3), outputs=(), num_top_logprobs=None, **params) -> SamplingState:
    request = GenerationRequest(
        "r", tuple(prompt), sampling=SamplingParams(**params), num_top_logprobs=num_top_logprobs
    )
    made = SamplingState(request)
    for token in outputs:
        made.add(token)
    return made


def sampler(narrow: int = 64) -> DeviceSampler:
    return DeviceSampler(CPU, ReferenceKernels(), narrow=narrow)


def logits_like(rows: int, seed: int, *, coarse: bool, width: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn((rows, VOCAB), generator=generator) * width
    return (made * 2).round() / 2 if coarse else made  # coarse ones have many equals, as half precision has


def assert_same(ours: list, expected: list) -> None:
    for mine, theirs in zip(ours, expected, strict=True):
        assert isinstance(mine, Choice)
        assert mine.token == theirs.token
        assert (mine.logprob is None) == (theirs.logprob is None)
        if theirs.logprob is not None:
            assert math.isclose(mine.logprob.logprob, theirs.logprob.logprob, abs_tol=1e-5)
            assert [value for _, value in mine.logprob.top] == pytest.approx(
                [value for _, value in theirs.logprob.top], abs=1e-5
            )


params = st.fixed_dictionaries(
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


@settings(deadline=None, max_examples=200)
@given(
    rows=st.lists(
        st.tuples(
            params,
            st.lists(st.integers(0, VOCAB - 1), max_size=6),
            st.sampled_from([None, None, 0, 3]),
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 10**6),
    coarse=st.booleans(),
)
def test_rows_are_chosen_as_the_cpu_chooses_them_one_by_one(rows, seed, coarse):
    states = [state(outputs=outputs, num_top_logprobs=top, **given) for given, outputs, top in rows]
    logits = logits_like(len(rows), seed, coarse=coarse)
    before = logits.clone()
    ours = sampler().choose(logits, states)
    assert torch.equal(logits, before)
    assert_same(ours, sampling.choose_tokens(logits.cpu().numpy(), states))


def test_who_wants_more_than_the_best_candidates_gets_them_all():
    flat = torch.zeros(2, VOCAB)
    states = [state(top_p=0.99, seed=1), state(top_k=3, seed=2)]
    narrow = sampler(narrow=8)
    ours = narrow.choose(flat, states)
    assert narrow.num_redraws == 2  # of equals the lowest ids are the best: which these are, eight do not say
    assert_same(ours, sampling.choose_tokens(flat.cpu().numpy(), states))
    narrow.choose(logits_like(1, 0, coarse=False, width=20.0), [state(top_p=0.9, top_k=5, seed=3)])
    assert narrow.num_redraws == 2


def test_top_p_is_a_share_of_all_that_equal_the_kth():
    logits = torch.zeros(1, VOCAB)
    logits[0, :3] = torch.tensor([4.0, 3.5, 3.0])
    states = [state(top_k=64, top_p=0.4, seed=seed) for seed in range(40)]
    narrow = sampler(narrow=64)
    ours = narrow.choose(logits.expand(40, -1), states)
    assert_same(ours, sampling.choose_tokens(logits.expand(40, -1).numpy(), states))
    assert narrow.num_redraws == 40


def test_a_redrawn_row_keeps_its_penalties_and_has_its_own_logprobs():
    logits = torch.zeros(2, VOCAB)
    asked = {"top_p": 0.9, "seed": 5, "logit_bias": ((7, 1.0),), "num_top_logprobs": 2}
    states = [state(outputs=(3, 3), frequency_penalty=2.0, **asked), state(temperature=0.0)]
    narrow = sampler(narrow=4)
    ours = narrow.choose(logits, states)
    assert narrow.num_redraws == 1
    assert_same(ours, sampling.choose_tokens(logits.cpu().numpy(), states))
    assert ours[0].logprob.top[0][0] == 7


@pytest.mark.parametrize("drawn", [({"seed": 1}, {"seed": 1, "top_p": 0.5}), ({"temperature": 0.0},) * 2])
def test_a_row_that_is_not_finite_is_an_error_of_its_own(drawn):
    logits = logits_like(4, 0, coarse=False)
    logits[1, 3] = math.nan
    logits[2] = -math.inf
    states = [*(state(**each) for each in drawn), state(temperature=0.0), state(temperature=0.0)]
    ours = sampler().choose(logits, states)
    assert [type(choice) for choice in ours] == [Choice, ModelError, ModelError, Choice]


def test_a_row_whose_form_leaves_no_token_is_an_error_of_its_own():
    allowed = {"allowed_tokens": (3,), "bad_words": ((3,),)}
    states = [state(seed=1, num_top_logprobs=1), state(seed=1, num_top_logprobs=1, **allowed)]
    ours = sampler().choose(logits_like(2, 0, coarse=False), states)
    assert [type(choice) for choice in ours] == [Choice, GrammarError]
    assert ours[0].logprob.token == ours[0].token


def test_no_rows_are_no_choices():
    assert sampler().choose(torch.empty(0, VOCAB), []) == []


def test_plain_greedy_rows_launch_no_kernel_and_take_the_first_of_equals():
    kernels = ReferenceKernels()
    logits = torch.zeros(2, VOCAB)
    logits[1, [9, 30]] = 4.0
    chosen = DeviceSampler(CPU, kernels).choose(logits, [state(temperature=0.0)] * 2)
    assert [choice.token for choice in chosen] == [0, 9]
    assert not kernels.launched


@pytest.mark.parametrize("params", [{}, {"min_p": 0.001}, {"top_k": 1500}])
def test_large_vocabularies_are_raced_in_pieces(params):
    logits = torch.randn((6, 3_500), generator=torch.Generator().manual_seed(1))
    states = [state(temperature=2.0, seed=seed, **params) for seed in range(6)]
    ours = DeviceSampler(CPU, ReferenceKernels()).choose(logits, states)
    assert_same(ours, sampling.choose_tokens(logits.cpu().numpy(), states))
    assert max(choice.token for choice in ours) > 1_024
