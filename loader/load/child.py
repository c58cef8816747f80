"""The program behind `ProcessLoad`: streams one model into shared memory, and reports.

    python -m teneral.loader.load.child SOCKET_FD MEMORY_FD FILES_FD

It asks for the manifest before it imports what comes after, and for the first ranges before it
imports what decodes them. It ends when it has reported everything, or when its parent ends.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from ..artifact import open_artifact, open_model
from ..errors import TeneralError
from ..process.helper import OWNER_GONE
from ..sources.open import import_likely_store
from ..timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import BufferedRWPair

    from ..device.paths import DeviceSpeed
    from ..format.manifest import Blob, Manifest, Part
    from ..sources.base import Source
    from .launch import Task
    from .load import WeightLoad
    from .options import Order
    from .prefetch import Prefetch
    from .report import GiveBack, Reporter
    from .targets.base import Target

# What is needed once the manifest is there.
AHEAD = ("blake3", "..format.manifest_json", ".prefetch", ".load", ".report", "..device.paths")
CACHE_WAIT_S = 60.0  # for a slow disk to take what the load has left for the next one
REPORT_INTERVAL_S = 0.25  # between gates, so that progress is seen to move
HEAD_START_S = 3e-3  # for asking for the manifest: the imports would share the GIL with that
# A thread that has bytes to ask for waits no longer for one that imports.
SWITCH_INTERVAL_S = 0.5e-3


def main(socket_fd: int, memory_fd: int, files_fd: int) -> None:
    # Ctrl-C reaches the whole group: the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.disable()  # until the first ranges are on their way: there is no garbage yet
    sock = socket.socket(fileno=socket_fd)
    stream = sock.makefile("rwb")
    uses_tls = import_likely_store()  # while the parent reads its flags
    if uses_tls and not _has_come(sock):
        import ssl  # noqa: F401 - 10 ms, in which nothing else is to be done
    for name in AHEAD:
        if _has_come(sock):
            break
        import_module(name, __package__)
    task: Task = pickle.load(stream)  # noqa: S301 - written by our own parent, over a private socket
    inbox = _Inbox(stream)
    threading.Thread(target=inbox.listen, daemon=True).start()
    timeline = Timeline(started_at=task.started_at)
    try:
        if task.context is not None:
            task.context.apply()
        source, manifest, prefetch = _open(task, timeline)
    except TeneralError as error:
        _reporter(stream, timeline).send(error=error)
    else:
        reporter = _reporter(stream, timeline)
        try:
            _load(task, source, manifest, prefetch, memory_fd, files_fd, reporter, inbox)
        except TeneralError as error:
            reporter.send(error=error)
    # Everything is reported; taking an interpreter apart would only cost time that the parent could
    # use.
    os._exit(0)


def _has_come(sock: socket.socket) -> bool:
    """True if there is something to be read."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _reporter(stream: BufferedRWPair, timeline: Timeline) -> Reporter:
    from .report import Reporter  # the first request did not wait for it

    return Reporter(stream, timeline)


def _open(task: Task, timeline: Timeline) -> tuple[Source, Manifest, Prefetch | None]:
    prefetch: Prefetch | None = None

    def look(weight_bytes: int, blob: Blob, part: Part) -> bool:
        nonlocal prefetch
        if prefetch is None:
            from .prefetch import Prefetch  # the first request did not wait for these, either

            is_here = task.device == "cpu"
            prefetch = Prefetch(source, task.load_options, timeline=timeline, weights_are_here=is_here)
        return prefetch.look(weight_bytes, blob, part)

    with timeline.span("manifest", "open"):
        source = open_model(task.url, task.source_options, timeline=timeline)
        threading.Thread(target=_import_ahead, daemon=True).start()
        manifest = open_artifact(source, digest=task.digest, look=look)
    return source, manifest, prefetch


def _load(
    task: Task,
    source: Source,
    manifest: Manifest,
    prefetch: Prefetch | None,
    memory_fd: int,
    files_fd: int,
    reporter: Reporter,
    inbox: _Inbox,
) -> None:
    from .load import WeightLoad
    from .targets.base import HostTarget

    options = task.load_options
    manifest_sent = threading.Event()  # of the manifest, before which no image makes sense
    target: Target = (
        HostTarget(manifest, shared_fd=memory_fd)
        if task.device == "cpu"
        else _device_target(task, manifest, memory_fd, reporter, manifest_sent, inbox)
    )
    load = WeightLoad(
        source, manifest, target=target, options=options, timeline=reporter.timeline, prefetch=prefetch
    )
    _tell_of_files(
        manifest, files_fd
    )  # 0.2 ms now; with the threads that begin next it would take a hundred times that
    inbox.load = load  # before the manifest is sent, without which no part can be requested

    def tell() -> None:
        reporter.send(manifest=manifest, progress=load.progress(), ring_bytes=target.ring_bytes)
        manifest_sent.set()

    # Pickling takes 3 ms, or 0.1 s once the threads that begin next run. A standby has nothing to
    # do before it has this; others import torch meanwhile.
    is_awaited = task.context is not None
    if is_awaited:
        tell()
    load.start()
    gc.freeze()
    gc.enable()
    if not is_awaited:
        tell()
    _report(load, reporter)
    load.join()
    if load.failure is not None:
        raise load.failure
    reporter.send(statistics=load.statistics(), progress=load.progress())
    if options.cache_dir is not None:
        load.join_cache(CACHE_WAIT_S)
        reporter.send(statistics=load.statistics())


