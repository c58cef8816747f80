"""The members of the early phase: a sequence with its lanes, its rows for an exact pass, and the
events of its drafted tokens. It does not know passes or scheduling.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from ...loader.format.manifest import Tier
from ..step.batch import Epoch, Rows
from ..step.requests import FirstToken, GenerationEvent
from .sequence import Lane
from .sequence import Sequence as TokenSequence


class Member(Struct, eq=False):
    """A sequence in the early phase."""

    sequence: TokenSequence
    first_token: FirstToken
    # Tokens that are or were in some exact pass, or were computed before.
    num_planned: int
    can_draft: bool = True

    @property
    def sends_drafts(self) -> bool:
        return self.first_token.sends_drafts

    @property
    def tier(self) -> Tier:
        """The minimum tier for its draft lane; proposals may come from any weights."""
        return Tier.DRAFT if self.first_token is FirstToken.DRAFT else Tier.SKETCH

    @property
    def draft(self) -> Lane | None:
        return self.sequence.draft

    @property
    def num_known(self) -> int:
        """The number of tokens, proposals included."""
        return self.sequence.num_tokens if self.draft is None else len(self.draft.tokens)

    @property
    def num_pending(self) -> int:
        """The number of tokens not yet in an exact pass."""
        return self.num_known - self.num_planned


def first_token_of(sequence: TokenSequence) -> FirstToken:
    """The request's first token. Answers with a grammar are exact, since forced tokens come with
    chosen ones, and so are those with log probabilities of the prompt.
    """
    request = sequence.generation.request
    is_exact = request.grammar is not None or request.num_prompt_logprobs is not None
    return FirstToken.EXACT if is_exact else request.first_token


def draft_lane(sequence: TokenSequence, *, shares_tokens: bool) -> Lane:
    """The draft lane: shares the sequence's tokens if they are sent at once, otherwise a copy runs
    ahead.
    """
    if shares_tokens:
        tokens, sampling = sequence.tokens, sequence.sampling
    else:
        tokens, sampling = list(sequence.tokens), sequence.sampling.for_draft()
    return Lane(Epoch.DRAFT, tokens, sampling, sequence.adapter, sequence.exact.images)


def lane_of(member: Member) -> Lane:
    assert member.draft is not None
    return member.draft


def exact_rows(member: Member, end: int) -> Rows:
    """The member's next tokens up to `end`; with logits of those after which a token is to be
    chosen.
    """
    sequence = member.sequence
    first = member.num_planned
    tokens = sequence.tokens if member.draft is None else member.draft.tokens
    num_logits = max(0, end - max(first, sequence.num_tokens - 1))
    return Rows(sequence.exact, tokens, first, end, num_logits, sequence.scores)


def drafted(event: GenerationEvent) -> GenerationEvent:
    return replace(event, num_drafted=len(event.tokens))
