"""Processes that are measured: their environment, and the memory of all that belong together."""

from __future__ import annotations

import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

SAMPLE_PERIOD_S = 0.05


class RunError(Exception):
    """A measurement that did not complete."""


def environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """This process's own, without what would make measurements worthless, and with `extra`.

    Look-ahead is off unless a variable says otherwise: answers of random weights repeat themselves.
    """
    own = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "ORT_DISABLE_TELEMETRY": "1"}
    variables = {"TENERAL_LOOK_AHEAD": "off", **os.environ, **own, **extra}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)  # importing torch would take three times as long
    return variables


class Sampler(ABC):
    """Looks at something every `period_s` while it is open."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    @abstractmethod
    def look(self) -> None:
        """Called by a thread of its own."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            self.look()


class MemoryWatch(Sampler):
    """The most memory that processes had together with all their descendants, as a context manager.

    It is the sum of their proportional set sizes (PSS), in which a page that several share counts once, sampled every
    50 ms. Looking takes CPU time and holds up the page faults of those looked at: do not time what is watched.
    """

    def __init__(self, *roots: int) -> None:
        super().__init__(SAMPLE_PERIOD_S)
        self.peak_bytes = 0
        self._roots = roots

    def look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, tree_bytes(self._roots))


def tree_bytes(roots: Iterable[int]) -> int:
    """The proportional set sizes of these processes and their descendants; those that have ended count nothing."""
    return sum(_pss_bytes(pid) for pid in _with_descendants(roots))


def _with_descendants(roots: Iterable[int]) -> set[int]:
    found: set[int] = set()
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid in found:
            continue
        found.add(pid)
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):
                    todo += map(int, (task / "children").read_text().split())
    return found


def _pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
