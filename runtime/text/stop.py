"""Stop strings in a stream of text. The text before one is returned; the stop string only if
included.

A possible beginning of a stop string is held back until the next text decides. The result does not
depend on how the text is split. This module knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one sequence. Holds back less than the longest one."""

    def __init__(self, stop: Sequence[str], *, included: bool = False) -> None:
        """`included`: the stop string that ends the text is part of it."""
        self._stop = tuple(stop)
        self._included = included
        self._held = ""
        self.found: str | None = None  # the completed one

    def push(self, text: str, *, counts: bool = True) -> tuple[str, bool]:
        """Add text. Returns the text that can be returned now, and whether a stop string is
        complete, which ends the text.

        Of several stop strings the first complete one counts, as if the text came character by
        character; of those that end together, the longest. Without `counts`, this text completes
        none.
        """
        if not self._stop or not text:
            return text, False
        num_old = len(self._held)
        text = self._held + text
        if counts:
            found = [
                (start + len(stop), start)
                for stop in self._stop
                if (start := text.find(stop, max(0, num_old - len(stop) + 1))) >= 0
            ]
            if found:
                self._held = ""
                end, start = min(found)
                self.found = text[start:end]
                return text[: end if self._included else start], True
        held = max(open_length(text, stop) for stop in self._stop)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """The text held back, for a sequence that ends without a stop string."""
        held, self._held = self._held, ""
        return held


def open_length(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
