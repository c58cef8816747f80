"""Choosing tokens: filters against a plain re-statement of their definitions, distributions by chi-square."""

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process

from teneral.runtime.errors import GrammarError, ModelError, RequestError
from teneral.runtime.step import sampling
from teneral.runtime.step.requests import GenerationRequest, SamplingParams
from teneral.runtime.step.state import SamplingState

VOCAB = 50


@pytest.fixture(autouse=True)
def one_thread():
    """These tensors are tiny: threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def state(*, outputs=(), prompt=(0,), num_top_logprobs=None, **params):
    request = GenerationRequest(
        "r", tuple(prompt), sampling=SamplingParams(**params), num_top_logprobs=num_top_logprobs
    )
    made = SamplingState(request)
    for token in outputs:
        made.add(token)
    return made


def choose_tokens(logits, states):
    """For torch's tensors, which the oracles take."""
    return sampling.choose_tokens(logits.numpy(), states)


def exponentials(seed, index, num):
    return np.concatenate(list(sampling.exponentials(seed, index, num)))


def random_logits(rows=1, seed=0, vocab=VOCAB):
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3


def draw(logits, num_draws, **params):
    """Counts of tokens over many draws from one row (vocab,), each with another seed."""
    rows = logits.expand(num_draws, -1)
    choices = choose_tokens(rows, [state(**params, seed=seed) for seed in range(num_draws)])
    return Counter(choice.token for choice in choices)


def transformers_distribution(logits, **params):
    """(vocab,) probabilities as transformers filters them, in its order."""
    ids = torch.zeros((1, 1), dtype=torch.int64)
    scores = logits.unsqueeze(0)
    if "temperature" in params:
        scores = logits_process.TemperatureLogitsWarper(params["temperature"])(ids, scores)
    if "top_k" in params:
        scores = logits_process.TopKLogitsWarper(params["top_k"])(ids, scores)
    if "top_p" in params:
        scores = logits_process.TopPLogitsWarper(params["top_p"])(ids, scores)
    if "min_p" in params:
        scores = logits_process.MinPLogitsWarper(params["min_p"])(ids, scores)
    return scores.softmax(-1)[0]


def assert_distributed(counts, probabilities):
    """Chi-square at a level of about one in a million; cells with few expected draws are joined."""
    num_draws = sum(counts.values())
    statistic, num_cells, rest_expected, rest_counted = 0.0, 0, 0.0, 0
    for token, probability in enumerate(probabilities.tolist()):
        expected = probability * num_draws
        if probability == 0:
            assert counts[token] == 0, f"token {token} cannot be drawn"
        elif expected < 10:
            rest_expected, rest_counted = rest_expected + expected, rest_counted + counts[token]
        else:
            statistic, num_cells = statistic + (counts[token] - expected) ** 2 / expected, num_cells + 1
    if rest_expected >= 1:
        statistic, num_cells = statistic + (rest_counted - rest_expected) ** 2 / rest_expected, num_cells + 1
    free = max(num_cells - 1, 1)
    # Wilson and Hilferty's approximation of the quantile for z = 4.8
    limit = free * (1 - 2 / (9 * free) + 4.8 * math.sqrt(2 / (9 * free))) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} with {free} degrees of freedom"


def test_greedy_takes_the_best_token_of_each_row():
    logits = random_logits(rows=5)
    choices = choose_tokens(logits, [state(temperature=0)] * 5)
    assert [choice.token for choice in choices] == logits.argmax(-1).tolist()


def test_greedy_is_the_same_in_a_batch_that_also_samples():
    logits = random_logits(rows=3)
    mixed = choose_tokens(logits, [state(temperature=0), state(temperature=1.0), state(temperature=0)])
    assert [mixed[0].token, mixed[2].token] == logits[[0, 2]].argmax(-1).tolist()


