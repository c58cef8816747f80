"""`teneral invoke`: one call of a function handler, with a model of its own.

Results are printed as they are made: a line of JSON for each value, texts and bytes unchanged. The
process ends with the call.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ...loader.errors import UsageError
from ...runtime.config import ServeConfig
from ...runtime.errors import HandlerError
from ...runtime.instance.instance import Instance
from .context import Context
from .handler import Handler, load_handler, run

MAX_EVENT_BYTES = 64 << 20


def invoke_once(spec: str, event_file: str, config: ServeConfig, *, timeout_s: float) -> int:
    """Load the handler, read the event ('-' is standard input), start the model, print the results.
    Returns 0.

    Raises `HandlerError`, `UsageError` for an event that is not JSON, and the errors of the model's
    load.
    """
    if not 0 < timeout_s <= 86_400:
        raise UsageError("--timeout-s must be from 0 to 86400 seconds", key="timeout_s")
    handler = _load(spec)
    try:
        event = read_event(event_file)
        with Instance(config) as instance:
            context = Context(instance, request_id=f"local-{uuid.uuid4().hex[:12]}", timeout_s=timeout_s)
            asyncio.run(_print_results(handler, event, context))
    finally:
        handler.close()
    return 0


def _load(spec: str) -> Handler:
    """`load_handler`, with a hint about --debug in errors of the developer's own code: unlike those of a call, they are
    not logged.
    """
    try:
        return load_handler(spec)
    except HandlerError as error:
        if error.__cause__ is not None and not error.hint:
            error.hint = "Run it again with --debug to see the whole traceback."
        raise


def read_event(place: str) -> Any:
    """The JSON value in a file, or on standard input for '-'; None if it is empty. Raises
    `UsageError`.
    """
    try:
        if place == "-":
            data = (
                b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read(MAX_EVENT_BYTES + 1)
            )
        else:
            with Path(place).open("rb") as file:
                data = file.read(MAX_EVENT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the event {place}: {error.strerror}", key="event") from error
    if len(data) > MAX_EVENT_BYTES:
        raise UsageError(f"the event {place} is larger than {MAX_EVENT_BYTES} bytes", key="event")
    if not data.strip():
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the event {place} is not JSON: {error}", key="event") from error


async def _print_results(handler: Handler, event: Any, context: Context) -> None:
    results = run(handler, event, context)
    async with aclosing(results):  # type: ignore[type-var]
        async for value in results:
            _print_value(value)


def _print_value(value: Any) -> None:
    """Print and flush, so that a reader of the pipe sees values as the function yields them."""
    out = sys.stdout
    if isinstance(value, bytes):
        out.flush()
        out.buffer.write(value)
    else:
        out.write(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) + "\n")
    out.flush()
