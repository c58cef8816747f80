"""How a response tells of tokens that were drafted, and of proposals that the exact weights judged.

Invariant: the numbers in a stream's chunks add up to those of its usage, because a drafted token whose text is still
held back is told of with the next chunk of its choice. Why a token was drafted is the engine's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from ...runtime.step.requests import FirstToken, GenerationEvent
from .responses import ChunkExtras, CompletionTokensDetails, PromptTokensDetails, Usage

DRAFTED_TOKENS_HEADER = "Teneral-Drafted-Tokens"


@dataclass(slots=True)
class Tally:
    """Tokens of a request, of all its sequences together, as they add up."""

    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_cached: int = 0  # of the prompts, each counted once

    def add(self, event: GenerationEvent) -> None:
        self.num_tokens += len(event.tokens)
        self.num_drafted += event.num_drafted
        self.num_accepted += event.num_accepted
        self.num_rejected += event.num_rejected

    def usage(self, num_prompt_tokens: int, first_token: FirstToken) -> Usage:
        """With the details where the request allowed drafts, so that a 0 says that there were none, and where there is
        something to tell; else as OpenAI's servers have it.
        """
        told = first_token.sends_drafts or self.num_drafted or self.num_accepted or self.num_rejected
        details = CompletionTokensDetails(self.num_drafted, self.num_accepted, self.num_rejected)
        return Usage(
            num_prompt_tokens,
            self.num_tokens,
            num_prompt_tokens + self.num_tokens,
            prompt_tokens_details=PromptTokensDetails(self.num_cached),
            completion_tokens_details=details if told else UNSET,
        )


@dataclass(slots=True)
class Untold:
    """Drafted tokens, by choice, that no chunk has told of yet."""

    _num_drafted: dict[int, int] = field(default_factory=dict)

    def add(self, index: int, event: GenerationEvent) -> None:
        if event.num_drafted:
            self._num_drafted[index] = self._num_drafted.get(index, 0) + event.num_drafted

    def take(self, index: int) -> ChunkExtras | UnsetType:
        """What the next chunk of this choice says."""
        num_drafted = self._num_drafted.pop(index, 0)
        return ChunkExtras(num_drafted) if num_drafted else UNSET
