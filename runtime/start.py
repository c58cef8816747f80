"""The first thing that an instance does: send for its weights, before anything else is even imported.

Imports little, and nothing that starts a thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..loader.pin import split_pin
from ..loader.stream.launch import Task, is_possible, launch
from ..loader.timeline import Timeline
from .config import ServeConfig

if TYPE_CHECKING:
    from ..loader.stream.process_load import ProcessLoad


def start_load(config: ServeConfig, timeline: Timeline, *, fork: bool = False) -> ProcessLoad | None:
    """A started load in a process of its own; None where the configuration or the system wants threads instead.

    `fork` is for a process that has just begun, as `HelperProcess` has it. Returns at once. Raises `UsageError` for an
    address that cannot be meant, and `OSError` when the system refuses another process.
    """
    if config.loader != "process" or not is_possible():
        return None
    address, digest = split_pin(config.model)
    task = Task(address, digest, config.source_options, config.load_options, timeline.started_at)
    launched = launch(task, fork=fork)
    from ..loader.stream.process_load import ProcessLoad  # while the other process is at work

    return ProcessLoad(launched, timeline=timeline)
