"""A loader's process before it is known what it is to load: it imports while its owner still reads its flags.

Imports less than anything else here: it is what a cold process does first of all.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from ..helper_process import HelperProcess

if TYPE_CHECKING:
    from .arena import Reserve, Reserved


class Prepared:
    """A process that waits for its `Task`. Hand it to `launch`, or `discard` it."""

    def __init__(self, *, fork: bool = False, reserve_bytes: int = 0) -> None:
        """Start it. `fork` is as `HelperProcess` has it. So much of the weights' memory is taken from the system ahead,
        there, and here once `reserve` was called.

        Raises `OSError` when the system refuses another process or its memory.
        """
        self.memory_fd = os.memfd_create("teneral-weights")  # what the weights will lie in
        self._reserve: Reserve | None = None
        if reserve_bytes:
            os.ftruncate(self.memory_fd, reserve_bytes)
        # Here it tells which small files there are, to whoever reads them while the owner imports: a pickled manifest.
        self.files, theirs = socket.socketpair()
        try:
            fds = (self.memory_fd, theirs.fileno())
            self.process = HelperProcess(".loader.stream.child", fds=fds, fork=fork)
        except OSError:
            os.close(self.memory_fd)
            self.files.close()
            raise
        finally:
            theirs.close()

    def reserve(self) -> None:
        """Map the memory here as well, if any was asked for. Starts a thread: no process can be forked after it.

        Raises `InsufficientMemoryError`.
        """
        from .arena import Reserve  # of those who wait there is time

        if os.fstat(self.memory_fd).st_size:
            self._reserve = Reserve(self.memory_fd)

    def hand_over_reserve(self) -> Reserved | None:
        """What `reserve` has mapped, if it was called."""
        return None if self._reserve is None else self._reserve.hand_over()

    def give_up_reserve(self) -> None:
        """The weights will lie elsewhere."""
        os.ftruncate(self.memory_fd, 0)
        self._reserve = None

    def discard(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self.process.socket.close()
        self.files.close()
        os.close(self.memory_fd)


def is_possible() -> bool:
    """Whether this system has memory that can be shared without a name (Linux: memfd)."""
    return hasattr(os, "memfd_create")
