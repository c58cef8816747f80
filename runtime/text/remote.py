"""The client of a tokenizer in a child process.

Parsing a large vocabulary takes 0.4 s and holds the GIL, which a cold start needs for importing
torch. So a child (`tokenizer_child.py`), started before that, reads and parses the tokenizer's
files. It also encodes, in parallel to the engine's work; texts are decoded here, by a table that it
sends, if the decoder allows one (`pieces.py`).

The child belongs to this process and has no state that cannot be rebuilt: if it is killed, the next
caller starts another.
"""

from __future__ import annotations

import pickle
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from io import BufferedRWPair
from typing import TYPE_CHECKING, Any

from ...loader.errors import TeneralError
from ...loader.timeline import Timeline
from ..errors import ModelError
from .launch import LaunchedTokenizer, PreparedTokenizer

if TYPE_CHECKING:
    from ...loader.format.manifest import Manifest
    from .backend import EncodedPair
    from .chat import ChatWorker
    from .pieces import PieceTable
    from .settings import TextSettings
    from .tokenizer import TextTokenizer


# Of a text that occupies its line for 10 ms or more.
LONG_CHARS = 32 << 10


class TokenizerProcess:
    """A `Backend`, once `load` has returned. Thread-safe."""

    def __init__(
        self, launched: LaunchedTokenizer, *, timeline: Timeline, chat_worker: ChatWorker | None = None
    ) -> None:
        """Adopt a launched process, whose spans go to `timeline`, and optionally an idle renderer
        of chat templates.
        """
        self._timeline = timeline
        self._child = _Child(launched)
        self._chat_worker = chat_worker
        self._manifest: Manifest | None = None
        self._table: PieceTable | None = None
        self._receiver: threading.Thread | None = None  # of the table
        self._lock = threading.Lock()  # held while starting another child, and at the end
        self._closed = False
        self._special_ids: dict[str, int | None] = {}
        self.vocab_size = 0
        self.max_token_bytes: int | None = None

    @property
    def pid(self) -> int:
        """The id of the current child process."""
        return self._child.pid

    def load(
        self,
        manifest: Manifest,
        *,
        adjust: Callable[[TextSettings], TextSettings] = lambda settings: settings,
    ) -> TextTokenizer:
        """Block until the child has parsed the tokenizer. The result closes this backend.

        `adjust` maps the model's settings, as soon as they arrive and before the vocabulary, to
        those to use. Raises the errors of reading, and `ModelError`; the child has then ended.
        """
        self._manifest = manifest.without_weights()
        try:
            settings = adjust(self._child.settings(self._manifest))
            # Not above: it would hold up the request for the manifest, and that for the first weights.
            from .tokenizer import TextTokenizer, make_chat_template

            with self._lock:
                worker, self._chat_worker = self._chat_worker, None
            chat_template = make_chat_template(settings, worker)
            try:
                facts = self._child.receive()
                self.vocab_size, self.max_token_bytes, self._special_ids, spans = facts
                with self._lock:
                    self._require_open()
                    self._expect_table(self._child)
            except TeneralError:
                chat_template.close()
                raise
        except TeneralError:
            self.close()
            raise
        for span in spans:
            self._timeline.add(span.lane, span.name, span.start_s, span.end_s, **span.attributes)
        return TextTokenizer(self, settings, chat_template=chat_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokens: list[int] = self._ask("encode", text, add_special_tokens=add_special_tokens)
        return tokens

    def encode_pairs(self, pairs: Sequence[tuple[str, str | None]]) -> list[EncodedPair]:
        encoded: list[EncodedPair] = self._ask("encode_pairs", list(pairs))
        return encoded

    def offsets(self, text: str) -> list[tuple[int, int]]:
        offsets: list[tuple[int, int]] = self._ask("offsets", text)
        return offsets

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        if self._table is not None:
            return self._table.decode(tokens, skip_special_tokens=skip_special_tokens)
        text: str = self._ask("decode", list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def id_to_piece(self, token: int) -> str | None:
        piece: str | None = self._ask("id_to_piece", token)
        return piece

    def piece_to_id(self, piece: str) -> int | None:
        if piece in self._special_ids:
            return self._special_ids[piece]
        token: int | None = self._ask("piece_to_id", piece)
        return token

    def tokenizer_json(self) -> bytes:
        data: bytes = self._ask("tokenizer_json")
        return data

    def close(self) -> None:
        """End the child; waiting callers get a `ModelError`. Idempotent."""
        with self._lock:
            self._closed = True
            self._child.end()
            if self._chat_worker is not None:
                self._chat_worker.end()
            receiver = self._receiver  # it was started with the lock held
        if receiver is not None:
            receiver.join()

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        child = self._child
        for _ in range(2):
            try:
                return child.ask(method, arguments, options)
            except (EOFError, OSError, pickle.UnpicklingError):
                child = self._another(child)
        raise ModelError(
            "the process that tokenises texts ended twice in a row",
            hint="Signal 9 usually means that the container is out of memory: give it more.",
        )

    def _another(self, dead: _Child) -> _Child:
        """Start a child in place of one that has ended, or return the one that another thread has
        started.
        """
        with self._lock:
            self._require_open()
            if self._child is dead:
                dead.end()
                assert self._manifest is not None
                self._child = _Child(PreparedTokenizer().launch(dead.task))
                self._child.settings(self._manifest)
                self._child.receive()
                self._expect_table(self._child)
            return self._child

    def _require_open(self) -> None:
        if self._closed:
            raise ModelError("the tokenizer was closed")

    def _expect_table(self, child: _Child) -> None:
        """Receive the table in a thread of its own. With the lock held."""

        def take() -> None:
            with suppress(TeneralError):  # the child has ended: the next one decodes
                self._table = child.receive()

        self._receiver = threading.Thread(target=take, name="teneral-pieces", daemon=True)
        self._receiver.start()


class _Child:
    """The client side of one process."""

    def __init__(self, launched: LaunchedTokenizer) -> None:
        self.task = launched.task
        self._process = launched.process
        self._control = launched.process.socket.makefile("rwb")
        self._lines: queue.SimpleQueue[BufferedRWPair] = queue.SimpleQueue()
        # Long texts leave one line for short ones.
        self._long = threading.BoundedSemaphore(len(launched.lines) - 1)
        self._sockets = (launched.process.socket, *launched.lines)
        self._files = (self._control, *(line.makefile("rwb") for line in launched.lines))
        for file in self._files[1:]:
            self._lines.put(file)

    @property
    def pid(self) -> int:
        return self._process.pid

    def settings(self, manifest: Manifest) -> TextSettings:
        # If it has ended, `receive` reports it.
        with suppress(OSError):
            pickle.dump(manifest, self._control)
            self._control.flush()
        settings: TextSettings = self.receive()
        return settings

    def receive(self) -> Any:
        """Receive its next message. Raises the error that it sends, and `ModelError` if it has
        ended.
        """
        try:
            message = pickle.load(self._control)  # noqa: S301 - written by our own child, over a private socket
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            status = self._process.wait()
            raise ModelError(
                f"the process that tokenises texts ended early, with status {status}",
                hint="Its output is above. Status -9 usually means that the container is out of memory.",
            ) from error
        if isinstance(message, TeneralError):
            raise message
        return message

    def ask(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call a method in the child.

        Blocks while all lines are in use; long texts may use all but one. Raises the method's
        error, or `EOFError` or `OSError` if the child has ended.
        """
        with self._long if _is_long(arguments) else nullcontext():
            return self._ask(method, arguments, options)

    def _ask(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        line = self._lines.get()
        try:
            pickle.dump((method, arguments, options), line, pickle.HIGHEST_PROTOCOL)
            line.flush()
            succeeded, value = pickle.load(line)  # noqa: S301 - as above
        except ValueError as error:  # the file was closed
            raise EOFError from error
        finally:
            # A broken one too: its next user must notice the failure.
            self._lines.put(line)
        if not succeeded:
            raise value
        return value

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(
                    socket.SHUT_RDWR
                    # Unblocks readers: closing alone waits for the files made of it.
                )
            sock.close()
        for file in self._files:
            with suppress(OSError, ValueError):  # pending writes and reads are obsolete
                file.close()


def _is_long(arguments: tuple[Any, ...]) -> bool:
    match arguments:
        case [[(str(), _), *_] as pairs, *_]:
            return sum(len(text) + len(other or "") for text, other in pairs) > LONG_CHARS
        case [str() | list() as text_or_tokens, *_]:
            return len(text_or_tokens) > LONG_CHARS
    return False
