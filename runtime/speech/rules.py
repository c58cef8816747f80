"""The tokens that may come next in a window's text, as a grammar of the engine.

Some tokens are never chosen. With times, these come in pairs, the end of one text and the beginning of the next, and
never go back (transformers' WhisperTimeStampLogitsProcessor). Its last rule needs the model's scores, and is
`SamplingParams.times_from`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..grammar.matcher import MaskWords
    from .settings import SpeechSettings


class SpeechRules:
    """A `Grammar` of one model. Thread-safe."""

    def __init__(self, settings: SpeechSettings, *, has_times: bool) -> None:
        self.settings = settings
        self.has_times = has_times
        allowed = np.ones(-(-settings.vocab_size // 32) * 32, np.bool_)
        allowed[settings.vocab_size :] = False
        allowed[list(settings.suppressed)] = False
        if has_times:
            allowed[settings.no_times] = False
        self.allowed = allowed

    def start(self) -> SpeechMatcher:
        return SpeechMatcher(self)


class SpeechMatcher:
    """A `Matcher` of `SpeechRules`."""

    is_finished = False  # the end token ends the answer

    def __init__(self, rules: SpeechRules, last: tuple[int, ...] = (), latest: int = -1) -> None:
        """`last` are the last two tokens; `latest` is the last token of time, -1 before the first one."""
        self._rules, self._last, self._latest = rules, last, latest
        self.num_mask_words = len(rules.allowed) // 32

    def mask_into(self, words: MaskWords) -> None:
        settings, allowed = self._rules.settings, self._rules.allowed.copy()
        if not self._last:
            allowed[list(settings.suppressed_first)] = False
        if self._rules.has_times:
            self._keep_times(allowed)
        words[:] = np.packbits(allowed, bitorder="little").view(np.uint32)

    def _keep_times(self, allowed: np.ndarray) -> None:
        settings, times_from = self._rules.settings, self._rules.settings.times_from
        if not self._last:
            allowed[:times_from] = False
            if settings.latest_first_time is not None:
                allowed[times_from + settings.latest_first_time + 1 :] = False
            return
        is_time = self._last[-1] >= times_from
        is_pair = len(self._last) < 2 or self._last[-2] >= times_from
        if is_time and is_pair:
            allowed[times_from:] = False
        elif is_time:
            allowed[: settings.end] = False
        if self._latest >= 0:
            allowed[times_from : self._latest + (0 if is_time and not is_pair else 1)] = False

    def accept(self, token: int) -> None:
        self._last = (*self._last[-1:], token)
        if token >= self._rules.settings.times_from:
            self._latest = token

    def forced(self) -> list[int]:
        return []

    def copy(self) -> SpeechMatcher:
        return SpeechMatcher(self._rules, self._last, self._latest)
