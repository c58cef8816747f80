"""Starting the process that tokenises; imports nothing else. `remote.py` takes it over."""

from __future__ import annotations

import pickle
import socket
from typing import NamedTuple

from ...loader.load.options import LoadOptions
from ...loader.process.helper import HelperProcess, ProcessContext
from ...loader.sources.base import SourceOptions

NUM_LINES = 3  # requests that it works on at the same time: a long text must not hold up all others


class TokenizerTask(NamedTuple):
    """What the child is told, once."""

    url: str
    source_options: SourceOptions
    load_options: LoadOptions
    started_at: float  # the timeline's origin, on the clock that all processes of a machine share
    context: ProcessContext | None = None  # the child takes these; None: it has them


class LaunchedTokenizer(NamedTuple):
    """A process that waits for the manifest, to be handed to a `TokenizerProcess`, which ends it."""

    task: TokenizerTask
    process: HelperProcess
    lines: tuple[socket.socket, ...]  # each for one request at a time


class PreparedTokenizer:
    """A process that waits for its task. `launch` or `discard` it."""

    def __init__(self, *, files: socket.socket | None = None, fork: bool = False) -> None:
        """Start it; return at once. `fork` is as `HelperProcess` has it. Raises `OSError` when the system refuses.

        At `files`, which is closed here, it may learn of the manifest sooner than from this process.
        """
        if files is None:
            files, nobody = socket.socketpair()
            nobody.close()
        pairs = [socket.socketpair() for _ in range(NUM_LINES)]
        self._lines = tuple(ours for ours, _ in pairs)
        try:
            fds = [files.fileno(), *(theirs.fileno() for _, theirs in pairs)]
            self._process = HelperProcess(".runtime.text.tokenizer_child", fds=fds, fork=fork)
        except OSError:
            for ours in self._lines:
                ours.close()
            raise
        finally:
            files.close()
            for _, theirs in pairs:
                theirs.close()

    def launch(self, task: TokenizerTask) -> LaunchedTokenizer:
        """Have it begin; return at once."""
        self._process.socket.sendall(pickle.dumps(task))
        return LaunchedTokenizer(task, self._process, self._lines)

    def discard(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for sock in (self._process.socket, *self._lines):
            sock.close()
