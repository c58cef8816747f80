"""Encoded texts and pairs of texts for encoders, with their special tokens and segments.

A text that is too long is truncated at its end, and keeps its special tokens; in a pair the second
text is shortened first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ContextLengthError

# The part of a token that belongs to neither text.
SPECIAL = -1


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """N tokens. A single text is a pair without its second part."""

    tokens: tuple[int, ...]
    types: tuple[int, ...]  # row of each token in the model's table of types
    # 0 or 1: the text of each token; or SPECIAL.
    parts: tuple[int, ...]

    def within(self, max_tokens: int) -> EncodedPair:
        """The pair truncated to `max_tokens`. Raises `ContextLengthError` if the special tokens
        alone are more.
        """
        excess = len(self.tokens) - max_tokens
        if excess <= 0:
            return self
        kept = [place for place, part in enumerate(self.parts) if part == SPECIAL]
        if len(kept) > max_tokens:
            raise ContextLengthError(
                f"max_tokens {max_tokens} is less than the {len(kept)} special tokens",
                param="truncate_prompt_tokens",
            )
        for part in (0, 1):
            own = [place for place, other in enumerate(self.parts) if other == part]
            kept += own[: max_tokens - len(kept)]
        return self._at(sorted(kept))

    def with_part(self, part: int, max_tokens: int) -> EncodedPair:
        """The pair with at most `max_tokens` of one of the texts."""
        gone = {place for place, other in enumerate(self.parts) if other == part}
        gone -= set(sorted(gone)[:max_tokens])
        return self._at([place for place in range(len(self.tokens)) if place not in gone]) if gone else self

    def _at(self, places: Sequence[int]) -> EncodedPair:
        return EncodedPair(
            tuple(self.tokens[place] for place in places),
            tuple(self.types[place] for place in places),
            tuple(self.parts[place] for place in places),
        )
