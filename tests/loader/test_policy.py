"""The choice of the tier that comes first: drafting is chosen where there is time for it, and
nowhere else.
"""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from teneral.loader.load.options import Order
from teneral.loader.load.policy import (
    MIN_GAIN_S,
    MIN_PROPOSALS,
    WEIGHT_BYTES_PER_S,
    OrderPrediction,
    Sizes,
    predict,
)

GB = 1_000_000_000
MODEL = Sizes(
    int(1.3 * GB), int(1.2 * GB), int(3 * GB)
)  # a model of 1.5 billion bf16 weights, nothing of it here

sizes = st.builds(
    Sizes,
    early_bytes=st.integers(0, 200 * GB),
    refine_bytes=st.integers(0, 200 * GB),
    weight_bytes=st.integers(0, 400 * GB),
)
rates = st.floats(1e3, 1e11)
seconds = st.floats(0, 600)


def decided(sizes: Sizes, rate_mb_s: float, *, sends_drafts: bool = False) -> OrderPrediction:
    return predict(sizes, rate_mb_s * 1e6, elapsed_s=0.3, ready_s=2.0, sends_drafts=sends_drafts)


def test_on_a_fast_link_the_exact_weights_come_in_order() -> None:
    prediction = decided(MODEL, 5000)
    assert prediction.order is Order.EXACT
    assert prediction.num_proposals == 0
    assert "too soon" in prediction.why


def test_on_a_slow_link_the_draft_comes_first() -> None:
    prediction = decided(MODEL, 100)
    assert prediction.order is Order.DRAFT_FIRST
    assert prediction.why == f"time for {prediction.num_proposals} proposals"
    assert (round(prediction.draft_s, 6), round(prediction.exact_s, 6)) == (13.3, 25.3)
    assert prediction.num_proposals == int((12 - 2 * prediction.token_s) / prediction.token_s)


def test_where_decoding_is_slower_than_the_link_proposals_do_not_take_its_cores() -> None:
    def of(sends_drafts: bool) -> OrderPrediction:
        return predict(
            MODEL, 1e8, elapsed_s=0.3, ready_s=2.0, sends_drafts=sends_drafts, decoding_limits=True
        )

    assert of(sends_drafts=False).order is Order.EXACT
    assert "decoding" in of(sends_drafts=False).why
    assert of(sends_drafts=True).order is Order.DRAFT_FIRST  # its first token does not wait for the rest


def test_a_model_without_tiers_has_no_draft_to_come_first() -> None:
    for sends_drafts in (False, True):
        prediction = decided(MODEL._replace(refine_bytes=0), 1, sends_drafts=sends_drafts)
        assert prediction.order is Order.EXACT
        assert prediction.why == "there is no refine tier, or nothing left of it"


def test_drafts_that_are_sent_pay_where_proposals_would_not() -> None:
    large = Sizes(10 * GB, 9 * GB, 60 * GB)  # a token takes 6.7 s
    assert decided(large, 600).order is Order.EXACT
    prediction = decided(large, 600, sends_drafts=True)
    assert prediction.order is Order.DRAFT_FIRST
    assert prediction.why == "the draft answers 15.00 s sooner"


def test_a_draft_that_is_there_before_anything_can_use_it_gains_nothing() -> None:
    """Libraries are imported until 2 s; by then all is exact."""
    for sends_drafts in (False, True):
        assert decided(MODEL, 2000, sends_drafts=sends_drafts).order is Order.EXACT


def test_a_model_of_no_size_is_no_error() -> None:
    assert decided(Sizes(0, 0, 0), 100).order is Order.EXACT
    assert decided(Sizes(10, 10, 0), 100, sends_drafts=True).num_proposals == 0


