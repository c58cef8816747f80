"""The base of a standby pool, as the process that forks sees it: loaded by a process of its own, held
for all forks to come, and loaded again on request.

A fork inherits the open file, and keeps the base that it was forked with. Single-threaded.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ...loader.errors import LoadError, TeneralError, UsageError
from ...loader.load.options import LoadOptions
from ...loader.load.shared_child import SharedLoading, SharedTask
from ...loader.load.targets.shared import SharedBase
from ...loader.sources.base import SourceOptions
from ...runtime.files import is_onnx


class PoolBase:
    """Close it with `close`; the forks keep what they have."""

    def __init__(self, address: str, options: SourceOptions) -> None:
        """Begin to load. Raises `OSError` where the system refuses another process."""
        self._task = task = SharedTask(address, options, LoadOptions())
        self.held: SharedBase | None = None
        self._failure: TeneralError | None = None
        self._began_s = time.monotonic()
        self._loading: SharedLoading | None = SharedLoading(task)

    @property
    def is_loading(self) -> bool:
        return self._loading is not None

    def fileno(self) -> int:
        """Readable when `take` need not wait. While it is loading."""
        assert self._loading is not None
        return self._loading.fileno()

    def load(self) -> None:
        """Begin to load what lies at the address now, unless that is the base that is held, or the system
        refuses another process.
        """
        assert self._loading is None
        self._began_s = time.monotonic()
        held = None if self.held is None else self.held.digest
        try:
            self._loading = SharedLoading(self._task._replace(held_digest=held))
        except OSError as error:
            self._failure = LoadError(f"no process can load the base: {error.strerror or error}")
            _print(f"the base stays as it is: {self._failure}")

    def forget_loading(self) -> None:
        """For a fork: close what it has inherited of a load under way, whose memory it would keep."""
        if self._loading is not None:
            self._loading.forget()
            self._loading = None

    def take(self) -> bool:
        """Hold what was loaded, in place of the one before; False where that stays. Raises the error of
        the load where there is none before; later ones are printed.
        """
        assert self._loading is not None
        loading, self._loading = self._loading, None
        try:
            found = loading.finish()
            if found is not None and is_onnx(found.manifest):
                found.close()
                raise UsageError("an ONNX model cannot be the base of a standby pool", key="base")
        except TeneralError as error:
            self._failure = error
            if self.held is None:
                raise
            _print(f"the base stays as it is: {error}")
            return False
        self._failure = None
        if found is None:
            _print("the base stays as it is: its address has the same digest")
            return False
        if self.held is not None:
            self.held.close()
        self.held = found
        seconds = time.monotonic() - self._began_s
        _print(f"{found.address} is in memory as the base: {found.size_bytes >> 20:,} MiB, {seconds:.1f} s")
        return True

    def status(self) -> dict[str, Any]:
        """The figures, JSON-ready."""
        held = self.held
        return {
            "address": self._task.address,
            "digest": None if held is None else held.digest.hex(),
            "bytes": 0 if held is None else held.size_bytes,
            "loading": self.is_loading,
            "error": None if self._failure is None else self._failure.message,
        }

    def close(self) -> None:
        """Stop loading, and let go of the base."""
        if self._loading is not None:
            self._loading.cancel()
            self._loading = None
        if self.held is not None:
            self.held.close()
            self.held = None


def _print(text: str) -> None:
    # With its end in one write: other processes write there, too.
    print(f"teneral: {text}\n", end="", file=sys.stderr, flush=True)
