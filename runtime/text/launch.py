"""The launch of the tokenizer process; imports nothing else. `remote.py` adopts it."""

from __future__ import annotations

import pickle
import socket
from typing import TYPE_CHECKING, NamedTuple

from ...loader.load.options import LoadOptions
from ...loader.process.helper import HelperProcess, ProcessContext
from ...loader.sources.base import SourceOptions

if TYPE_CHECKING:
    from ...loader.load.targets.shared import HeldFiles

# Concurrent requests: a long text must not block all others.
NUM_LINES = 3


class TokenizerTask(NamedTuple):
    """The task of the child, sent once."""

    url: str
    source_options: SourceOptions
    load_options: LoadOptions
    # The timeline's origin, on the clock that all processes of a machine share.
    started_at: float
    # The context that the child takes; None: it has it already.
    context: ProcessContext | None = None
    held: HeldFiles | None = None  # in a file that the child has inherited


class LaunchedTokenizer(NamedTuple):
    """A process that waits for the manifest, to be passed to a `TokenizerProcess`, which ends it."""

    task: TokenizerTask
    process: HelperProcess
    lines: tuple[socket.socket, ...]  # each for one request at a time


class PreparedTokenizer:
    """A process that waits for its task. End with `launch` or `discard`."""

    def __init__(
        self, *, files: socket.socket | None = None, fork: bool = False, held: HeldFiles | None = None
    ) -> None:
        """Start the process; return at once. `fork` is that of `HelperProcess`. Raises `OSError` if
        the system refuses. The process takes what is `held` from memory.

        From `files`, which is closed here, it may get the manifest sooner than from this process.
        """
        if files is None:
            files, unused = socket.socketpair()
            unused.close()
        pairs = [socket.socketpair() for _ in range(NUM_LINES)]
        self._lines = tuple(ours for ours, _ in pairs)
        self._held = held
        try:
            fds = [files.fileno(), *(theirs.fileno() for _, theirs in pairs)]
            if held is not None:
                fds.append(held.fd)
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
        """Send the task; return at once."""
        task = task._replace(held=self._held)
        self._process.socket.sendall(pickle.dumps(task))
        return LaunchedTokenizer(task, self._process, self._lines)

    @property
    def process(self) -> HelperProcess:
        """It says nothing on its socket before its task, but for the end of the socket."""
        return self._process

    def discard(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for sock in (self._process.socket, *self._lines):
            sock.close()
