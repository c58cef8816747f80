"""Logs for systems that read them by field: JSON, one object a line, and CloudWatch's embedded metrics.

CloudWatch reads metrics out of logs ("Specification: Embedded metric format" in its user guide). A line is one JSON
object; `_aws` names the members that are metrics, their units and their dimensions. One line for each request with a
body and one for each start is far below its bounds: 100 metrics a directive, 30 dimensions a set, 1 MB a line.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Mapping
from typing import TextIO

NAMESPACE = "Teneral"
MAX_DIMENSION_CHARS = 250
# HTTP statuses that tell the client to come back later.
REFUSALS = (429, 503)


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
            **({"request_id": request_id} if (request_id := getattr(record, "request_id", None)) else {}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class EmfWriter:
    """Writes lines to `out`, standard output by default. Thread-safe. A reader that has gone away costs the metrics and
    nothing else.
    """

    def __init__(self, model: str, out: TextIO | None = None) -> None:
        self._model = dimension(model)
        self._out = out
        self._lock = threading.Lock()

    def request_ended(
        self,
        status: int,
        seconds: float,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        generated_tokens: int,
        first_token_s: float | None,
        is_cold: bool,
        request_id: str,
    ) -> None:
        """Write a request's figures. `first_token_s` counts from its arrival, as `seconds` does; `cached_tokens` of
        the prompt were found in the KV pool; a cold request came while nothing could be answered yet.
        """
        metrics: dict[str, tuple[str, float]] = {
            "RequestSeconds": ("Seconds", seconds),
            "ServerErrors": ("Count", int(status >= 500 and status not in REFUSALS)),
            "Refusals": ("Count", int(status in REFUSALS)),
            "ColdRequests": ("Count", int(is_cold)),
        }
        if generated_tokens:
            metrics["PromptTokens"] = ("Count", prompt_tokens)
            metrics["CachedTokens"] = ("Count", cached_tokens)
            metrics["GeneratedTokens"] = ("Count", generated_tokens)
        if first_token_s is not None:
            metrics["FirstTokenSeconds"] = ("Seconds", first_token_s)
        self._write({"Model": self._model}, metrics, {"status": status, "request_id": request_id})

    def start_ended(self, kind: str, outcome: str, seconds: float, read_bytes: int) -> None:
        """Write a start's figures; `kind` and `outcome` as in `Metrics.start_ended`. `read_bytes` came from the store
        until then.
        """
        metrics = {
            "StartSeconds": ("Seconds", seconds),
            "FailedStarts": ("Count", float(outcome != "ok")),
            "ReadBytes": ("Bytes", float(read_bytes)),
        }
        self._write({"Model": self._model, "Kind": dimension(kind)}, metrics, {})

    def _write(
        self,
        dimensions: Mapping[str, str],
        metrics: Mapping[str, tuple[str, float]],
        properties: Mapping[str, object],
    ) -> None:
        finite = {name: (unit, value) for name, (unit, value) in metrics.items() if math.isfinite(value)}
        directive = {
            "Namespace": NAMESPACE,
            "Dimensions": [list(dimensions)],
            "Metrics": [{"Name": name, "Unit": unit} for name, (unit, _) in finite.items()],
        }
        line = {
            "_aws": {"Timestamp": time.time_ns() // 1_000_000, "CloudWatchMetrics": [directive]},
            **dimensions,
            **{name: value for name, (_, value) in finite.items()},
            **properties,
        }
        text = json.dumps(line) + "\n"
        out = self._out or sys.stdout
        with self._lock:
            try:
                out.write(text)
                out.flush()
            except (OSError, ValueError):
                return  # closed


def dimension(value: str) -> str:
    """The value as CloudWatch takes it: printable ASCII, not empty, not starting with a colon."""
    text = ascii(value)[1:-1][:MAX_DIMENSION_CHARS].strip().lstrip(":")
    return text or "unnamed"
