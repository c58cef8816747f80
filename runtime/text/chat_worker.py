"""The renderer of chat templates, a program in a process of its own: `python chat_worker.py
SYS_PATH`.

A model's template is an untrusted program. Jinja's sandbox isolates it from Python, but does not
limit its time and memory, and much of that is spent inside single C calls that no thread can
interrupt. A process can be limited by the kernel and ended by its parent. It has no environment,
writes no files, and communicates only over the socket that is its standard input.

Each message is a length (4 bytes, big-endian) followed by that number of bytes of JSON. The first
one has the templates and the limits; each later one is a prompt to render. The answer is {"text":
…}, or {"error": kind, "message": …}.

Rendering is that of transformers, so that models see the prompts of their training: the same
environment, filters and functions. The program is run by its path, without the package, so it
imports none of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import jinja2.sandbox

MAX_ERROR_CHARS = 1_000


def main() -> None:
    """Serve until standard input ends."""
    with suppress(ImportError):  # reported by the first request
        # Its imports take 0.1 s, during which the first message may arrive.
        make_environment()
    templates: dict[str, jinja2.Template] = {}
    limits: dict[str, int] = {}
    while (message := _receive()) is not None:
        try:
            if "templates" in message:
                limits = message["limits"]
                _limit_process(limits)
                _set_time_zone(message["time_zone"])
                compiled = make_environment().from_string
                templates = {name: compiled(text) for name, text in message["templates"].items()}
                answer: dict[str, Any] = {}
            else:
                _limit_cpu(limits["cpu_s"])
                source = message.get("source")
                template = templates[message["template"]] if source is None else compiled(source)
                answer = {"text": _render(template, message["variables"], limits["output_chars"])}
        except Exception as error:  # noqa: BLE001 - any error of the template is an answer
            answer = {"error": _kind(error), "message": str(error)[:MAX_ERROR_CHARS] or type(error).__name__}
        _send(answer)


def make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that transformers gives chat templates."""
    import jinja2  # here and below: only this process imports it
    import jinja2.ext
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %}…{% endgeneration %}` marks an assistant's words for training; here it
        renders its content.
        """

        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """Jinja's own namespace, without names that have a meaning in Python."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # so that a variable may be called `self`
            self, *rest = args
            attributes = dict(*rest, **kwargs)
            for name in attributes:
                _refuse_private(name)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            super().__setitem__(name, value)

    def _refuse_private(name: str) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_now, namespace=Namespace)
    return environment


class Refused(Exception):
    """The template itself rejects these messages."""


def _refuse(message: Any) -> NoReturn:
    raise Refused(str(message))


def _now(format: str) -> str:
    return datetime.now().strftime(format)  # noqa: DTZ005 - templates show the model the local date


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """The JSON of a value. Jinja's own filter escapes for HTML, which is wrong in prompts."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class OutputTooLong(Exception):
    pass


def _render(template: jinja2.Template, variables: dict[str, Any], max_chars: int) -> str:
    pieces, num_chars = [], 0
    for piece in template.generate(**variables):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > max_chars:
            raise OutputTooLong(f"the prompt would be longer than {max_chars} characters")
    return "".join(pieces)


def _kind(error: Exception) -> str:
    """The kind of an error for the parent: its cause."""
    import jinja2

    if isinstance(error, Refused):
        return "refused"
    if isinstance(error, OutputTooLong):
        return "too long"
    if isinstance(error, jinja2.TemplateSyntaxError):
        return "syntax"
    if isinstance(error, jinja2.exceptions.SecurityError):
        return "unsafe"
    if isinstance(error, MemoryError | RecursionError | OverflowError):
        return "too much"
    return "failed"


def _set_time_zone(name: str | None) -> None:
    if name is not None:
        os.environ["TZ"] = name
        time.tzset()


def _limit_process(limits: dict[str, int]) -> None:
    # Not available on every platform that may import this module.
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"], limits["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_cpu(limits["cpu_s"])


def _limit_cpu(seconds: int) -> None:
    """Have the kernel end this process after `seconds` of CPU time from now on: its parent may be
    gone by then.
    """
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _receive() -> dict[str, Any] | None:
    header = _read_exactly(4)
    if header is None:
        return None
    body = _read_exactly(int.from_bytes(header, "big"))
    return None if body is None else json.loads(body)


def _send(answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode("ascii")
    data = memoryview(len(body).to_bytes(4, "big") + body)
    while data:
        data = data[os.write(0, data) :]


def _read_exactly(size_bytes: int) -> bytes | None:
    """Read exactly that many bytes; None if the parent has ended."""
    data = bytearray()
    while len(data) < size_bytes:
        piece = os.read(0, size_bytes - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    main()
