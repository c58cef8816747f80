"""Sending for a model's weights: tells a process to load them, and imports next to nothing.

`process_load.py` then takes the load over, while that process is at work already.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, NamedTuple

from ..helper_process import HelperProcess, Surroundings
from ..sources.base import SourceOptions
from .options import LoadOptions
from .prepare import Prepared

if TYPE_CHECKING:
    from .arena import Reserved


class Task(NamedTuple):
    """What the child is told, once."""

    url: str
    digest: bytes | None
    source_options: SourceOptions
    load_options: LoadOptions
    started_at: float  # the timeline's origin, on the clock that all processes of a machine share
    device: str = "cpu"  # another one's weights: what lies in the memory file is then a ring of images
    surroundings: Surroundings | None = None  # the child takes these; None: it has them


class Launched(NamedTuple):
    """A load that is under way, to be handed to a `ProcessLoad`, which ends it and closes the file."""

    task: Task
    process: HelperProcess
    memory_fd: int  # the memory file that the weights, or images of them, will lie in
    reserve: Reserved | None = None  # a mapping of its beginning, where there is one


def launch(task: Task, prepared: Prepared | None = None) -> Launched:
    """Start the load; return at once. Takes `prepared` over, where there is one.

    Raises `OSError` when the system refuses another process or its memory.
    """
    if prepared is None:
        prepared = Prepared()
        prepared.files.close()  # nobody asked
    # A few hundred bytes, which the socket takes whether or not the child is there to read them; with surroundings
    # there are more, and it is there.
    prepared.process.socket.sendall(pickle.dumps(task))
    return Launched(task, prepared.process, prepared.memory_fd, prepared.hand_over_reserve())