def test_the_logits_are_left_as_they_are():
    logits = random_logits()
    before = logits.clone()
    choose_tokens(
        logits,
        [
            state(
                outputs=[1, 2], logit_bias=((3, 5.0),), repetition_penalty=1.5, frequency_penalty=1, top_p=0.5
            )
        ],
    )
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.6},
        {"top_p": 0.95, "temperature": 1.5},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.8},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_are_distributed_as_transformers_filters_them(params):
    logits = random_logits(seed=3)[0]
    assert_distributed(draw(logits, 2_000, **params), transformers_distribution(logits, **params))


@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 0.999999])
@pytest.mark.parametrize(
    "logits",
    [
        torch.linspace(0, 0.01, 2_000),
        torch.linspace(0, 100, 2_000),
        torch.randn(2_000, generator=torch.Generator().manual_seed(0)) * 4,
        torch.zeros(2_000),
    ],
    ids=["flat", "steep", "usual", "equal"],
)
def test_top_p_keeps_the_smallest_set_of_a_large_vocabulary(logits, top_p):
    tokens = set(draw(logits, 100, top_p=top_p))
    probabilities, order = logits.double().softmax(-1).sort(descending=True, stable=True)
    num_kept = int((probabilities.cumsum(0) < top_p - 1e-6).sum()) + 1
    largest = set(order[: num_kept + 2].tolist())
    assert tokens <= largest


def test_top_p_keeps_an_exact_number_of_equal_tokens():
    assert set(draw(torch.zeros(8), 200, top_p=0.5)) == {0, 1, 2, 3}


def test_all_values_equal_to_the_kth_are_kept():
    logits = torch.tensor([1.0, 2.0, 1.0, 0.0, 1.0])
    assert set(draw(logits, 500, top_k=2)) == {0, 1, 2, 4}


def test_top_p_zero_leaves_the_best_token():
    logits = random_logits()[0]
    assert set(draw(logits, 50, top_p=0.0)) == {int(logits.argmax())}


def test_a_temperature_near_zero_is_greedy_and_does_not_overflow():
    logits = random_logits()[0]
    assert set(draw(logits, 50, temperature=1e-30)) == {int(logits.argmax())}


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((VOCAB,), -math.inf)
    logits[[4, 9]] = 0.0
    assert_distributed(draw(logits, 1_000), logits.softmax(-1))


def is_possible(token, logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The filters' definitions, in float64, with room for rounding at a threshold."""
    probabilities = (logits.double() / temperature).softmax(-1)
    if top_k and probabilities[token] < probabilities.topk(min(top_k, VOCAB)).values[-1]:
        return False
    left = probabilities.topk(top_k or VOCAB).values
    better = left[left > probabilities[token]].sum() / left.sum()
    return better <= top_p + 1e-5 and probabilities[token] >= min_p * probabilities.max() * (1 - 1e-5)


filters = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0.1, 4.0),
        "top_k": st.integers(1, VOCAB),
        "top_p": st.floats(0.01, 1.0),
        "min_p": st.floats(0.0, 1.0),
    },
)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), params=filters)
def test_only_what_all_filters_leave_is_drawn(seed, params):
    logits = random_logits(seed=seed)[0]
    assert all(is_possible(token, logits, **params) for token in draw(logits, 20, **params))


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_the_repetition_penalty_is_transformers_over_prompt_and_output(penalty):
    logits = random_logits(seed=8)
    prompt, outputs = [3, 4, 4, 10], [7, 3]
    processor = logits_process.RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([prompt + outputs]), logits.clone())[0]
    (choice,) = choose_tokens(
        logits,
        [
            state(
                temperature=0,
                prompt=prompt,
                outputs=outputs,
                repetition_penalty=penalty,
                num_top_logprobs=20,
            )
        ],
    )
    assert choice.token == int(expected.argmax())
    assert_logprobs(choice.logprob, expected)


