"""Sending for a model's weights: starts the process that loads them, and imports nothing else.

This is the first thing that a cold process does. `process_load.py` then takes the load over, while the child is at
work already.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass

from ..helper_process import HelperProcess
from ..sources.base import SourceOptions
from .options import LoadOptions


@dataclass(frozen=True, slots=True)
class Task:
    """What the child is told, once."""

    url: str
    digest: bytes | None
    source_options: SourceOptions
    load_options: LoadOptions
    started_at: float  # the timeline's origin, on the clock that all processes of a machine share


@dataclass(frozen=True, slots=True)
class Launched:
    """A load that is under way, to be handed to a `ProcessLoad`, which ends it and closes the file."""

    task: Task
    process: HelperProcess
    memory_fd: int  # the memory file that the weights will lie in


def is_possible() -> bool:
    """Whether this system has memory that can be shared without a name (Linux: memfd)."""
    return hasattr(os, "memfd_create")


def launch(task: Task, *, fork: bool = False) -> Launched:
    """Start the load; return at once. `fork` is as `HelperProcess` has it.

    Raises `OSError` when the system refuses another process or its memory.
    """
    memory_fd = os.memfd_create("teneral-weights")
    try:
        process = HelperProcess(".loader.stream.child", fds=(memory_fd,), fork=fork)
    except OSError:
        os.close(memory_fd)
        raise
    # A few hundred bytes, which the socket takes whether or not the child is there to read them.
    process.socket.sendall(pickle.dumps(task))
    return Launched(task, process, memory_fd)
