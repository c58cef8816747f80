"""A load in a process of its own: the same gates and slabs as `WeightLoad`, filled by a child.

The child (`child.py`) opens the source, reads the manifest, and streams into memory that both
processes map; this side only opens gates as they are reported. So nothing that holds this process's
GIL, the import of torch above all, can keep bytes from being read, verified and decoded, and
nothing of that slows the import. `docs/decisions/` says what it gains.

The child is ours alone: it is given no more than the address and the options, over a private
socket, and it ends when this process does, however that ends.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Literal, Protocol, Self

from ..errors import LoadCancelledError, LoadError, TeneralError
from ..format.manifest import Manifest, Tier
from ..memory.arena import Arena, as_array, map_shared
from ..memory.refine_locks import RefineLocks
from ..timeline import Timeline
from .accounting import LoadProgress, LoadState, LoadStatistics
from .gates import Readiness
from .launch import Launched
from .options import Order
from .report import GiveBack, Report

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..device.paths import DeviceSpeed
    from ..device.sink import SentImage


class ImageReceiver(Protocol):
    """A receiver of a load's images, for another device. Called by one thread, in this order;
    `fail` also by others.
    """

    def opened(self, manifest: Manifest, ring: memoryview) -> None:
        """Images of this manifest's parts will lie in the ring."""

    def put(self, image: SentImage) -> None:
        """Take an image, which stays in the ring until it is given back."""

    def fail(self, error: TeneralError) -> None:
        """Take the reason why no more images come."""


