"""The policy for a load's tiers: which of them comes first, decided once the link has shown what it gives.

All of the draft first means that a usable model is there
early, and that the exact one is complete no later than it would be group by group: the bytes are
the same. What is gained meanwhile is tokens that the draft makes: sent where a client allowed it,
else as proposals that the exact weights confirm in one pass when they are complete. Nothing is
gained when there is no time for them, on a fast link or with a small model, and the passes over the
draft would only take cores from the load.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from ..format.manifest import Manifest, Tier
from ..timeline import Timeline
from .accounting import Meter
from .link import MIN_READS
from .options import LoadOptions, Order
from .queue import WorkQueue

if TYPE_CHECKING:
    from ..cache.part_cache import PartCache

MIN_WATCHED_S, MAX_WATCHED_S = 0.2, 1.0  # of a load, before it is decided
MIN_PROPOSALS = 4  # fewer are not worth the pass over the draft that they begin with
NO_REFINE_TIER = "there is no refine tier, or nothing left of it"
MIN_GAIN_S = 0.15  # before the exact first token, for a draft that is sent

# Of the exact weights, whose products a token needs, by one core or several. An assumption for the
# first moments: engines measure it later. Draft steps of the 0.5B shape, while refining bytes
# arrived at 100 and 200 MB/s and were decoded on the same 2 cores, took 39 and 46 ms for 988 MB
# (docs/draft.md: 16th token less first one).
WEIGHT_BYTES_PER_S = 20e9


class Sizes(NamedTuple):
    """Stored bytes that have not arrived, and what the weights take in memory."""

    early_bytes: int  # of all tiers but the last
    refine_bytes: int
    weight_bytes: int


class OrderPrediction(NamedTuple):
    """Times in seconds since the load began."""

    order: Order
    rate_bytes_per_s: float
    draft_s: float  # when the draft is complete
    exact_s: float  # when all is
    token_s: float  # what one token takes
    num_proposals: int  # that the draft can make in between
    why: str


def predict(
    sizes: Sizes,
    rate_bytes_per_s: float,
    *,
    elapsed_s: float,
    ready_s: float,
    sends_drafts: bool,
    decoding_limits: bool = False,
) -> OrderPrediction:
    """Decide for a load that has run for `elapsed_s`, on a link that gives it this rate (> 0).

    `ready_s` is when the model will be able to compute, since the load began: libraries are
    imported until then. `sends_drafts` says that clients get tokens of the draft, and not only what
    exact weights confirmed; `decoding_limits`, that bytes come faster than they are decoded, so
    that computing with the draft would take the cores that the exact weights need.
    """
    token_s = sizes.weight_bytes / WEIGHT_BYTES_PER_S
    draft_s = elapsed_s + sizes.early_bytes / rate_bytes_per_s
    exact_s = draft_s + sizes.refine_bytes / rate_bytes_per_s
    # One token's time for the pass over the prompt that the draft needs, and one for the pass that
    # confirms.
    window_s = exact_s - max(draft_s, ready_s) - 2 * token_s
    num_proposals = max(0, int(window_s / token_s)) if token_s else 0
    gain_s = max(exact_s, ready_s) - max(draft_s, ready_s)
    if not sizes.refine_bytes:
        order, why = Order.EXACT, NO_REFINE_TIER
    elif sends_drafts and gain_s >= MIN_GAIN_S:
        order, why = Order.DRAFT_FIRST, f"the draft answers {gain_s:.2f} s sooner"
    elif decoding_limits:
        order, why = Order.EXACT, "decoding takes longer than the bytes, and a draft would take its cores"
    elif num_proposals >= MIN_PROPOSALS:
        order, why = Order.DRAFT_FIRST, f"time for {num_proposals} proposals"
    else:
        order, why = Order.EXACT, "the exact weights come too soon after the draft to gain anything"
    return OrderPrediction(order, rate_bytes_per_s, draft_s, exact_s, token_s, num_proposals, why)


class OrderChoice:
    """The order of one load: AUTO until it is decided. Thread-safe."""

    def __init__(
        self,
        options: LoadOptions,
        manifest: Manifest,
        work: WorkQueue,
        meter: Meter,
        timeline: Timeline,
    ) -> None:
        self._options, self._manifest = options, manifest
        self._work, self._meter, self._timeline = work, meter, timeline
        self._lock = threading.Lock()
        self.value = options.order
        if self.value is Order.AUTO and all(part.tier is not Tier.REFINE for part in manifest.parts):
            self.value = Order.EXACT
            timeline.mark("process", f"{Order.EXACT}: {NO_REFINE_TIER}", why=NO_REFINE_TIER)

    def settle(self, order: Order) -> None:
        """Go on in this order, whatever was decided; not AUTO."""
        with self._lock:
            self.value = order
        self._work.reorder(order)

    def choose(self, elapsed_s: float, cache: PartCache | None) -> None:
        """Decide, `elapsed_s` after the start, once the link has shown what it gives, or that it gives
        next to nothing.
        """
        if self.value is not Order.AUTO or elapsed_s < MIN_WATCHED_S:
            return
        # How fast the node's cache gave what it had says nothing about what it has not.
        rate = self._work.rate_bytes_per_s
        is_known = rate > 0 and self._meter.num_reads >= MIN_READS
        if not is_known and elapsed_s < MAX_WATCHED_S and not self._is_cached(cache):
            return
        rate = rate or self._meter.fetched_bytes / elapsed_s
        if not rate:
            return  # nothing has come, so there is nothing to decide about yet
        left = self._work.left_bytes()
        prediction = predict(
            Sizes(sum(left[:-1]), left[-1], self._manifest.weight_bytes),
            rate,
            elapsed_s=elapsed_s,
            ready_s=self._options.ready_s,
            sends_drafts=self._options.sends_drafts,
            decoding_limits=self._work.memory_wait_s > elapsed_s / 2,
        )
        with self._lock:
            if self.value is not Order.AUTO:
                return
            self.value = prediction.order
        if prediction.order is Order.EXACT:
            self._work.reorder(Order.EXACT)
        self._timeline.mark("process", f"{prediction.order}: {prediction.why}", **prediction._asdict())

    def _is_cached(self, cache: PartCache | None) -> bool:
        """True if the node's cache has all that is left."""
        return cache is not None and all(
            part.digest is not None and cache.holds(part.digest) for part in self._work.left_parts()
        )