@given(sizes, rates, seconds, seconds, st.booleans())
def test_times_add_up(
    sizes: Sizes, rate_bytes_per_s: float, elapsed_s: float, ready_s: float, sends_drafts: bool
) -> None:
    prediction = predict(
        sizes, rate_bytes_per_s, elapsed_s=elapsed_s, ready_s=ready_s, sends_drafts=sends_drafts
    )
    assert elapsed_s <= prediction.draft_s <= prediction.exact_s
    fetched_bytes = (prediction.exact_s - elapsed_s) * rate_bytes_per_s
    stored_bytes = sizes.early_bytes + sizes.refine_bytes
    assert math.isclose(fetched_bytes, stored_bytes, rel_tol=1e-6, abs_tol=1e-6 * rate_bytes_per_s)
    assert prediction.rate_bytes_per_s == rate_bytes_per_s
    assert prediction.token_s == sizes.weight_bytes / WEIGHT_BYTES_PER_S
    assert prediction.why


def test_a_link_that_leaves_time_for_tokens_as_they_were_measured_has_a_draft() -> None:
    """Of the 0.5B shape: 46 ms a token, with 1.3 s between the draft and the exact weights, and with 0.1 s."""
    half_b = Sizes(455_000_000, 522_000_000, 988_000_000)
    slow, fast, faster = (
        predict(half_b, rate, elapsed_s=0.1, ready_s=0.1, sends_drafts=False) for rate in (4e8, 1e9, 5e9)
    )
    assert 0.04 < slow.token_s < 0.06
    assert (slow.order, fast.order, faster.order) == (Order.DRAFT_FIRST, Order.DRAFT_FIRST, Order.EXACT)
    assert 20 < slow.num_proposals < 30


@given(sizes, rates, seconds, seconds, st.booleans())
def test_the_draft_comes_first_only_for_what_it_gains(
    sizes: Sizes, rate_bytes_per_s: float, elapsed_s: float, ready_s: float, sends_drafts: bool
) -> None:
    prediction = predict(
        sizes, rate_bytes_per_s, elapsed_s=elapsed_s, ready_s=ready_s, sends_drafts=sends_drafts
    )
    begins_s = max(prediction.draft_s, ready_s)
    # All the proposals fit between a pass over the prompt and one that confirms.
    if prediction.num_proposals:
        busy_s = (prediction.num_proposals + 2) * prediction.token_s
        assert begins_s + busy_s <= prediction.exact_s * (1 + 1e-9)
    is_sent_sooner = sends_drafts and max(prediction.exact_s, ready_s) - begins_s >= MIN_GAIN_S
    pays = is_sent_sooner or prediction.num_proposals >= MIN_PROPOSALS
    expected = Order.DRAFT_FIRST if sizes.refine_bytes and pays else Order.EXACT
    assert prediction.order is expected


@given(sizes, rates, seconds, seconds, st.booleans(), st.floats(1.01, 1000))
def test_a_slower_link_never_turns_drafting_off(
    sizes: Sizes,
    rate_bytes_per_s: float,
    elapsed_s: float,
    ready_s: float,
    sends_drafts: bool,
    factor: float,
) -> None:
    fast, slow = (
        predict(sizes, rate, elapsed_s=elapsed_s, ready_s=ready_s, sends_drafts=sends_drafts)
        for rate in (rate_bytes_per_s, rate_bytes_per_s / factor)
    )
    assert slow.num_proposals >= fast.num_proposals - 1  # but for rounding of long times
    if fast.order is Order.DRAFT_FIRST and fast.num_proposals != MIN_PROPOSALS:
        assert slow.order is Order.DRAFT_FIRST


@given(sizes, rates, seconds, seconds)
def test_sending_drafts_never_turns_drafting_off(
    sizes: Sizes, rate_bytes_per_s: float, elapsed_s: float, ready_s: float
) -> None:
    kept, sent = (
        predict(sizes, rate_bytes_per_s, elapsed_s=elapsed_s, ready_s=ready_s, sends_drafts=sends_drafts)
        for sends_drafts in (False, True)
    )
    assert sent.order is Order.DRAFT_FIRST or kept.order is Order.EXACT
