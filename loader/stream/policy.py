"""Which tier comes first: a prediction from the manifest, the link's measured rate and the time that a token takes.

All of the draft first means that a usable model is there early, and that the exact one is complete no later than it
would be group by group: the bytes are the same. What is gained meanwhile is tokens that the draft makes: sent where a
client allowed it, else as proposals that the exact weights confirm in one pass when they are complete. Nothing is
gained when there is no time for them, on a fast link or with a small model, and the passes over the draft would only
take cores from the load. Pure; the load feeds it and does as it says.
"""

from __future__ import annotations

from typing import NamedTuple

from .options import Order

MIN_PROPOSALS = 4  # fewer are not worth the pass over the draft that they begin with
MIN_GAIN_S = 0.15  # before the exact first token, for a draft that is sent

# Of the weights that a token needs, read once for it, by one core or several. An assumption for the first moments:
# engines measure it later. Plain bf16 products on 2 cores were seen at 13 to 25 GB/s, and at 8 to 10 beside a load.
WEIGHT_BYTES_PER_S = 9e9


class Sizes(NamedTuple):
    """Stored bytes that have not arrived, and what the weights take in memory."""

    early_bytes: int  # of all tiers but the last
    refine_bytes: int
    weight_bytes: int


class Prediction(NamedTuple):
    """Times in seconds since the load began."""

    order: Order
    rate_bytes_per_s: float
    draft_s: float  # when the draft is complete
    exact_s: float  # when all is
    token_s: float  # what one token takes
    num_proposals: int  # that the draft can make in between
    why: str


def predict(
    sizes: Sizes, rate_bytes_per_s: float, *, elapsed_s: float, ready_s: float, sends_drafts: bool
) -> Prediction:
    """Decide for a load that has run for `elapsed_s`, on a link that gives it this rate (> 0).

    `ready_s` is when the model will be able to compute, since the load began: libraries are imported until then.
    `sends_drafts` says that clients get tokens of the draft, and not only what exact weights confirmed.
    """
    token_s = sizes.weight_bytes / WEIGHT_BYTES_PER_S
    draft_s = elapsed_s + sizes.early_bytes / rate_bytes_per_s
    exact_s = draft_s + sizes.refine_bytes / rate_bytes_per_s
    # One token's time for the pass over the prompt that the draft needs, and one for the pass that confirms.
    window_s = exact_s - max(draft_s, ready_s) - 2 * token_s
    num_proposals = max(0, int(window_s / token_s)) if token_s else 0
    gain_s = max(exact_s, ready_s) - max(draft_s, ready_s)
    if not sizes.refine_bytes:
        order, why = Order.EXACT, "there is no refine tier, or nothing left of it"
    elif sends_drafts and gain_s >= MIN_GAIN_S:
        order, why = Order.DRAFT_FIRST, f"the draft answers {gain_s:.2f} s sooner"
    elif num_proposals >= MIN_PROPOSALS:
        order, why = Order.DRAFT_FIRST, f"time for {num_proposals} proposals"
    else:
        order, why = Order.EXACT, "the exact weights come too soon after the draft to gain anything"
    return Prediction(order, rate_bytes_per_s, draft_s, exact_s, token_s, num_proposals, why)
