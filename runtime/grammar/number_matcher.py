"""A matcher over another one, which bounds the length of JSON's numbers: a grammar for any number
allows exponents that no double has, such as 1e400, and integers that JSON.parse reads as Infinity.

A number has up to `MAX_DIGITS` digits and a point, and an exponent of up to `MAX_EXPONENT_DIGITS`:
its value is below 10 ** 163. Where it reaches a bound, tokens that would make it longer are masked.
The answer's last bytes tell if it ends in a number: behind those of a text a letter or a quote may
come, too. Numbers that a schema lists are never masked, since nothing else may come there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .matcher import MaskWords, Matcher

MAX_DIGITS = 64  # with the point
MAX_EXPONENT_DIGITS = 2
MAX_MAGNITUDE = 10 ** (MAX_DIGITS + 10**MAX_EXPONENT_DIGITS - 1)  # of a number that is not masked

_AT_END = re.compile(rb"([0-9][0-9.]*)(?:([eE])[+-]?([0-9]*))?\Z")
_DIGITS_AND_POINTS = re.compile(rb"[0-9.]+")
_DIGITS = re.compile(rb"[+-]?([0-9]+)")
_LONG = rb"[eE][+-]?[0-9]{%d,}" % (MAX_EXPONENT_DIGITS + 1)
_LONG_EXPONENT = re.compile(rb"[0-9.]*" + _LONG)
_LONG_NUMBER = re.compile(rb"[0-9][0-9.]*" + _LONG + rb"|[0-9]{%d,}" % (MAX_DIGITS + 1))
# Tokens of which one may come wherever a text goes on or ends, and none behind a number.
_OF_TEXTS = (b'"', b"x", b"k", b"_")


class NumberTokens:
    """The tokens of a vocabulary that continue numbers, by how much. Thread-safe."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """`texts` are those of all tokens, b"" of special ones."""
        self._mantissas = _by_length(texts, _DIGITS_AND_POINTS.match, 0)
        self._exponents = _by_length(texts, _DIGITS.match, 1)
        self._long_exponents = [token for token, text in enumerate(texts) if _LONG_EXPONENT.match(text)]
        # Never needed: the same text has other tokens, too.
        self.never = [token for token, text in enumerate(texts) if _LONG_NUMBER.search(text)]
        self.of_texts = [token for token, text in enumerate(texts) if text in _OF_TEXTS]
        self.texts = texts

    def too_long(self, tail: bytes) -> list[int]:
        """Tokens that make the number at the end of `tail` too long; none where there is no number."""
        found = _AT_END.search(tail)
        if found is None:
            return []
        if found[2]:
            return _longer_than(self._exponents, MAX_EXPONENT_DIGITS - len(found[3]))
        return [*_longer_than(self._mantissas, MAX_DIGITS - len(found[1])), *self._long_exponents]


class NumberMatcher:
    """A `Matcher` whose numbers are bounded."""

    __slots__ = ("_matcher", "_tail", "_tokens", "num_mask_words")

    def __init__(self, matcher: Matcher, tokens: NumberTokens, tail: bytes = b"") -> None:
        """`tail` are the last bytes of the answer so far."""
        self._matcher, self._tokens, self._tail = matcher, tokens, tail
        self.num_mask_words = matcher.num_mask_words

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_finished

    def mask_into(self, words: MaskWords) -> None:
        self._matcher.mask_into(words)
        _forbid(words, self._tokens.never)
        too_long = self._tokens.too_long(self._tail)
        if too_long and not any(_allows(words, token) for token in self._tokens.of_texts):
            _forbid(words, too_long)

    def accept(self, token: int) -> None:
        self._matcher.accept(token)
        text = self._tokens.texts[token] if token < len(self._tokens.texts) else b""
        self._tail = (self._tail + text)[-(MAX_DIGITS + 8) :]

    def forced(self) -> list[int]:
        return self._matcher.forced()

    def copy(self) -> NumberMatcher:
        return NumberMatcher(self._matcher.copy(), self._tokens, self._tail)


def _by_length(
    texts: Iterable[bytes], match: Callable[[bytes], re.Match[bytes] | None], group: int
) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for token, text in enumerate(texts):
        if (beginning := match(text)) is not None:
            found.setdefault(len(beginning[group]), []).append(token)
    return found


def _longer_than(by_length: dict[int, list[int]], length: int) -> list[int]:
    return [token for each, tokens in by_length.items() if each > length for token in tokens]


def _allows(words: MaskWords, token: int) -> bool:
    return bool(words[token >> 5] >> (token & 31) & 1)


def _forbid(words: MaskWords, tokens: Iterable[int]) -> None:
    """Remove the tokens from the mask, unless nothing would remain."""
    allowed = [token for token in tokens if _allows(words, token)]
    if not allowed:
        return
    before = words.copy()
    for token in allowed:
        words[token >> 5] &= ~(1 << (token & 31)) & 0xFFFFFFFF
    if not words.any():
        words[:] = before
