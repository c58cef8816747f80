"""The protocol through which an engine follows a grammar, whatever library is behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    MaskWords = npt.NDArray[np.uint32]  # (ceil(vocabulary / 32),): bit t % 32 of word t // 32 is token t's


class Matcher(Protocol):
    """One answer's place in its grammar. Used by one thread at a time.

    Every method raises `GrammarError` once the grammar has gone over its limits; it has no place from then on.
    """

    @property
    def num_mask_words(self) -> int: ...

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and can only end."""

    def mask_into(self, words: MaskWords) -> None:
        """Write which tokens may come next; those that end an answer are among them where it may end."""

    def accept(self, token: int) -> None:
        """Go on by this token. `GrammarError` for one that may not come next."""

    def forced(self) -> list[int]:
        """The tokens that must come next, spelt as the tokenizer spells their text. None of them is accepted yet."""

    def copy(self) -> Matcher:
        """Another one at the same place, which goes on by itself."""


class Grammar(Protocol):
    """A compiled grammar. Thread-safe."""

    def start(self) -> Matcher:
        """A matcher at the beginning of an answer."""