def assert_logprobs(logprob, scores):
    expected = scores.log_softmax(-1)
    assert logprob.logprob == pytest.approx(expected[logprob.token].item(), abs=1e-5)
    best = expected.topk(len(logprob.top))
    assert [token for token, _ in logprob.top] == best.indices.tolist()
    assert [value for _, value in logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_presence_and_frequency_penalties_count_the_output_only():
    logits = random_logits(seed=9)
    expected = logits[0].clone()
    expected[7] -= 0.5 + 2 * 0.25
    expected[3] -= 0.5 + 0.25
    made = state(
        temperature=0,
        prompt=[1, 2],
        outputs=[7, 3, 7],
        presence_penalty=0.5,
        frequency_penalty=0.25,
        num_top_logprobs=5,
    )
    assert_logprobs(choose_tokens(logits, [made])[0].logprob, expected)


def test_the_logit_bias_is_added_before_everything_else():
    logits = random_logits(seed=10)
    expected = logits[0].clone()
    expected[5] += 20
    expected[6] -= 100
    made = state(temperature=0, logit_bias=((5, 20.0), (6, -100.0)), num_top_logprobs=3)
    (choice,) = choose_tokens(logits, [made])
    assert choice.token == 5
    assert_logprobs(choice.logprob, expected)


def test_logprobs_do_not_know_the_temperature_or_the_filters():
    logits = random_logits(seed=11)
    (choice,) = choose_tokens(logits, [state(temperature=0.3, top_k=2, seed=1, num_top_logprobs=4)])
    assert len(choice.logprob.top) == 4
    assert_logprobs(choice.logprob, logits[0])


def test_zero_top_logprobs_tell_of_the_chosen_token_alone():
    (choice,) = choose_tokens(random_logits(), [state(seed=0, num_top_logprobs=0)])
    assert choice.logprob.token == choice.token
    assert choice.logprob.top == ()


def test_impossible_tokens_are_not_among_the_top_logprobs():
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 3] = 1.0
    (choice,) = choose_tokens(logits, [state(temperature=0, num_top_logprobs=5)])
    assert choice.logprob.top == ((3, 0.0),)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0}])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_fail_their_row_alone(params, value):
    logits = random_logits(rows=3)
    logits[1, 4] = value
    choices = choose_tokens(logits, [state(**params, seed=1) for _ in range(3)])
    assert isinstance(choices[1], ModelError)
    assert not isinstance(choices[0], ModelError)
    assert not isinstance(choices[2], ModelError)


def test_only_allowed_tokens_are_drawn_with_their_own_proportions():
    logits = random_logits(seed=31)
    allowed = (3, 11, 40)
    counts = draw(logits, 4_000, allowed_tokens=allowed)
    wanted = torch.full((VOCAB,), -math.inf)
    wanted[list(allowed)] = logits[0, list(allowed)]
    assert_distributed(counts, wanted.softmax(-1))


def test_a_bad_word_is_never_completed():
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 9.0
    words = ((7,), (1, 2, 8))
    assert choose_tokens(logits, [state(temperature=0, bad_words=words)])[0].token != 7
    logits[0, 7], logits[0, 8] = 0.0, 9.0
    params = {"temperature": 0, "bad_words": words}
    outputs = [(), (2,), (1, 1, 2), (5, 1, 2), (1, 2, 3)]
    chosen = [choose_tokens(logits, [state(outputs=each, **params)])[0].token for each in outputs]
    assert [token == 8 for token in chosen] == [True, True, False, False, True]


def test_the_prompt_is_no_part_of_a_bad_word():
    logits = torch.zeros(1, VOCAB)
    logits[0, 8] = 9.0
    made = state(prompt=(1, 2), temperature=0, bad_words=((1, 2, 8),))
    assert choose_tokens(logits, [made])[0].token == 8


def test_an_answer_does_not_end_before_its_least_number_of_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 9.0
    request = GenerationRequest("r", (0,), min_tokens=2, sampling=SamplingParams(temperature=0))
    made = SamplingState(request, frozenset({4, 60}))  # one that the model does not have
    chosen = []
    for _ in range(3):
        chosen.append(choose_tokens(logits, [made])[0].token)
        made.add(chosen[-1])
    assert [token == 4 for token in chosen] == [False, False, True]


