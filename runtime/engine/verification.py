"""The verification of proposed tokens: those of the draft while weights arrive (`early.py`), and
those of look-ahead (`look_ahead.py`).

One pass gives the logits after a sequence's last token and after each proposal. The ordinary
sampler chooses from them, position by position, with the sequence's grammar, penalties and random
numbers as they are there: a proposal is confirmed if it is the token that is chosen anyway. The
first other choice is the sequence's token, too, and ends the verification.

This module knows nothing of the origin of proposals, nor of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from ..step.batch import Rows
from ..step.requests import GenerationEvent
from ..step.state import Chosen, SamplingState
from .sequence import Sequence as TokenSequence
from .sequence import accept

Choose = Callable[[Any, Sequence[SamplingState]], list[Chosen]]
"""`Backend.choose`."""


def verify(
    sequence: TokenSequence, rows: Rows, logits: Any, choose: Choose
) -> tuple[list[GenerationEvent], bool]:
    """Append the tokens that follow from `logits`, (rows.num_logits, vocab) as `choose` takes them.
    Returns their events, and whether the proposals are settled: none of them is left to verify.

    `rows` were computed in the sequence's exact lane. Their tokens are the sequence's own, and from
    there on proposals. The lane's computed tokens are then those that both have.
    """
    known, num_before = rows.tokens, sequence.num_tokens
    events, is_settled = _judge(sequence, rows, logits, choose)
    num_agreed = _num_common(known, sequence.tokens, min(num_before, rows.end), rows.end)
    sequence.exact.num_computed = min(num_agreed, sequence.num_tokens - 1)
    return events, is_settled


def _judge(
    sequence: TokenSequence, rows: Rows, logits: Any, choose: Choose
) -> tuple[list[GenerationEvent], bool]:
    known = rows.tokens
    events: list[GenerationEvent] = []
    for number in range(rows.num_logits):
        position = rows.end - rows.num_logits + number
        if position != sequence.num_tokens - 1:
            continue  # more was sent since, or a grammar forced the next token
        proposals = known[position + 1 :]
        (choice,) = choose(logits[number : number + 1], [sequence.sampling])
        event = accept(sequence, choice)
        if not proposals:
            return [*events, event], True
        num_right = _num_common(event.tokens, proposals, 0, len(event.tokens))
        # Tokens that a grammar forces may go beyond the proposals.
        is_right = event.error is None and num_right == len(event.tokens)
        is_settled = not is_right or event.finish_reason is not None
        num_lost = len(proposals) - num_right if is_settled else 0
        events.append(replace(event, num_accepted=num_right, num_rejected=num_lost))
        if is_settled:
            return events, True
    return events, False


def _num_common(left: Sequence[int], right: Sequence[int], start: int, end: int) -> int:
    """The number of equal leading tokens, `end` at most, the first `start` being equal."""
    end = min(end, len(left), len(right))
    while start < end and left[start] == right[start]:
        start += 1
    return start
