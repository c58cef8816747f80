"""The first thing that an instance does: send for its weights and its tokenizer, before anything else is even imported.

Imports little, and nothing that starts a thread.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, Self

from ..loader.pin import split_pin
from ..loader.stream.launch import Launched, Task, launch
from ..loader.stream.prepare import Prepared, is_possible
from ..loader.timeline import Timeline
from .config import ServeConfig
from .text.launch import LaunchedTokenizer, TokenizerTask, launch_tokenizer

if TYPE_CHECKING:
    from ..loader.stream.process_load import ProcessLoad
    from .text.remote import TokenizerProcess


class SentFor(NamedTuple):
    """Processes at work of which nobody takes heed yet."""

    load: Launched
    tokenizer: LaunchedTokenizer

    def let_go(self) -> None:
        """Close this process's ends, of which another process has copies. They go on for that one."""
        for sock in (self.load.process.socket, self.tokenizer.process.socket, *self.tokenizer.lines):
            sock.close()
        os.close(self.load.memory_fd)

    def take_over(self, timeline: Timeline) -> Helpers:
        """Heed them, here. `timeline` has the origin that they were given."""
        from ..loader.stream.process_load import ProcessLoad  # while they are at work
        from .text.remote import TokenizerProcess

        return Helpers(
            ProcessLoad(self.load, timeline=timeline), TokenizerProcess(self.tokenizer, timeline=timeline)
        )


class Helpers(NamedTuple):
    """The processes beside an instance's own: each does what must not wait for this one's GIL."""

    load: ProcessLoad
    tokenizer: TokenizerProcess

    def close(self) -> None:
        """End them. The weights that have arrived stay. Idempotent."""
        self.load.close()
        self.tokenizer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def send_for(
    config: ServeConfig, timeline: Timeline, *, prepared: Prepared | None = None, fork: bool = False
) -> SentFor | None:
    """Both at work; None where the configuration or the system wants threads instead.

    Takes `prepared` over. `fork` is for a process that has just begun, as `HelperProcess` has it. Returns at once.
    Raises `UsageError` for an address that cannot be meant, and `OSError` when the system refuses another process.
    """
    if config.loader != "process" or not is_possible():
        if prepared is not None:
            prepared.discard()
        return None
    address, digest = split_pin(config.model)
    source, options = config.source_options, config.load_options
    prepared = prepared or Prepared(fork=fork)
    return SentFor(
        launch(Task(address, digest, source, options, timeline.started_at), prepared),
        launch_tokenizer(
            TokenizerTask(address, source, options, timeline.started_at), files=prepared.files, fork=fork
        ),
    )
