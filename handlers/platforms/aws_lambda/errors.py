"""Errors in Lambda's form: the only mapping of exceptions to `errorType`, and the JSON shapes.

A user's exception is reported like by AWS's runtime for Python: its class's name, its text, and the
frames from the handler on. This module knows no connections.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from msgspec import Struct

from ....loader.errors import TeneralError
from ....runtime.errors import HandlerError, ResultError

# Of an answer that is not streamed: Lambda's own limit.
MAX_RESPONSE_BYTES = 6 * 1024 * 1024 + 100
MAX_MESSAGE_CHARS = 64 << 10
MAX_FRAMES = 1_200  # more than Python's recursion limit

RESPONSE_TOO_LARGE = "Function.ResponseSizeTooLarge"
BEFORE_CHECKPOINT = "Runtime.BeforeSnapshotError"
AFTER_RESTORE = "Runtime.AfterRestoreError"

# In `handlers/function/`: the callers of the user's code.
_OUR_FRAMES = ("handler.py",)

Frame = tuple[str, int | None, str, str | None]  # file, line, function, text


class InputError(TeneralError):
    """An invalid invocation or environment of Lambda. `error_type` is that of AWS's runtime."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type


class ResponseTooLargeError(TeneralError):
    """The answer exceeds Lambda's limit. Nothing of it was sent."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(
            f"Response payload size ({size_bytes} bytes) exceeded maximum allowed payload size "
            f"({MAX_RESPONSE_BYTES} bytes).",
            hint="Put it into a store and answer with its address, or stream it: --lambda-streaming.",
        )


class ErrorReport(Struct, frozen=True):
    """An error as it is reported."""

    error_type: str
    message: str
    frames: Sequence[Frame] = ()
    # In place of frames: the location of a syntax error.
    place: str = ""

    def body(self, request_id: str = "") -> bytes:
        """The JSON of the error's body."""
        return _encode(
            {
                "errorMessage": self.message,
                "errorType": self.error_type,
                "requestId": request_id,
                "stackTrace": [self.place] if self.place else _formatted(self.frames),
            }
        )

    def cause(self) -> str:
        """X-Ray's JSON, for a header."""
        stack = [{"label": label, "path": path, "line": line} for path, line, label, _ in self.frames]
        text = {"message": self.message, "type": self.error_type, "stack": stack}
        paths = list(dict.fromkeys(path for path, *_ in self.frames))
        return json.dumps({"working_directory": os.getcwd(), "exceptions": [text], "paths": paths})


def report(error: BaseException) -> ErrorReport:
    """The report of an exception."""
    if isinstance(error, InputError):
        return ErrorReport(error.error_type, error.message)
    if isinstance(error, ResponseTooLargeError):
        return ErrorReport(RESPONSE_TOO_LARGE, str(error))
    if isinstance(error, ResultError):
        return ErrorReport("Runtime.MarshalError", f"Unable to marshal response: {error}")
    if isinstance(error, HandlerError) and error.__cause__ is not None:
        error = error.__cause__
    return ErrorReport(type(error).__name__, _text(error), _frames(error.__traceback__))


def init_report(error: BaseException) -> ErrorReport:
    """The report of an error without an invocation: importing the handler or loading the model
    failed.
    """
    if isinstance(error, HandlerError):
        cause = error.__cause__
        if isinstance(cause, SyntaxError):
            place = f'  File "{cause.filename}" Line {cause.lineno}\n    {cause.text}'
            return ErrorReport("Runtime.UserCodeSyntaxError", error.message, place=place)
        if cause is None or isinstance(cause, ImportError):
            error_type = "Runtime.HandlerNotFound" if cause is None else "Runtime.ImportModuleError"
            return ErrorReport(error_type, str(error))
    return report(error)


def _text(error: BaseException) -> str:
    """The exception's own text, made by users' code, which may raise."""
    text = "(its text is unavailable)"
    with contextlib.suppress(Exception):
        text = str(error)
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}…"


def _frames(trace: TracebackType | None) -> list[Frame]:
    """The frames from the first one of the user's code on."""
    frames: list[Frame] = [
        (frame.filename, frame.lineno, frame.name, frame.line) for frame in traceback.extract_tb(trace)
    ]
    ours = str(Path(__file__).parents[2] / "function")
    while frames and _is_ours(Path(frames[0][0]), ours):
        del frames[0]
    return frames[:MAX_FRAMES]


def _formatted(frames: Sequence[Frame]) -> list[str]:
    """The lines in the format of AWS's runtime: from bare tuples, without columns to mark."""
    return traceback.format_list([(path, line or 0, label, text) for path, line, label, text in frames])


def _is_ours(path: Path, folder: str) -> bool:
    return path.name in _OUR_FRAMES and str(path.parent) == folder


def _encode(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    # A lone surrogate in an exception's text.
    except UnicodeEncodeError:
        return json.dumps(value).encode()
