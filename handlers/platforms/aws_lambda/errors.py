"""Errors as Lambda wants them: the one place that knows which exception becomes which `errorType`, and the shapes.

An exception of the user's own is told as AWS's runtime for Python tells it: its class's name, its text, and the frames
from the handler on. It knows no connections.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ....loader.errors import TeneralError
from ....runtime.errors import HandlerError, ResultError

MAX_RESPONSE_BYTES = 6 * 1024 * 1024 + 100  # of an answer that is not streamed: Lambda's own bound
MAX_MESSAGE_CHARS = 64 << 10
MAX_FRAMES = 1_200  # more than Python's recursion limit has

RESPONSE_TOO_LARGE = "Function.ResponseSizeTooLarge"
BEFORE_CHECKPOINT = "Runtime.BeforeSnapshotError"
AFTER_RESTORE = "Runtime.AfterRestoreError"

_OUR_FRAMES = ("handler.py",)  # of `handlers/function/`: what calls the user's code

Frame = tuple[str, int | None, str, str | None]  # file, line, function, text


class InputError(TeneralError):
    """An invalid invocation or environment of Lambda. `error_type` is as AWS's runtime calls it."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type


class ResponseTooLargeError(TeneralError):
    """The answer is more than Lambda takes. Nothing of it was sent."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(
            f"Response payload size ({size_bytes} bytes) exceeded maximum allowed payload size "
            f"({MAX_RESPONSE_BYTES} bytes).",
            hint="Put it into a store and answer with its address, or stream it: --lambda-streaming.",
        )


@dataclass(frozen=True, slots=True)
class Report:
    """An error as it is told."""

    error_type: str
    message: str
    frames: Sequence[Frame] = ()
    place: str = ""  # in place of frames: where a file is wrong that was not run

    def body(self, request_id: str = "") -> bytes:
        """Lambda's JSON."""
        return _encode(
            {
                "errorMessage": self.message,
                "errorType": self.error_type,
                "requestId": request_id,
                "stackTrace": [self.place] if self.place else _formatted(self.frames),
            }
        )

    def cause(self) -> str:
        """X-Ray's JSON, which goes into a header."""
        stack = [{"label": label, "path": path, "line": line} for path, line, label, _ in self.frames]
        told = {"message": self.message, "type": self.error_type, "stack": stack}
        paths = list(dict.fromkeys(path for path, *_ in self.frames))
        return json.dumps({"working_directory": os.getcwd(), "exceptions": [told], "paths": paths})


def report(error: BaseException) -> Report:
    """What Lambda is told of an exception."""
    if isinstance(error, InputError):
        return Report(error.error_type, error.message)
    if isinstance(error, ResponseTooLargeError):
        return Report(RESPONSE_TOO_LARGE, str(error))
    if isinstance(error, ResultError):
        return Report("Runtime.MarshalError", f"Unable to marshal response: {error}")
    if isinstance(error, HandlerError) and error.__cause__ is not None:
        error = error.__cause__
    return Report(type(error).__name__, _text(error), _frames(error.__traceback__))


def init_report(error: BaseException) -> Report:
    """The same where there is no invocation: the handler could not be imported, or the model not be loaded."""
    if isinstance(error, HandlerError):
        cause = error.__cause__
        if isinstance(cause, SyntaxError):
            place = f'  File "{cause.filename}" Line {cause.lineno}\n    {cause.text}'
            return Report("Runtime.UserCodeSyntaxError", error.message, place=place)
        if cause is None or isinstance(cause, ImportError):
            error_type = "Runtime.HandlerNotFound" if cause is None else "Runtime.ImportModuleError"
            return Report(error_type, str(error))
    return report(error)


def _text(error: BaseException) -> str:
    """Its own words, which are users' code, too, and may raise."""
    told = "(its text cannot be had)"
    with contextlib.suppress(Exception):
        told = str(error)
    return told if len(told) <= MAX_MESSAGE_CHARS else f"{told[:MAX_MESSAGE_CHARS]}…"


def _frames(trace: TracebackType | None) -> list[Frame]:
    """From the first frame that is not ours."""
    frames: list[Frame] = [
        (frame.filename, frame.lineno, frame.name, frame.line) for frame in traceback.extract_tb(trace)
    ]
    ours = str(Path(__file__).parents[2] / "function")
    while frames and _is_ours(Path(frames[0][0]), ours):
        del frames[0]
    return frames[:MAX_FRAMES]


def _formatted(frames: Sequence[Frame]) -> list[str]:
    """As AWS's runtime has them: from bare tuples, which know no columns to mark."""
    return traceback.format_list([(path, line or 0, label, text) for path, line, label, text in frames])


def _is_ours(path: Path, folder: str) -> bool:
    return path.name in _OUR_FRAMES and str(path.parent) == folder


def _encode(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, in an exception's text
        return json.dumps(value).encode()
