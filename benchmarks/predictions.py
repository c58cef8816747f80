"""A load's predictions about its draft, and the measured times, from a server's timeline. Pure.

Times are in seconds since the load began, which is when it asked for the first byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DECISIONS = ("draft-first", "exact")  # what the decision's mark begins with
ALL_EXACT = "all weights exact"
OUTCOME = "exact from here on"
UNDECIDED = "nothing to decide"  # the draft was switched off, or the load over before there was a rate

Span = Mapping[str, Any]


@dataclass(frozen=True)
class Prediction:
    """`draft_s`, `exact_s`, `token_s` and `num_proposals` are as predicted, None where nothing was decided.

    `draft_came_s` and `exact_came_s` are when all layers had that tier; None for a model of which none ever had. What
    follows is of the passes over the draft, 0 where there were none: `draft_step_s` is what one took in the end.
    """

    decision: str
    rate_mb_s: float | None
    draft_s: float | None
    exact_s: float | None
    token_s: float | None
    num_proposals: int | None
    draft_came_s: float | None
    exact_came_s: float | None
    num_draft_steps: int
    draft_step_s: float
    num_judged: int
    num_accepted: int
    refine_wait_s: float


def is_complete(timeline: Mapping[str, Any]) -> bool:
    """True if the load is over, and with it what the engine did with the draft."""
    spans = timeline["spans"]
    names = {span["name"] for span in spans}
    has_drafted = any(span["lane"] == "draft" for span in spans)
    return ALL_EXACT in names and (OUTCOME in names or not has_drafted)


def of_timeline(timeline: Mapping[str, Any]) -> Prediction:
    """The predictions and times of a complete timeline."""
    spans = timeline["spans"]
    began_s = min((span["start_s"] for span in spans if span["lane"] == "fetch"), default=0.0)
    decided = next((span for span in spans if span["lane"] == "process" and _is_decision(span)), None)
    predicted = _attributes(decided)
    outcome = _attributes(next((span for span in spans if span["name"] == OUTCOME), None))
    rate_bytes_s = predicted.get("rate_bytes_per_s")
    return Prediction(
        decision=decided["name"] if decided else UNDECIDED,
        rate_mb_s=None if rate_bytes_s is None else rate_bytes_s / 1e6,
        draft_s=predicted.get("draft_s"),
        exact_s=predicted.get("exact_s"),
        token_s=predicted.get("token_s"),
        num_proposals=predicted.get("num_proposals"),
        draft_came_s=_complete_s(spans, ("draft", "exact"), began_s),
        exact_came_s=_complete_s(spans, ("exact",), began_s),
        num_draft_steps=outcome.get("num_draft_steps", 0),
        draft_step_s=outcome.get("step_s", 0.0),
        num_judged=outcome.get("num_judged", 0),
        num_accepted=outcome.get("num_accepted", 0),
        refine_wait_s=outcome.get("refine_wait_s", 0.0),
    )


def _is_decision(span: Span) -> bool:
    return span["name"].partition(":")[0] in DECISIONS


def _attributes(span: Span | None) -> Mapping[str, Any]:
    return span.get("attributes", {}) if span else {}


def _complete_s(spans: Iterable[Span], tiers: tuple[str, ...], began_s: float) -> float | None:
    """When the last group had one of these tiers."""
    first_s: dict[str, float] = {}
    for span in spans:
        attributes = _attributes(span)
        if span["lane"] == "ready" and attributes.get("tier") in tiers:
            group = attributes["group"]
            first_s[group] = min(first_s.get(group, span["start_s"]), span["start_s"])
    return max(first_s.values()) - began_s if first_s else None
