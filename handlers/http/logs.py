"""Logs as JSON, one object a line, for systems that read them by field."""

from __future__ import annotations

import json
import logging
import time


def write_json() -> None:
    """Have the root logger's handlers write JSON. Changes the process."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines())


class JsonLines(logging.Formatter):
    """`timestamp`, `level`, `logger`, `message`, the record's own `fields`, and of an exception `error`."""

    def __init__(self) -> None:
        super().__init__()
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "timestamp": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
