"""Texts and pairs of texts as encoders take them: with their special tokens, and each token's segment.

A text that is too long loses its last tokens, and keeps its special ones; of a pair the second text is shortened first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ContextLengthError

SPECIAL = -1  # the part of a token that belongs to neither text


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """N tokens. A single text is a pair without its second part."""

    tokens: tuple[int, ...]
    types: tuple[int, ...]  # a token's row of the model's table of types
    parts: tuple[int, ...]  # 0 or 1: the text that a token is of; SPECIAL

    def within(self, max_tokens: int) -> EncodedPair:
        """No more than `max_tokens` of it. Raises `ContextLengthError` where the special tokens alone are more."""
        excess = len(self.tokens) - max_tokens
        if excess <= 0:
            return self
        kept = [place for place, part in enumerate(self.parts) if part == SPECIAL]
        if len(kept) > max_tokens:
            raise ContextLengthError(
                f"{max_tokens} tokens have no room for the {len(kept)} special ones",
                param="truncate_prompt_tokens",
            )
        for part in (0, 1):
            own = [place for place, other in enumerate(self.parts) if other == part]
            kept += own[: max_tokens - len(kept)]
        return self._at(sorted(kept))

    def with_part(self, part: int, max_tokens: int) -> EncodedPair:
        """With no more than `max_tokens` of one of the texts."""
        gone = {place for place, other in enumerate(self.parts) if other == part}
        gone -= set(sorted(gone)[:max_tokens])
        return self._at([place for place in range(len(self.tokens)) if place not in gone]) if gone else self

    def _at(self, places: Sequence[int]) -> EncodedPair:
        return EncodedPair(
            tuple(self.tokens[place] for place in places),
            tuple(self.types[place] for place in places),
            tuple(self.parts[place] for place in places),
        )
