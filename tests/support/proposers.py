"""A proposer in place of look-ahead's own that knows the answers, and is often wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from teneral.runtime.engine.proposals import MAX_MATCH, NGRAM, Proposal

MAX_GUESSES = 9


def knowing(texts: Iterable[Sequence[int]], vocab_size: int, seed: int) -> Callable[[Sequence[int]], Knowing]:
    """Makes proposers over whole texts, prompt and answer."""
    known = [tuple(text) for text in texts]
    return lambda tokens: Knowing(tokens, known, vocab_size, random.Random(f"{seed} {len(tokens)}"))


class Knowing:
    """A proposer of the tokens that follow in a known text, some of them wrong; or of random tokens; or of none."""

    def __init__(
        self, tokens: Sequence[int], known: list[tuple[int, ...]], vocab_size: int, chance: random.Random
    ) -> None:
        self._tokens, self._known, self._vocab_size, self._chance = tokens, known, vocab_size, chance

    def propose(self, max_tokens: int) -> Proposal | None:
        chance, history = self._chance, tuple(self._tokens)
        num = min(max_tokens, chance.randint(0, MAX_GUESSES))
        texts = [text for text in self._known if text[: len(history)] == history and len(text) > len(history)]
        guess = list(chance.choice(texts)[len(history) :]) if texts else []
        guess += chance.choices(range(self._vocab_size), k=MAX_GUESSES)
        error_rate = chance.choice([0.0, 0.0, 0.2, 1.0])
        guess = [
            chance.randrange(self._vocab_size) if chance.random() < error_rate else token for token in guess
        ]
        return Proposal(guess[:num], chance.randint(NGRAM, MAX_MATCH)) if num > 0 else None
