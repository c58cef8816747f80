"""The protocol through which the engine follows a grammar, independent of the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    MaskWords = npt.NDArray[np.uint32]  # (ceil(vocabulary / 32),): bit t % 32 of word t // 32 is token t's


class Matcher(Protocol):
    """The position of one answer in its grammar. Not thread-safe.

    Every method raises `GrammarError` once the grammar has exceeded its limits; the matcher is then
    unusable.
    """

    @property
    def num_mask_words(self) -> int: ...

    @property
    def is_finished(self) -> bool:
        """True if the answer is complete and can only end."""

    def mask_into(self, words: MaskWords) -> None:
        """Write the mask of tokens that may come next, including end tokens where the answer may
        end.
        """

    def accept(self, token: int) -> None:
        """Advance by this token. Raises `GrammarError` for one that may not come next."""

    def forced(self) -> list[int]:
        """The tokens that must come next, in the tokenizer's spelling of their text. Accepts none
        of them.
        """

    def copy(self) -> Matcher:
        """An independent matcher at the same position."""


class Grammar(Protocol):
    """A compiled grammar. Thread-safe."""

    def start(self) -> Matcher:
        """A matcher at the beginning of an answer."""
