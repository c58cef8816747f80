"""The program of the tokenizer process: reads a model's tokenizer, parses it, and serves it.

    python -m teneral.runtime.text.tokenizer_child CONTROL_FD FILES_FD LINE_FD … [HELD_FD]

Over the control socket it receives the model's address, and then the manifest, which the loader may
send sooner over FILES_FD; it answers with the settings, a ready message, and the table of pieces. A
thread for each line serves requests: a request is the name of a `Backend` method with its
arguments, the answer its result or error. The process ends with its parent.

It imports nothing before it has the manifest, and parses no large vocabulary before the first text
was decoded: until then the cores have more urgent work.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ...loader.process.helper import OWNER_GONE

if TYPE_CHECKING:
    from io import BufferedRWPair

    from ...loader.format.manifest import Manifest
    from ...loader.timeline import Timeline
    from .backend import LocalBackend
    from .launch import TokenizerTask
    from .pieces import PieceTable
    from .subset import GrowingBackend, SubsetTokenizer

# Taking the vocabulary out of the tokenizer holds the GIL for 0.1 s, and parsing it uses the core
# for 0.3 s: not while the first text is computed or arrives. A server that generates no texts, only
# embeddings for instance, waits no longer than this.
TABLE_DELAY_S = 1.0
MAX_GROWING_S = 10.0
# Encoding must not wait for the table of pieces.
SWITCH_INTERVAL_S = 0.5e-3
METHODS = frozenset(
    ("encode", "encode_pairs", "offsets", "decode", "id_to_piece", "piece_to_id", "tokenizer_json")
)


def main(control_fd: int, files_fd: int, *line_fds: int) -> None:
    # Ctrl-C reaches the whole process group: the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    control = socket.socket(fileno=control_fd)
    stream = control.makefile("rwb")
    task: TokenizerTask = pickle.load(stream)  # noqa: S301 - written by our own parent, like all other messages here
    if task.context is not None:
        task.context.apply()
    manifest = _first_manifest(control, stream, files_fd)
    from ...loader.errors import TeneralError
    from ...loader.memory.limits import return_free_memory
    from ...loader.timeline import Timeline
    from .launch import NUM_LINES

    timeline = Timeline(started_at=task.started_at)
    try:
        backend, special_tokens = _load(task, manifest, timeline, stream)
    except TeneralError as error:
        _send(stream, error)
        os._exit(0)
    gc.freeze()
    gc.enable()  # it may be off in a forked process
    for fd in line_fds[:NUM_LINES]:  # more are open for what is held
        threading.Thread(target=_serve, args=(fd, backend), daemon=True).start()
    special_ids = {text: backend.piece_to_id(text) for text in special_tokens.values()}
    _send(stream, (backend.vocab_size, backend.max_token_bytes, special_ids, timeline.spans()))
    if not backend.is_whole:
        backend.has_decoded.wait(MAX_GROWING_S)
    time.sleep(TABLE_DELAY_S)
    with suppress(TeneralError):  # errors of the vocabulary: later requests report them
        _send(stream, _table(backend.current))
        backend.complete()
    return_free_memory()  # a third of it: the vocabulary's text, the table
    while control.recv(1 << 16):
        # The manifest, which was known already: the parent then sends nothing, and this process
        # ends with it.
        pass
    os._exit(0)


def _first_manifest(control: socket.socket, stream: BufferedRWPair, files_fd: int) -> Manifest:
    """Receive the manifest from the loader or the parent, whichever is first."""
    manifest: Manifest | None = None
    with socket.socket(fileno=files_fd) as files, files.makefile("rb") as loader:
        ready, _, _ = select.select([files, control], [], [])
        if files in ready:
            with suppress(EOFError):  # the loader has ended
                manifest = pickle.load(loader)  # noqa: S301
    return manifest or pickle.load(stream)  # noqa: S301


def _load(
    task: TokenizerTask, manifest: Manifest, timeline: Timeline, stream: BufferedRWPair
) -> tuple[GrowingBackend, dict[str, str]]:
    """Load the tokenizer. Returns it and the special tokens by name, and sends the settings on the
    way.
    """
    from ...loader.artifact import open_model
    from ..files import ModelFiles
    from .settings import TextSettings, read_tokenizer_file

    source = open_model(task.url, task.source_options, timeline=timeline)
    files = ModelFiles(source, manifest, task.load_options, task.held).read
    try:
        with timeline.span("tokenizer", "settings"):
            settings = TextSettings.read(files)
            # The first tokens of a structured answer wait for these, and for nothing below.
            _send(stream, settings)
        with timeline.span("tokenizer", "import"):
            import tokenizers  # noqa: F401

            from .subset import GrowingBackend
        with timeline.span("tokenizer", "fetch"):
            data = read_tokenizer_file(files)
        special_tokens = settings.special_tokens
        with timeline.span("tokenizer", "load") as details:
            backend = GrowingBackend(data, special_tokens)
            details["vocabulary"] = "whole" if backend.is_whole else "as texts need it"
        return backend, special_tokens
    finally:
        source.close()
        if task.held is not None:
            os.close(task.held.fd)  # else a base's memory would stay as long as this process does


def _table(backend: LocalBackend | SubsetTokenizer) -> PieceTable | None:
    import json

    from .pieces import make_piece_table

    tokenizer = backend.tokenizer
    if tokenizer.decoder is None:
        return None
    added = tokenizer.get_added_tokens_decoder()
    return make_piece_table(
        json.loads(tokenizer.decoder.__getstate__()),
        backend.vocabulary,
        frozenset(token for token, entry in added.items() if entry.special),
    )


def _serve(fd: int, backend: GrowingBackend) -> None:
    from ...loader.errors import TeneralError
    from ..errors import ModelError

    with socket.socket(fileno=fd) as sock, sock.makefile("rwb") as stream:
        while True:
            try:
                name, arguments, options = pickle.load(stream)  # noqa: S301
            except (EOFError, OSError):
                return
            answer: object
            try:
                if name not in METHODS:
                    raise ModelError(f"unknown method {name}")
                answer = True, getattr(backend, name)(*arguments, **options)
            except TeneralError as error:
                answer = False, error
            except Exception as error:  # noqa: BLE001 - every request must get an answer
                answer = False, ModelError(f"the tokenizer failed: {type(error).__name__}: {error}")
            _send(stream, answer)


def _send(stream: BufferedRWPair, message: object) -> None:
    pickle.dump(message, stream, pickle.HIGHEST_PROTOCOL)
    stream.flush()


if __name__ == "__main__":
    with suppress(*OWNER_GONE):
        main(*map(int, sys.argv[1:]))
