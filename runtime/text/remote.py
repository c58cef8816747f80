"""A tokenizer in a process of its own, as it looks from here.

Parsing a large vocabulary takes 0.4 s and holds the GIL, which a cold start needs for importing torch. So a child
(`tokenizer_child.py`), started before that, reads the tokenizer's files and parses them. It goes on to encode, beside
the engine's own work; texts are decoded here, by a table that it sends, where the decoder allows one (`pieces.py`).

The child is ours alone and knows nothing that cannot be had again: should it be killed, the next one who needs it
starts another.
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
from .pairs import EncodedPair
from .tokenizer import TextTokenizer, make_chat_template

if TYPE_CHECKING:
    from ...loader.format.manifest import Manifest
    from .chat import ChatWorker
    from .pieces import PieceTable
    from .settings import TextSettings


LONG_CHARS = 32 << 10  # of a text that holds up its line for 10 ms and more


class TokenizerProcess:
    """A `Backend`, once `load` has returned. Thread-safe."""

    def __init__(
        self, launched: LaunchedTokenizer, *, timeline: Timeline, chat_worker: ChatWorker | None = None
    ) -> None:
        """Takes over a process that was launched; its spans go to `timeline`. And one that waits for chat templates."""
        self._timeline = timeline
        self._child = _Child(launched)
        self._chat_worker = chat_worker
        self._manifest: Manifest | None = None
        self._table: PieceTable | None = None
        self._lock = threading.Lock()  # over starting another child, and over the end
        self._closed = False
        self._special_ids: dict[str, int | None] = {}
        self.vocab_size = 0
        self.max_token_bytes: int | None = None

    @property
    def pid(self) -> int:
        """Of the child that there is now."""
        return self._child.pid

    def load(
        self,
        manifest: Manifest,
        *,
        adjust: Callable[[TextSettings], TextSettings] = lambda settings: settings,
    ) -> TextTokenizer:
        """Blocks until the child has parsed the tokenizer. The result closes this. `adjust` is given the model's
        settings as soon as they are there, before the vocabulary, and gives those to use. Raises what reading it
        raises, and `ModelError`; the child has ended then.
        """
        self._manifest = manifest.without_weights()
        try:
            settings = adjust(self._child.settings(self._manifest))
            worker, self._chat_worker = self._chat_worker, None
            chat_template = make_chat_template(settings, worker)
            try:
                facts = self._child.receive()
                self.vocab_size, self.max_token_bytes, self._special_ids, spans = facts
            except TeneralError:
                chat_template.close()
                raise
        except TeneralError:
            self.close()
            raise
        for span in spans:
            self._timeline.add(span.lane, span.name, span.start_s, span.end_s, **span.attributes)
        self._expect_table(self._child)
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
        """End the child; whoever waits for it gets a `ModelError`. Idempotent."""
        with self._lock:
            self._closed = True
            self._child.end()
            if self._chat_worker is not None:
                self._chat_worker.end()

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
        """A child in place of one that has ended; the one that is there if somebody has seen to it already."""
        with self._lock:
            if self._closed:
                raise ModelError("the tokenizer was closed")
            if self._child is dead:
                dead.end()
                assert self._manifest is not None
                self._child = _Child(PreparedTokenizer().launch(dead.task))
                self._child.settings(self._manifest)
                self._child.receive()
                self._expect_table(self._child)
            return self._child

    def _expect_table(self, child: _Child) -> None:
        def take() -> None:
            with suppress(TeneralError):  # the child has ended: texts are decoded by the next one
                self._table = child.receive()

        threading.Thread(target=take, name="teneral-pieces", daemon=True).start()


class _Child:
    """One process, from this side."""

    def __init__(self, launched: LaunchedTokenizer) -> None:
        self.task = launched.task
        self._process = launched.process
        self._control = launched.process.socket.makefile("rwb")
        self._lines: queue.SimpleQueue[BufferedRWPair] = queue.SimpleQueue()
        # Long texts leave one line for all that is short.
        self._long = threading.BoundedSemaphore(len(launched.lines) - 1)
        self._sockets = (launched.process.socket, *launched.lines)
        self._files = (self._control, *(line.makefile("rwb") for line in launched.lines))
        for file in self._files[1:]:
            self._lines.put(file)

    @property
    def pid(self) -> int:
        return self._process.pid

    def settings(self, manifest: Manifest) -> TextSettings:
        with suppress(OSError):  # it has ended: `receive` says so
            pickle.dump(manifest, self._control)
            self._control.flush()
        settings: TextSettings = self.receive()
        return settings

    def receive(self) -> Any:
        """What it says next. Raises the error that it says, and `ModelError` when it has ended."""
        try:
            message = pickle.load(self._control)  # noqa: S301 - written by our own child, nobody else has it
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            status = self._process.wait()
            raise ModelError(
                f"the process that tokenises texts ended early, with status {status}",
                hint="What it said stands above. Status -9 usually means that the container is out of memory.",
            ) from error
        if isinstance(message, TeneralError):
            raise message
        return message

    def ask(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Blocks while all lines are in use, of which long texts may use all but one. Raises the method's error;
        `EOFError` or `OSError` when it has ended.
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
            self._lines.put(line)  # a broken one too: whoever waits for it must learn of it
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
                )  # readers give up: closing alone waits for the files made of it
            sock.close()
        for file in self._files:
            with suppress(OSError, ValueError):  # what was to be written, or is being read, is of no use
                file.close()


def _is_long(arguments: tuple[Any, ...]) -> bool:
    match arguments:
        case [[(str(), _), *_] as pairs, *_]:
            return sum(len(text) + len(other or "") for text, other in pairs) > LONG_CHARS
        case [str() | list() as text_or_tokens, *_]:
            return len(text_or_tokens) > LONG_CHARS
    return False
