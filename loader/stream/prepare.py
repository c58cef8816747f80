"""A loader's process before it is known what it is to load: it imports while its owner still reads its flags.

Imports less than anything else here: it is what a cold process does first of all.
"""

from __future__ import annotations

import os
import socket

from ..helper_process import HelperProcess


class Prepared:
    """A process that waits for its `Task`. Hand it to `launch`, or `discard` it."""

    def __init__(self, *, fork: bool = False) -> None:
        """Start it. `fork` is as `HelperProcess` has it.

        Raises `OSError` when the system refuses another process or its memory.
        """
        self.memory_fd = os.memfd_create("teneral-weights")  # what the weights will lie in
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