class ProcessLoad:
    """A load by another process (`base.HostLoad`). It always asks for parts that are waited for,
    and hears of no others.

    The slabs live as long as their views: neither `close` nor the child's end frees memory that a
    view shows.
    """

    place: Literal["host"] = "host"  # of the weights
    reserved_bytes = 0
    paged_groups: frozenset[int] = frozenset()
    experts = None

    def __init__(
        self, launched: Launched, *, timeline: Timeline | None = None, images: ImageReceiver | None = None
    ) -> None:
        """Take over a load that was launched. Its spans go to `timeline`, whose origin it must have
        been given.

        `images` takes the images of a load that was launched for another device: then there are no
        slabs here, and a gate opens when all of its parts' images were there.
        """
        self._images = images
        self._timeline = timeline or Timeline(started_at=launched.task.started_at)
        self._child = launched.process
        self._opened = threading.Event()
        self._manifest: Manifest | None = None
        self._arena: Arena | None = None
        self._readiness: Readiness | None = None
        self._refine_locks: RefineLocks | None = None
        self._progress_at_s = 0.0
        self._error: TeneralError | None = None
        self._progress: LoadProgress | None = None
        self._options = launched.task.load_options
        self._statistics: LoadStatistics | None = None
        self._maps_ahead = False
        self._wanted: set[int] = set()  # parts that the child was asked for
        self._lock = threading.Lock()  # guards the error against the end
        self._sending = threading.Lock()  # held while a message goes to the child, which may be stopped
        self._thread = threading.Thread(
            target=self._listen, args=(launched.memory_fd,), name="teneral-load", daemon=True
        )
        self._thread.start()

    @property
    def failure(self) -> TeneralError | None:
        """The error that ended the load early; None where its owner did."""
        return None if isinstance(self._error, LoadCancelledError) else self._error

    @property
    def manifest(self) -> Manifest:
        """Waits until the child has read it. Raises the load's error."""
        self._opened.wait()
        if self._manifest is None:
            raise self._error or LoadCancelledError("the load ended before its manifest was read")
        return self._manifest

    def wait(self, group: int, tier: Tier = Tier.REFINE, timeout_s: float | None = None) -> None:
        if self._readiness is None:
            _ = self.manifest
            assert self._readiness is not None
        self._readiness.wait(group, tier, timeout_s)

    def wait_parts(
        self, numbers: Collection[int], timeout_s: float | None = None, *, asks: bool = True
    ) -> None:
        if self._readiness is None:
            _ = self.manifest
            assert self._readiness is not None
        if not self._readiness.are_there(numbers):
            self.want_parts(numbers)
            self._readiness.wait_parts(numbers, timeout_s)

    def wait_checks(self, timeout_s: float | None = None) -> None:
        _ = self.manifest
        assert self._readiness is not None
        self._readiness.wait_checks(timeout_s)

    def want_parts(self, numbers: Collection[int]) -> None:
        with self._lock:
            new = [number for number in numbers if number not in self._wanted]
            self._wanted.update(new)
            if not new:
                return
        self._tell(new)

    def is_ready(self, group: int, tier: Tier = Tier.REFINE) -> bool:
        return self._readiness is not None and self._readiness.is_open(group, tier)

    def slab(self, group: int) -> npt.NDArray[np.uint8]:
        _ = self.manifest
        assert self._arena is not None
        return as_array(self._arena.slabs[group])

    def discard(self) -> None:
        if self._arena is not None:
            self._arena.discard()

    def progress(self) -> LoadProgress:
        """The child's last report: at every gate, and a few times a second between them."""
        return self._progress or LoadProgress(LoadState.IDLE, 0, 0, 0, 0, 0, 0, 0, order=self._options.order)

    def reading(self, group: int) -> AbstractContextManager[None]:
        assert self._refine_locks is not None, "nothing can be used before the manifest is there"
        return self._refine_locks.reading(group)

    @property
    def refine_wait_s(self) -> float:
        return 0.0 if self._refine_locks is None else self._refine_locks.waited_s

    @property
    def order(self) -> Order:
        return self.progress().order

    def reorder(self, order: Order) -> None:
        self._tell(order)

    def left_s(self) -> float:
        return max(0.0, self.progress().left_s - (time.monotonic() - self._progress_at_s))

    def statistics(self) -> LoadStatistics | None:
        """The cost of the load; None until it has ended."""
        return self._statistics

    def cancel(self) -> None:
        """End the child; closed gates raise `LoadCancelledError`. Nothing after the end."""
        self._fail(LoadCancelledError("the load was cancelled"))
        if self._statistics is None:
            self._child.kill()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the child has ended; False when it has not after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Cancel if it is still under way, and wait for the child. Idempotent. The weights stay."""
        self.cancel()
        # It may be writing to the node's cache still, which can be interrupted at any point.
        self._child.kill()
        self.join()

    def release(self) -> None:
        """Forget the slabs, after `close`: a reference to this load then holds none of their
        memory.
        """
        self._arena = self._refine_locks = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self, memory_fd: int) -> None:
        """The body of the one thread: take reports until the child ends."""
        try:
            with self._child.socket as sock, sock.makefile("rb") as stream:
                while True:
                    self._take(pickle.load(stream), memory_fd)  # noqa: S301 - written by our own child over a private socket
        except (EOFError, OSError, pickle.UnpicklingError):
            status = self._child.wait()
            if self._statistics is None:
                self._fail(_died(status))
        except Exception as error:  # noqa: BLE001 - a defect fails the load like any other error
            self._child.kill()
            self._child.wait()
            if not isinstance(error, TeneralError):  # else our half of the shared memory was refused
                message = f"the load stopped on a defect: {type(error).__name__}: {error}"
                error = LoadError(message).with_traceback(error.__traceback__)
            self._fail(error)
        finally:
            if self._refine_locks is not None:
                self._refine_locks.close()
            os.close(memory_fd)

    def _take(self, report: Report, memory_fd: int) -> None:
        for span in report.spans:
            self._timeline.add(span.lane, span.name, span.start_s, span.end_s, **span.attributes)
        if report.progress is not None:
            self._progress, self._progress_at_s = report.progress, time.monotonic()
        if report.manifest is not None:
            self._open(report.manifest, memory_fd, report.ring_bytes)
        if report.image is not None and self._images is not None:
            self._images.put(report.image)
        if (report.gates or report.parts) and self._readiness is not None:
            self._readiness.open(report.gates, report.parts)
        if report.has_all_pages and self._arena is not None and not self._maps_ahead:
            self._maps_ahead = True
            threading.Thread(target=self._arena.map_ahead, name="teneral-map", daemon=True).start()
        if report.statistics is not None:
            self._statistics = report.statistics
            # All is there, also parts that were requested too late to be reported.
            if self._readiness is not None:
                self._readiness.open(parts=range(len(self.manifest.parts)))
                while self._readiness.num_checks:
                    self._readiness.settle_check()
        if report.error is not None:
            self._fail(report.error)

    def _open(self, manifest: Manifest, memory_fd: int, ring_bytes: int) -> None:
        with self._lock:
            if self._error is not None:
                return
            if self._images is not None:
                self._images.opened(manifest, map_shared(memory_fd, ring_bytes, what="the ring of images"))
            else:
                slabs = [group.slab_bytes for group in manifest.groups]
                self._arena = Arena(slabs, shared_fd=memory_fd)
                self._refine_locks = RefineLocks(len(manifest.groups), shared_fd=memory_fd)
            may_check = self._images is None and self._options.verify_files
            self._readiness = Readiness(
                len(manifest.groups),
                [(part.group, part.tier) for part in manifest.parts],
                num_checks=len(manifest.stated_blobs) if may_check else 0,
            )
            self._manifest = manifest
        self._opened.set()

    def give_back(self, offset_bytes: int, wrong: bool = False) -> None:
        """The device is done with the image at that place of the ring, or found a stored one wrong."""
        self._tell(GiveBack(offset_bytes, wrong))

    def device_is(self, speed: DeviceSpeed) -> None:
        """Tell the child the speed of the device that the images go to."""
        self._tell(speed)

    def _tell(self, wish: list[int] | Order | GiveBack | DeviceSpeed) -> None:
        # Its thread reads whatever else it does; a child that is gone is the listening thread's to
        # tell of.
        with self._sending, suppress(OSError):
            self._child.socket.sendall(pickle.dumps(wish))

    def _fail(self, error: TeneralError) -> None:
        with self._lock:
            if self._error is not None or (self._statistics is not None and self._manifest is not None):
                return
            self._error = error
        if self._readiness is not None:
            self._readiness.fail(error)
        if self._images is not None:
            self._images.fail(error)
        self._opened.set()


def _died(status: int) -> LoadError:
    if status < 0:
        return LoadError(
            f"the process that loads the weights was killed by signal {-status}",
            hint="Signal 9 usually means that the container is out of memory: give it more, or serve a smaller model.",
        )
    return LoadError(
        f"the process that loads the weights ended early, with status {status}",
        hint="Its own messages are above. Set loader = thread to load within the server's own process.",
    )
