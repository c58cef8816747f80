"""Launching a load: a process that imports ahead of its task, and the task that it is given.

Imports next to nothing, as a cold process starts here, while its owner still reads its flags.
`process_load.py` adopts the load later, when the process is at work already.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, NamedTuple

from ..process.helper import HelperProcess

if TYPE_CHECKING:
    from ..process.helper import ProcessContext
    from ..sources.base import SourceOptions
    from .options import LoadOptions


# Parts go as they are stored to a GPU, which verifies, decodes and merges them; else as planes that the host has
# decoded. Off until it has run on a device (docs/gpu.md, "Parts as they are stored").
AS_STORED = False


class Prepared:
    """A process that waits for its `Task`. Hand it to `launch`, or `discard` it."""

    def __init__(self, *, fork: bool = False) -> None:
        """Start it. `fork` is as `HelperProcess` has it. Raises `OSError` when the system refuses
        another process.
        """
        self.memory_fd = os.memfd_create("teneral-weights")  # what the weights will lie in
        # It sends the list of small files here, a pickled manifest, for the process that reads them
        # while the owner imports.
        self.files, theirs = socket.socketpair()
        try:
            fds = (self.memory_fd, theirs.fileno())
            self.process = HelperProcess(".loader.load.child", fds=fds, fork=fork)
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
    """True if this system has memory that can be shared without a name (Linux: memfd)."""
    return hasattr(os, "memfd_create")


class Task(NamedTuple):
    """The child's task, sent once."""

    url: str
    digest: bytes | None
    source_options: SourceOptions
    load_options: LoadOptions
    started_at: float  # the timeline's origin, on the clock that all processes of a machine share
    # Another one's weights: what lies in the memory file is then a ring of images.
    device: str = "cpu"
    context: ProcessContext | None = None  # the child takes these; None: it has them
    as_stored: bool = AS_STORED


class Launched(NamedTuple):
    """A load that is under way, to be handed to a `ProcessLoad`, which ends it and closes the file."""

    task: Task
    process: HelperProcess
    memory_fd: int  # the memory file that the weights, or images of them, will lie in


def launch(task: Task, prepared: Prepared | None = None) -> Launched:
    """Start the load; return at once. Takes `prepared` over, where there is one.

    Raises `OSError` when the system refuses another process or its memory.
    """
    import pickle  # the process of `Prepared` starts before it

    if prepared is None:
        prepared = Prepared()
        prepared.files.close()  # not needed
    # A few hundred bytes, which the socket takes whether or not the child is there to read them;
    # with context there are more, and it is there.
    prepared.process.socket.sendall(pickle.dumps(task))
    return Launched(task, prepared.process, prepared.memory_fd)
