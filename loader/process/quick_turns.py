"""Shorter turns of this process's threads, while a device's images are decoded.

A thread that comes back from decoding, or from the device, waits up to the switch interval for the
interpreter's lock: 5 ms by default, in which a link brings several images. The interval belongs to
the process, so its users are counted.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

QUICK_S = 0.0005

_lock = threading.Lock()
_num_wanted = 0
_usual_s = 0.005


@contextmanager
def quick_turns() -> Iterator[None]:
    """Threads of this process take turns every 0.5 ms while at least one caller is inside."""
    global _num_wanted, _usual_s  # noqa: PLW0603 - the interpreter has one interval
    with _lock:
        _num_wanted += 1
        if _num_wanted == 1:
            _usual_s = sys.getswitchinterval()
            sys.setswitchinterval(min(QUICK_S, _usual_s))
    try:
        yield
    finally:
        with _lock:
            _num_wanted -= 1
            if _num_wanted == 0:
                sys.setswitchinterval(_usual_s)
