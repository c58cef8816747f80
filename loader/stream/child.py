"""The program behind `ProcessLoad`: streams one model into shared memory, and reports.

    python -m teneral.loader.stream.child SOCKET_FD MEMORY_FD

It ends when it has told everything, or when its parent ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
from io import BufferedRWPair
from typing import TYPE_CHECKING

from ..artifact import open_artifact
from ..errors import TeneralError
from ..format.manifest import Manifest, Tier
from ..sources.open import open_source
from ..timeline import Timeline
from .load import WeightLoad
from .plan import Order
from .process_load import Report, Task, new_spans

if TYPE_CHECKING:
    from .readiness import Gate

REPORT_INTERVAL_S = 0.25  # between gates, so that progress is seen to move


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    sock = socket.socket(fileno=int(sys.argv[1]))
    stream = sock.makefile("rwb")
    task: Task = pickle.load(stream)  # noqa: S301 - written by our own parent, over a socket that nobody else has
    threading.Thread(target=_end_with_parent, args=(sock,), daemon=True).start()
    reporter = Reporter(stream, Timeline(started_at=task.started_at))
    try:
        _load(task, int(sys.argv[2]), reporter)
    except TeneralError as error:
        reporter.send(error=error)
    stream.flush()
    os._exit(
        0
    )  # everything is told; taking an interpreter apart would only cost time that the parent could use


class Reporter:
    """Writes reports, each with the spans that are new."""

    def __init__(self, stream: BufferedRWPair, timeline: Timeline) -> None:
        self.timeline = timeline
        self._stream = stream
        self._num_spans = 0

    def send(self, **news: object) -> None:
        spans = tuple(new_spans(self.timeline, self._num_spans))
        self._num_spans += len(spans)
        pickle.dump(Report(spans=spans, **news), self._stream)  # type: ignore[arg-type]
        self._stream.flush()


def _load(task: Task, memory_fd: int, reporter: Reporter) -> None:
    source = open_source(task.url, task.source_options)
    with reporter.timeline.span("manifest", "open"):
        manifest = open_artifact(source, digest=task.digest)
    options = task.load_options
    load = WeightLoad(source, manifest, options=options, timeline=reporter.timeline, shared_fd=memory_fd)
    load.start()
    reporter.send(manifest=manifest, progress=load.progress())
    for gate in gates_in_order(manifest, options.order):
        while True:
            try:
                load.wait(*gate, REPORT_INTERVAL_S)
            except TimeoutError:
                reporter.send(progress=load.progress())
            else:
                break
        reporter.send(gates=(gate,), progress=load.progress())
    load.join()
    reporter.send(statistics=load.statistics(), progress=load.progress())


def gates_in_order(manifest: Manifest, order: Order) -> list[Gate]:
    """Every gate, in the order in which a load of this order opens them, give or take a part."""
    groups = [group.index for group in manifest.groups]
    if order is Order.EXACT:
        return [(group, tier) for group in groups for tier in Tier]
    return [(group, tier) for tier in Tier for group in groups]


def _end_with_parent(sock: socket.socket) -> None:
    """The parent says nothing after its order, so a read ends only with the parent."""
    sock.recv(1)
    os._exit(1)


if __name__ == "__main__":
    main()
