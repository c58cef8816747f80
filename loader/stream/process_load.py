"""A load in a process of its own: the same gates and slabs as `WeightLoad`, filled by a child.

The child (`child.py`) opens the source, reads the manifest, and streams into memory that both processes map; this
side only opens gates as it is told. So nothing that holds this process's GIL, the import of torch above all, can keep
bytes from being read, verified and decoded, and nothing of that slows the import. `docs/decisions/` says what it gains.

The child is ours alone: it is given no more than the address and the options, over a private socket, and it ends when
this process does, however that ends.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LoadCancelledError, LoadError, TeneralError
from ..format.manifest import Manifest, Tier
from ..sources.base import SourceOptions
from ..timeline import Span, Timeline
from .options import LoadOptions
from .progress import LoadProgress, LoadState, LoadStatistics
from .readiness import Gate, Readiness

if TYPE_CHECKING:
    from .arena import Arena, ByteArray


@dataclass(frozen=True, slots=True)
class Task:
    """What the child is told, once."""

    url: str
    digest: bytes | None
    source_options: SourceOptions
    load_options: LoadOptions
    started_at: float  # the timeline's origin, on the clock that all processes of a machine share


@dataclass(frozen=True, slots=True)
class Report:
    """What the child tells, any number of times: all that is new since it last did."""

    progress: LoadProgress | None = None
    gates: tuple[Gate, ...] = ()
    spans: tuple[Span, ...] = ()
    manifest: Manifest | None = None  # in the first report that has one, before any gate
    statistics: LoadStatistics | None = None  # in the last report
    error: TeneralError | None = None  # in the last report, when the load failed


class ProcessLoad:
    """Loads the model at an address. All methods may be called from any thread.

    The slabs belong to whoever looks at them: neither `close` nor the child's end frees memory that a view shows.
    """

    def __init__(
        self,
        url: str,
        *,
        digest: bytes | None = None,
        source_options: SourceOptions | None = None,
        options: LoadOptions | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._timeline = timeline or Timeline()
        self._task = Task(
            url,
            digest,
            source_options or SourceOptions(),
            options or LoadOptions(),
            self._timeline.started_at,
        )
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._opened = threading.Event()
        self._manifest: Manifest | None = None
        self._arena: Arena | None = None
        self._readiness: Readiness | None = None
        self._error: TeneralError | None = None
        self._progress: LoadProgress | None = None
        self._statistics: LoadStatistics | None = None
        self._lock = threading.Lock()  # guards the error against the end, and starting against cancelling

    @staticmethod
    def is_possible() -> bool:
        """Whether this system has memory that can be shared without a name (Linux: memfd)."""
        return hasattr(os, "memfd_create")

    def start(self) -> None:
        """Start the child; return at once. Raises `OSError` when the system refuses another process or its memory."""
        with self._lock:
            if self._error is not None or self._child is not None:
                return
            memory_fd = os.memfd_create("teneral-weights")
            ours, theirs = socket.socketpair()
            with theirs:
                os.set_inheritable(memory_fd, True)
                self._child = _start_child(theirs.fileno(), memory_fd)
        self._thread = threading.Thread(
            target=self._listen, args=(ours, memory_fd), name="teneral-load", daemon=True
        )
        self._thread.start()

    @property
    def manifest(self) -> Manifest:
        """Waits until the child has read it. Raises the load's error."""
        self._opened.wait()
        if self._manifest is None:
            raise self._error or LoadCancelledError("the load ended before its manifest was read")
        return self._manifest

    def wait(self, group: int, tier: Tier = Tier.REFINE, timeout_s: float | None = None) -> None:
        """As `WeightLoad.wait`."""
        if self._readiness is None:
            _ = self.manifest
            assert self._readiness is not None
        self._readiness.wait(group, tier, timeout_s)

    def is_ready(self, group: int, tier: Tier = Tier.REFINE) -> bool:
        return self._readiness is not None and self._readiness.is_open(group, tier)

    def slab(self, group: int) -> ByteArray:
        """As `WeightLoad.slab`; waits for the manifest."""
        _ = self.manifest
        assert self._arena is not None
        return self._arena.slabs[group]

    def progress(self) -> LoadProgress:
        """What the child last told: at every gate, and a few times a second between them."""
        return self._progress or LoadProgress(LoadState.IDLE, 0, 0, 0, 0, 0, 0, 0)

    def statistics(self) -> LoadStatistics | None:
        """What the load cost; None until it has ended."""
        return self._statistics

    def cancel(self) -> None:
        """End the child; closed gates raise `LoadCancelledError`. Nothing after the end."""
        self._fail(LoadCancelledError("the load was cancelled"))
        if self._child is not None and self._statistics is None:
            self._child.kill()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the child has ended; False when it has not after `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Cancel if it is still under way, and wait for the child. Idempotent. The weights stay."""
        self.cancel()
        self.join()

    def _listen(self, sock: socket.socket, memory_fd: int) -> None:
        """The body of the one thread: take reports until the child ends."""
        assert self._child is not None
        try:
            with sock, sock.makefile("rwb") as stream:
                pickle.dump(self._task, stream)
                stream.flush()
                while True:
                    self._take(pickle.load(stream), memory_fd)  # noqa: S301 - written by our own child, nobody else has it
        except (EOFError, OSError, pickle.UnpicklingError):
            status = self._child.wait()
            if self._statistics is None:
                self._fail(_died(status))
        except Exception as error:  # noqa: BLE001 - whatever it is, unless the load ends all wait for ever
            self._child.kill()
            self._child.wait()
            if not isinstance(error, TeneralError):  # else our half of the shared memory was refused
                said = f"the load stopped on a defect: {type(error).__name__}: {error}"
                error = LoadError(said).with_traceback(error.__traceback__)
            self._fail(error)
        finally:
            os.close(memory_fd)

    def _take(self, report: Report, memory_fd: int) -> None:
        for span in report.spans:
            self._timeline.add(span.lane, span.name, span.start_s, span.end_s, **span.attributes)
        if report.progress is not None:
            self._progress = report.progress
        if report.manifest is not None:
            self._open(report.manifest, memory_fd)
        if report.gates and self._readiness is not None:
            self._readiness.open(report.gates)
        if report.statistics is not None:
            self._statistics = report.statistics
        if report.error is not None:
            self._fail(report.error)

    def _open(self, manifest: Manifest, memory_fd: int) -> None:
        from .arena import Arena  # brings in numpy, which the child must not wait for to be started

        with self._lock:
            if self._error is not None:
                return
            self._arena = Arena([group.slab_bytes for group in manifest.groups], shared_fd=memory_fd)
            self._readiness = Readiness(
                len(manifest.groups), [(part.group, part.tier) for part in manifest.parts]
            )
            self._manifest = manifest
        self._opened.set()

    def _fail(self, error: TeneralError) -> None:
        with self._lock:
            if self._error is not None or (self._statistics is not None and self._manifest is not None):
                return
            self._error = error
        if self._readiness is not None:
            self._readiness.fail(error)
        self._opened.set()


def _start_child(socket_fd: int, memory_fd: int) -> subprocess.Popen[bytes]:
    # The child must find this very package, wherever this process found it.
    package_root = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.child", str(socket_fd), str(memory_fd)],
        stdin=subprocess.DEVNULL,
        pass_fds=(socket_fd, memory_fd),
        env=os.environ | {"PYTHONPATH": path},
    )


def _died(status: int) -> LoadError:
    if status < 0:
        return LoadError(
            f"the process that loads the weights was killed by signal {-status}",
            hint="Signal 9 usually means that the container is out of memory: give it more, or serve a smaller model.",
        )
    return LoadError(
        f"the process that loads the weights ended early, with status {status}",
        hint="What it said stands above. Set loader = thread to load within the server's own process.",
    )


def new_spans(timeline: Timeline, num_known: int) -> Sequence[Span]:
    """The spans that were added after the first `num_known`."""
    return timeline.spans()[num_known:]
