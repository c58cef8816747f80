"""Chat templates: from messages to the text of a prompt, rendered within bounds.

Templates are Jinja programs that come with a model, so they are not trusted: a child process
renders them (`chat_worker.py`), with limits on its memory, output and time; if it exceeds one, the
kernel ends it and it is restarted. Its time limit is CPU time, so a busy machine only makes it
slower; a thread of this process waits for `MAX_WAIT_S` at most. This module knows nothing of tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CapacityError, ModelError, RequestError

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_MESSAGES = 10_000
MAX_MESSAGES_BYTES = 8 << 20  # as JSON
MAX_PROMPT_CHARS = 1 << 20
MAX_RENDER_S = 5.0  # of the process's CPU time; a template takes about a millisecond
# For that much of it, on a machine that computes other things or lets the process stand.
MAX_WAIT_S = 30.0
# Starting takes 0.1 s of CPU, which a container that is loading a model may not have at once.
MAX_START_S = 30.0
# Address space of the renderer process; it uses 25 MiB of it at the start.
MEMORY_BYTES = 256 << 20

# The longest prompt, with every character escaped as two surrogates of six bytes each.
MAX_ANSWER_BYTES = 16 << 20

Message = Mapping[str, Any]

_HINT = "A correct template takes a millisecond and little memory: check that this is the model's own."


class ChatTemplate:
    """The templates of one model. Thread-safe; renders one prompt at a time.

    Its process ends with it, or by `close`.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        max_prompt_chars: int = MAX_PROMPT_CHARS,
        max_render_s: float = MAX_RENDER_S,
        worker: ChatWorker | None = None,
    ) -> None:
        """`templates` has "default", and may have "tool_use" for requests with tools.
        `special_tokens` (bos_token and so on) are variables of the templates. An idle `worker` is
        adopted when one is needed. Raises `ModelError` for a template that is too long; a syntax
        error is only found by the first `render`.
        """
        for name, text in templates.items():
            if len(text) > MAX_TEMPLATE_CHARS:
                raise ModelError(f"the chat template {name!r} is longer than {MAX_TEMPLATE_CHARS} characters")
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._max_prompt_chars = max_prompt_chars
        self._max_render_s = max_render_s
        self._waiting = worker
        self._worker: ChatWorker | None = None
        self._broken = ""  # the reason why no template can be rendered
        self._lock = threading.Lock()

    @property
    def templates(self) -> Mapping[str, str]:
        """The templates by name; empty if the model has none."""
        return self._templates

    def start(self) -> None:
        """Start the process now, if there are templates, so that the first prompt need not wait for
        it.

        Returns at once, and raises nothing: if it cannot be started, `render` raises the error.
        """
        with self._lock, contextlib.suppress(ModelError, OSError):
            if self._templates and self._worker is None:
                self._worker = self._start_worker()

    def close(self) -> None:
        """End the process. A later `render` starts a new one."""
        with self._lock:
            self._drop_worker()
            if self._waiting is not None:
                self._waiting.end()
                self._waiting = None

    @property
    def process_id(self) -> int | None:
        """The id of the renderer process; None while there is none."""
        worker = self._worker
        return None if worker is None else worker.process.pid

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        source: str | None = None,
        keeps_parts: bool = False,
    ) -> str:
        """Render the prompt, special tokens included as text.

        `variables` are passed to the template as well. `source` is a template that replaces the
        model's. With `keeps_parts`, content that is a list of texts and images stays one.

        Raises `RequestError` if there is no template, if it rejects these messages or fails on
        them, or if `source` is at fault; `ModelError` if the model's template is at fault
        (including its time limit); `CapacityError` if too many prompts are waiting.
        """
        if source is None and not self._templates:
            raise RequestError(
                "the model has no chat template",
                param="messages",
                hint="Serve it with --chat-template FILE, or send the prompt as text to /v1/completions.",
            )
        if source is not None and len(source) > MAX_TEMPLATE_CHARS:
            raise RequestError(
                f"chat_template may have {MAX_TEMPLATE_CHARS} characters", param="chat_template"
            )
        given = {
            **self._special_tokens,
            **(variables or {}),
            "messages": plain_messages(messages, keeps_parts=keeps_parts),
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        request = _encode({"template": name, "source": source, "variables": given})
        if not self._lock.acquire(timeout=MAX_START_S):
            raise CapacityError("too many prompts are waiting for the chat template")
        try:
            answer = self._ask(request)
            if "error" in answer:
                raise _error(str(answer["error"]), str(answer.get("message", "")))
        except ModelError as error:
            if source is None:
                raise
            raise RequestError(f"chat_template is invalid: {error.message}", param="chat_template") from error
        finally:
            self._lock.release()
        return str(answer["text"])

    def _ask(self, request: bytes) -> dict[str, Any]:
        try:
            if self._worker is None and not self._broken:
                self._worker = self._start_worker()
            if self._worker is not None and not self._worker.is_ready:
                self._await_ready(self._worker)
            if self._broken or self._worker is None:
                raise ModelError(f"the model's chat template is invalid: {self._broken}")
            return self._worker.exchange(request, self._max_render_s)
        except TimeoutError:
            self._drop_worker()
            raise ModelError(
                f"the chat template exceeded its time limit of {self._max_render_s:g} s", hint=_HINT
            ) from None
        except (OSError, ValueError) as error:  # the process ended, or its answer is invalid
            self._drop_worker()
            raise ModelError(
                "the process that renders the chat template ended: it may have used too much memory or time",
                hint=_HINT,
            ) from error

    def _await_ready(self, worker: ChatWorker) -> None:
        answer = worker.receive(_Patience(worker.process.pid, MAX_START_S, MAX_START_S))
        worker.is_ready = True
        if "error" in answer:
            self._broken = str(answer.get("message", ""))
            self._drop_worker()

    def _start_worker(self) -> ChatWorker:
        limits = {
            "memory_bytes": MEMORY_BYTES,
            "output_chars": self._max_prompt_chars,
            "cpu_s": int(self._max_render_s) + 1,
        }
        task = {"templates": self._templates, "limits": limits, "time_zone": os.environ.get("TZ")}
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            try:
                waiting.send(_encode(task), time.monotonic() + MAX_START_S)
            except OSError:  # it has ended meanwhile
                waiting.end()
            else:
                return waiting
        worker = ChatWorker()
        worker.send(_encode(task), time.monotonic() + MAX_START_S)
        return worker

    def _drop_worker(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


class ChatWorker:
    """The renderer process, and the socket to it. Not thread-safe. End it with `end`; it also ends
    with its owner.
    """

    def __init__(self) -> None:
        """Start the process: it imports its modules, and waits for templates. Raises `ModelError`
        if it cannot be started.
        """
        self._socket, theirs = socket.socketpair()
        program = Path(__file__).with_name("chat_worker.py")
        paths = json.dumps([path for path in sys.path if path])
        # Python's own libraries may be there.
        passed_on = ("LD_LIBRARY_PATH",)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(program), paths],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in passed_on if name in os.environ},  # no secrets
                cwd="/",
                # Ctrl-C ends the server, which ends this process.
                start_new_session=True,
            )
        except OSError as error:
            self._socket.close()
            raise ModelError(
                f"the process that renders chat templates could not be started: {error}"
            ) from error
        finally:
            theirs.close()
        self.is_ready = False
        self.end = weakref.finalize(self, _end_process, self.process, self._socket)

    def exchange(self, request: bytes, limit_s: float) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises `TimeoutError` where that takes more than `limit_s` of the process's CPU time, or
        `MAX_WAIT_S`; `OSError` if the process has ended, `ValueError` for an invalid answer.
        """
        patience = _Patience(self.process.pid, limit_s, MAX_WAIT_S)
        self.send(request, time.monotonic() + MAX_WAIT_S)
        return self.receive(patience)

    def send(self, data: bytes, deadline_s: float) -> None:
        self._socket.settimeout(_until(deadline_s))
        self._socket.sendall(data)

    def receive(self, patience: _Patience) -> dict[str, Any]:
        size_bytes = int.from_bytes(self._read(4, patience), "big")
        if size_bytes > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of {size_bytes} bytes")
        answer = json.loads(self._read(size_bytes, patience))
        if not isinstance(answer, dict):
            raise ValueError("an answer that is not an object")
        return answer

    def _read(self, size_bytes: int, patience: _Patience) -> bytes:
        data = bytearray()
        while len(data) < size_bytes:
            self._socket.settimeout(patience.left_s())
            try:
                piece = self._socket.recv(min(size_bytes - len(data), 1 << 20))
            except TimeoutError:
                continue  # unless the patience is at its end
            if not piece:
                raise ConnectionResetError("the process has ended")
            data += piece
        return bytes(data)


def mentions(templates: Mapping[str, str], name: str) -> bool:
    """True if a template uses a variable of this name."""
    return any(re.search(rf"\b{re.escape(name)}\b", text) for text in templates.values())


def plain_messages(messages: Sequence[Message], *, keeps_parts: bool = False) -> list[dict[str, Any]]:
    """Messages in the form that templates expect: without keys that have no value, and with parts
    of text joined, unless it `keeps_parts`, among which images may be then.

    Raises `RequestError`, naming the message that is not a mapping with a role, or that has content
    other than text.
    """
    if not isinstance(messages, list | tuple) or not 0 < len(messages) <= MAX_MESSAGES:
        raise RequestError(f"messages must be a list of 1 to {MAX_MESSAGES} messages", param="messages")
    plain = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"{where} must be an object with a role", param=where)
        kept = {key: value for key, value in message.items() if value is not None}
        if "content" in kept:
            content = kept["content"]
            if not keeps_parts or not isinstance(content, list) or not all(map(_is_part, content)):
                kept["content"] = _plain_text(content, f"{where}.content")
        plain.append(kept)
    return plain


def _plain_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where} must be a string or a list of parts", param=where)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where} has a part that is not text", param=where, hint="This model reads text."
            )
        texts.append(text)
    return "".join(texts)


def _is_part(part: Any) -> bool:
    """True for a text or an image, which has nothing but its place."""
    return part == {"type": "image"} or (
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _encode(message: Mapping[str, Any]) -> bytes:
    try:
        body = json.dumps(message).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the messages are not JSON: {error}", param="messages") from error
    if len(body) > MAX_MESSAGES_BYTES:
        raise RequestError(f"the messages are larger than {MAX_MESSAGES_BYTES} bytes", param="messages")
    return len(body).to_bytes(4, "big") + body


def _error(kind: str, message: str) -> RequestError | ModelError:
    if kind == "refused":
        return RequestError(f"the model's chat template rejects these messages: {message}", param="messages")
    if kind == "failed":
        return RequestError(f"the model's chat template fails on these messages: {message}", param="messages")
    if kind == "too long":
        return RequestError(message, param="messages", hint="Send fewer or shorter messages.")
    if kind == "unsafe":
        return ModelError(f"the model's chat template attempts a forbidden operation: {message}", hint=_HINT)
    return ModelError(f"the model's chat template exceeds its limits: {message}", hint=_HINT)


class _Patience:
    """The time left to wait for a process: until it has used `cpu_s` of CPU time, where the system
    reports that, and `wait_s` in all.
    """

    def __init__(self, process_id: int, cpu_s: float, wait_s: float) -> None:
        self._process_id = process_id
        self._cpu_s = cpu_s
        self._wait_s = wait_s
        self._began_s = time.monotonic()
        self._used_before_s = _used_s(process_id)

    def left_s(self) -> float:
        """The time after which to look again. Raises `TimeoutError` when none is left."""
        elapsed_s = used_s = time.monotonic() - self._began_s
        if elapsed_s >= self._cpu_s and self._used_before_s is not None:
            used_now_s = _used_s(self._process_id)
            used_s = elapsed_s if used_now_s is None else used_now_s - self._used_before_s
        left_s = min(self._cpu_s - used_s, self._wait_s - elapsed_s)
        if left_s <= 0:
            raise TimeoutError
        return max(left_s, 0.01)


def _used_s(process_id: int) -> float | None:
    """The CPU time that a process has used; None where the system does not report it."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _until(deadline_s: float) -> float:
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    return remaining_s


def _end_process(process: subprocess.Popen[bytes], sock: socket.socket) -> None:
    sock.close()
    process.kill()
    process.wait()
