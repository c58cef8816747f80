"""Thread bodies that leave cores to others, for as long as these need them more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

HEAD_START_S = 0.15  # of a base that drafts, before its fine-tune is decoded
ENDED_POLL_S = 0.05


class Pacing(NamedTuple):
    """When the threads of one load begin."""

    full_speed: threading.Event | None  # until it is set two cores are left to others; None: never
    drafts_on_base: bool  # the cores are the base's at first, until the rest would wait for the decoding
    has_enough: Callable[[], bool]  # so much has come that it would
    is_over: Callable[[], bool]  # the load has ended

    def paced(self, body: Callable[[], None], *, is_spare: bool) -> Callable[[], None]:
        """The body, which waits for full speed unless its core is a spare one, and for the base."""

        def run() -> None:
            if self.full_speed is not None and not is_spare:
                while not self.full_speed.wait(ENDED_POLL_S):
                    if self.is_over():
                        return
            deadline_s = time.monotonic() + (HEAD_START_S if self.drafts_on_base else 0.0)
            while not self.has_enough() and time.monotonic() < deadline_s:
                if self.is_over():
                    return
                time.sleep(HEAD_START_S / 15)
            body()

        return run