def _report(load: WeightLoad, reporter: Reporter) -> None:
    """Tell of gates as they open, of the parts that the parent asked for, and of progress between.
    Raises the load's error.
    """
    from ..format.manifest import Tier

    closed = [(group.index, tier) for group in load.manifest.groups for tier in Tier]
    reported: frozenset[int] = frozenset()
    seen = -1
    while closed:
        seen = load.wait_for_change(seen, REPORT_INTERVAL_S)
        if load.failure is not None:
            raise load.failure
        opened = tuple(gate for gate in closed if load.is_ready(*gate))
        closed = [gate for gate in closed if gate not in opened]
        wanted = load.wanted_parts()
        reporter.send(
            gates=opened,
            parts=tuple(wanted - reported),
            has_all_pages=load.has_all_pages,
            progress=load.progress(),
        )
        reported = wanted


class _Inbox:
    """Messages from the parent after its task: parts that it waits for, the order it wants, images
    that it has taken. There may be none for any time; the end of the stream ends this process.
    """

    def __init__(self, stream: BufferedRWPair) -> None:
        self._stream = stream
        self.load: WeightLoad | None = None
        # Of what the ring has lent.
        self.give_back: Callable[[int, bool], None] = lambda offset_bytes, wrong: None
        self.device_is: Callable[[DeviceSpeed], None] = lambda speed: None

    def listen(self) -> None:
        """The body of a thread. Ends the process with the parent."""
        try:
            while True:
                wish: list[int] | Order | GiveBack | DeviceSpeed = pickle.load(self._stream)  # noqa: S301 - as with the task
                if self.load is None:
                    continue
                from ..device.paths import DeviceSpeed  # not before the first request
                from .report import GiveBack

                if isinstance(wish, GiveBack):
                    self.give_back(wish.offset_bytes, wish.wrong)
                elif isinstance(wish, DeviceSpeed):
                    self.device_is(wish)
                elif isinstance(wish, list):
                    self.load.want_parts(wish)
                else:
                    self.load.reorder(wish)
        except (EOFError, OSError):
            os._exit(1)


def _device_target(
    task: Task,
    manifest: Manifest,
    memory_fd: int,
    reporter: Reporter,
    manifest_sent: threading.Event,
    inbox: _Inbox,
) -> Target:
    """The target of weights that are another device's: it leaves images in the memory file, and reports them."""
    # Weights of this machine's processors need none of these.
    from ..device.ring import ImageRing, ring_bytes, stored_ring
    from ..device.sink import ImageSink, SentImage
    from ..memory.arena import map_shared
    from ..memory.limits import available_bytes
    from ..process.cpu import QUICK_S
    from .targets.device import DeviceTarget
    from .targets.images import ImageTarget

    def send(image: SentImage) -> None:
        manifest_sent.wait()
        with suppress(OSError):  # the parent is gone: the inbox ends this process
            reporter.send(image=image)

    sys.setswitchinterval(QUICK_S)  # for good: this process ends with the load
    room_bytes = available_bytes()
    sizes = stored_ring(manifest, room_bytes=room_bytes) if task.as_stored else None
    size_bytes = ring_bytes(manifest, room_bytes=room_bytes) if sizes is None else sizes.size_bytes
    memory = map_shared(memory_fd, size_bytes, what="the ring of images")
    target: DeviceTarget | ImageTarget
    if sizes is None:
        sink = ImageSink(manifest, ImageRing(memory), send, timeline=reporter.timeline)
        target = ImageTarget(manifest, sink)
    else:
        target = DeviceTarget(manifest, memory, sizes, send, timeline=reporter.timeline)
    inbox.give_back, inbox.device_is = target.give_back, target.device_is
    return target


def _tell_of_files(manifest: Manifest, files_fd: int) -> None:
    with socket.socket(fileno=files_fd) as sock, suppress(OSError):  # the parent may not read it
        sock.sendall(pickle.dumps(manifest.without_weights()))


def _import_ahead() -> None:
    """While the manifest is on its way."""
    time.sleep(HEAD_START_S)
    for name in AHEAD:
        import_module(name, __package__)


if __name__ == "__main__":
    with suppress(*OWNER_GONE):
        main(*map(int, sys.argv[1:]))
