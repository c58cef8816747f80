"""The program behind `ProcessLoad`: streams one model into shared memory, and reports.

    python -m teneral.loader.stream.child SOCKET_FD MEMORY_FD

It asks for the manifest before it imports what comes after, and for the first ranges before it imports what decodes
them. It ends when it has told everything, or when its parent ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

from ..artifact import open_artifact
from ..errors import TeneralError
from ..sources.open import open_source
from ..timeline import Timeline
from .options import Order
from .report import Reporter

if TYPE_CHECKING:
    from ..format.manifest import Manifest
    from .launch import Task
    from .readiness import Gate

REPORT_INTERVAL_S = 0.25  # between gates, so that progress is seen to move
SWITCH_INTERVAL_S = 0.5e-3  # a thread that has bytes to ask for waits no longer for one that imports


def main(socket_fd: int, memory_fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sock = socket.socket(fileno=socket_fd)
    stream = sock.makefile("rwb")
    task: Task = pickle.load(stream)  # noqa: S301 - written by our own parent, over a socket that nobody else has
    threading.Thread(target=_end_with_parent, args=(sock,), daemon=True).start()
    reporter = Reporter(stream, Timeline(started_at=task.started_at))
    try:
        _load(task, memory_fd, reporter)
    except TeneralError as error:
        reporter.send(error=error)
    # Everything is told; taking an interpreter apart would only cost time that the parent could use.
    os._exit(0)


def _load(task: Task, memory_fd: int, reporter: Reporter) -> None:
    timeline = reporter.timeline
    with timeline.span("manifest", "open"):
        source = open_source(task.url, task.source_options)
        threading.Thread(target=_import_ahead, daemon=True).start()
        manifest = open_artifact(source, digest=task.digest)
    from .load import WeightLoad

    options = task.load_options
    load = WeightLoad(source, manifest, options=options, timeline=timeline, shared_fd=memory_fd)
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
    from ..format.manifest import Tier

    groups = [group.index for group in manifest.groups]
    if order is Order.EXACT:
        return [(group, tier) for group in groups for tier in Tier]
    return [(group, tier) for tier in Tier for group in groups]


def _import_ahead() -> None:
    """What is needed once the manifest is there: while it is on its way."""
    from . import load  # noqa: F401


def _end_with_parent(sock: socket.socket) -> None:
    """The parent says nothing after its task, so a read ends only with the parent."""
    sock.recv(1)
    os._exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
