"""Log lines in the format of Lambda's console, with the request id of their invocation.

As text, or as JSON if the function is configured so (`AWS_LAMBDA_LOG_FORMAT`). This module knows no
invocations: the code that begins one sets `REQUEST_ID`, in the context that its threads and tasks
inherit.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Mapping
from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")

_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}


def set_up_logging(level: str, environment: Mapping[str, str]) -> None:
    """Write all log records to standard error, which Lambda collects. Changes the process.

    The level that the function is configured with (`AWS_LAMBDA_LOG_LEVEL`) takes precedence.
    """
    handler = logging.StreamHandler(sys.stderr)
    is_json = environment.get("AWS_LAMBDA_LOG_FORMAT", "").upper() == "JSON"
    handler.setFormatter(LambdaJsonLines() if is_json else TextLines())
    configured = _LEVELS.get(environment.get("AWS_LAMBDA_LOG_LEVEL", "").upper())
    logging.basicConfig(level=configured or level.upper(), handlers=[handler], force=True)
    logging.getLogger("torch").setLevel(logging.WARNING)


class TextLines(logging.Formatter):
    """The format of AWS's runtime for Python, with the logger's name."""

    def __init__(self) -> None:
        super().__init__(
            "[%(levelname)s]\t%(asctime)s.%(msecs)03dZ\t%(request_id)s\t%(name)s: %(message)s", _TIME_FORMAT
        )
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        record.request_id = _request_id(record)
        # A line break would split an entry in two; a carriage return does not, and is shown as a
        # break.
        return super().format(record).replace("\n", "\r")


class LambdaJsonLines(logging.Formatter):
    """The fields of Lambda's JSON logs."""

    def __init__(self) -> None:
        super().__init__()
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "timestamp": f"{self.formatTime(record, _TIME_FORMAT)}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "message": record.getMessage(),
            "logger": record.name,
            "requestId": _request_id(record),
        }
        if record.exc_info and record.exc_info[1] is not None:
            _, error, trace = record.exc_info
            line["errorType"] = type(error).__name__
            line["errorMessage"] = str(error)
            line["stackTrace"] = traceback.format_tb(trace)  # type: ignore[assignment]
        return json.dumps({name: value for name, value in line.items() if value})


def _request_id(record: logging.LogRecord) -> str:
    """The request id of the record itself (set by the context's logger), or of the invocation that
    it was logged in.
    """
    return getattr(record, "request_id", None) or REQUEST_ID.get()
