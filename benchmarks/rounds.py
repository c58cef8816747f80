"""Runs in turns, so that a machine's noise affects all compared systems alike."""

from __future__ import annotations

import concurrent.futures
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.cold_starts import ColdStart
from benchmarks.processes import RunError
from benchmarks.report import note

Start = Callable[[bool], ColdStart]  # takes whether to watch the memory
Named = TypeVar("Named")


@dataclass
class Turns:
    """Cold starts of several systems by name. One that fails is left out from then on, with its reason.

    `before` is done before each of them, and not timed.
    """

    systems: Mapping[str, Start]
    failed: dict[str, str] = field(default_factory=dict)
    before: Callable[[], None] = lambda: None

    def time(self, rounds: int, label: str = "") -> dict[str, dict[str, Any]]:
        """Medians of several rounds, in turns."""
        return {
            name: {
                "first_token_s": statistics.median(sample.first_token_s for sample in samples),
                "all_s": [round(sample.first_token_s, 3) for sample in samples],
            }
            for name, samples in self.run(rounds, label).items()
        }

    def run(self, rounds: int, label: str = "") -> dict[str, list[ColdStart]]:
        """The rounds, in turns. Without the systems that failed in one of them."""
        samples: dict[str, list[ColdStart]] = {name: [] for name in self.systems}
        for number in range(rounds):
            for name in self.systems:
                sample = self._run(name, watch=False)
                if sample is not None:
                    samples[name].append(sample)
                    note(f"{label}round {number + 1}: {name:32} {sample.first_token_s:6.2f} s")
        return {name: rows for name, rows in samples.items() if name not in self.failed}

    def weigh(self) -> dict[str, dict[str, float]]:
        """The peaks of one more run each, which is not timed: looking would slow it down."""
        peaks = {}
        for name in self.systems:
            sample = self._run(name, watch=True)
            if sample is not None:
                assert sample.peak_pss_bytes is not None
                peaks[name] = {
                    "peak_pss_mb": sample.peak_pss_bytes / 1e6,
                    "peak_rss_of_main_mb": sample.peak_rss_bytes / 1e6,
                }
                note(f"memory: {name:32} {sample.peak_pss_bytes / 1e6:6.0f} MB")
        return peaks

    def _run(self, name: str, *, watch: bool) -> ColdStart | None:
        if name in self.failed:
            return None
        self.before()
        try:
            return self.systems[name](watch)
        except RunError as error:
            self.failed[name] = str(error)
            note(f"{name} failed, and is left out: {error}")
            return None


def at_once(start: Start, count: int) -> Start:
    """A start that is made `count` times at once; its result is the slowest one's."""

    def slowest(watch: bool) -> ColdStart:
        with concurrent.futures.ThreadPoolExecutor(count) as threads:
            samples = list(threads.map(start, [watch] * count))
        return max(samples, key=lambda sample: sample.first_token_s)

    return slowest


def selected(systems: Mapping[str, Named], pattern: str | None) -> dict[str, Named]:
    """Those whose names the pattern of `--only` finds; all without one."""
    return {name: start for name, start in systems.items() if not pattern or re.search(pattern, name)}


def failures(failed: Mapping[str, str], left_out: Iterable[str] = ()) -> str:
    """Lines below a table on what is not in it."""
    lines = [f"\nfailed: {name}: {reason.strip().splitlines()[0]}" for name, reason in failed.items()]
    return "".join([*lines, *(f"\nleft out: {line}" for line in left_out)])