def test_limits_that_leave_nothing_are_an_error_of_their_own_row():
    made = [state(allowed_tokens=(3,), bad_words=((3,),)), state(temperature=0)]
    error, choice = choose_tokens(random_logits(rows=2), made)
    assert isinstance(error, GrammarError)
    assert error.param == "allowed_token_ids"
    assert not isinstance(choice, ModelError)


def test_a_drafts_copy_goes_on_by_itself():
    made = state(outputs=(1,), temperature=0, bad_words=((1, 2, 8),))
    other = made.for_draft()
    other.add(2)
    logits = torch.zeros(2, VOCAB)
    logits[:, 8] = 9.0
    assert [choice.token == 8 for choice in choose_tokens(logits, [made, other])] == [True, False]


def test_the_same_seed_draws_the_same_alone_or_in_company():
    logits = random_logits(rows=6, seed=12)
    made = [state(seed=seed, top_p=0.9, outputs=range(seed)) for seed in range(6)]
    together = choose_tokens(logits, made)
    alone = [choose_tokens(logits[[row]], [made[row]])[0] for row in range(6)]
    assert together == alone


def test_each_token_of_a_sequence_draws_with_its_own_numbers():
    rows = [exponentials(seed, index, 50) for seed in (1, 2) for index in range(500)]
    assert len({number for row in rows for number in row.tolist()}) == 50_000
    assert min(row.min() for row in rows) > 0


def test_the_numbers_of_one_seed_are_exponential():
    numbers = np.concatenate([exponentials(-7, index, 100) for index in range(100)])
    counts = Counter(int(20 * (1 - math.exp(-number))) for number in numbers.tolist())
    assert_distributed(counts, torch.full((20,), 1 / 20))


@pytest.mark.parametrize("params", [{}, {"top_k": 9_000}, {"top_p": 0.9}, {"min_p": 0.001}])
def test_a_draw_in_parts_is_that_from_the_whole_vocabulary(params):
    logits = random_logits(vocab=20_000)
    noise = np.random.Generator(np.random.SFC64([7, 0])).standard_exponential(20_000)
    probabilities = transformers_distribution(logits[0], **params).double().numpy()
    assert choose_tokens(logits, [state(seed=7, **params)])[0].token == (probabilities / noise).argmax()


@pytest.mark.parametrize(
    "params",
    [{}, {"top_p": 0.95}, {"top_k": 40}, {"min_p": 0.05}, {"temperature": 0, "num_top_logprobs": 5}],
    ids=str,
)
def test_a_choice_allocates_little_more_than_its_scores(params):
    logits = random_logits(vocab=100_000)
    made = state(seed=1, outputs=(3,), **params)
    choose_tokens(logits, [made])
    tracemalloc.start()
    try:
        choose_tokens(logits, [made])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * 4 * logits.numel()


def test_extreme_seeds_are_allowed():
    assert exponentials(-(1 << 63), 0, 1) != exponentials((1 << 63) - 1, 0, 1)


def test_models_that_nearly_agree_nearly_always_draw_the_same():
    exact = random_logits(rows=1, seed=21).softmax(-1)
    other = random_logits(rows=1, seed=22).softmax(-1)
    near = 0.97 * exact + 0.03 * other
    distance = float((exact - near).abs().sum()) / 2
    num_draws, num_equal = 4_000, 0
    for seed in range(num_draws):
        ours, theirs = (choose_tokens(each.log(), [state(seed=seed)])[0].token for each in (exact, near))
        num_equal += ours == theirs
    # The bound for such races, less four standard deviations; common numbers on a line would fall far below it.
    bound = (1 - distance) / (1 + distance)
    assert num_equal / num_draws > bound - 4 * (bound * (1 - bound) / num_draws) ** 0.5


def test_bounds_that_are_whole_numbers_are_written_as_whole_numbers():
    with pytest.raises(RequestError, match=r"to 9,223,372,036,854,775,807$"):
        SamplingParams(seed=1 << 63)
    with pytest.raises(RequestError, match=r"but must be from 0 to 1$"):
        SamplingParams(top_p=2)
