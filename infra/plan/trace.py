"""Traces of arrivals: readers of recorded ones, and the requests that they are made of.

Formats, by their first line: JSON lines or CSV with `t,model,prompt_tokens,output_tokens` (seconds from any origin);
Azure LLM 2023 (`TIMESTAMP,ContextTokens,GeneratedTokens`); Azure Functions 2021 (`app,func,end_timestamp,duration`),
whose durations stand for the work.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ...loader.errors import UsageError

MAX_REQUESTS = 5_000_000
MAX_FILE_BYTES = 1 << 30
MAX_TOKENS = 10_000_000


class Request(NamedTuple):
    """One arrival. `work_s` is its whole time at an instance that does nothing else, where a trace gives that; None: it
    follows from its tokens.
    """

    t_s: float
    model: str
    prompt_tokens: int
    output_tokens: int
    work_s: float | None = None


def read_trace(path: str | Path, *, model: str) -> list[Request]:
    """The requests of a file in order of time, the first at 0. `model` is that of those which name none.

    Raises `UsageError` naming the line that cannot be read.
    """
    try:
        size_bytes = Path(path).stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            raise UsageError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes", key="trace")
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the trace {path}: {error}", key="trace") from error
    requests: list[Request] = []
    for number, request in _requests(text, model, str(path)):
        if not all(map(math.isfinite, (request.t_s, request.work_s or 0.0))) or (request.work_s or 0.0) < 0:
            raise UsageError(f"{path}:{number}: times must be finite", key="trace")
        if not all(0 <= tokens <= MAX_TOKENS for tokens in (request.prompt_tokens, request.output_tokens)):
            raise UsageError(f"{path}:{number}: tokens must be from 0 to {MAX_TOKENS:,}", key="trace")
        requests.append(request)
        if len(requests) > MAX_REQUESTS:
            raise UsageError(f"{path} has more than {MAX_REQUESTS:,} requests", key="trace")
    if not requests:
        raise UsageError(f"{path} has no requests", key="trace")
    return in_order(requests)


def in_order(requests: Iterable[Request]) -> list[Request]:
    """Sorted by time, the first at 0."""
    ordered = sorted(requests, key=lambda request: request.t_s)
    origin_s = ordered[0].t_s if ordered else 0.0
    return [request._replace(t_s=request.t_s - origin_s) for request in ordered]


def _requests(text: str, model: str, path: str) -> Iterator[tuple[int, Request]]:
    first = text.lstrip()[:1]
    if first == "{":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield number, _guarded(lambda line=line: _from_json(line, model), path, number)  # type: ignore[misc]
        return
    rows = csv.reader(io.StringIO(text))
    header = [name.strip() for name in next(rows, [])]
    read = _READERS.get(frozenset(header))
    if read is None:
        raise UsageError(
            f"{path}: unknown columns {', '.join(header[:8])}",
            key="trace",
            hint="Give t,model,prompt_tokens,output_tokens; or a trace of Azure's, LLM 2023 or Functions 2021.",
        )
    for number, row in enumerate(rows, 2):
        if row:
            values = dict(zip(header, row, strict=False))
            yield number, _guarded(lambda values=values: read(values, model), path, number)  # type: ignore[misc]


def _guarded(make: Callable[[], Request], path: str, number: int) -> Request:
    try:
        return make()
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"{path}:{number}: not a request: {error}", key="trace") from error


def _from_json(line: str, model: str) -> Request:
    value = json.loads(line)
    return Request(
        float(value["t"]),
        str(value.get("model", model)),
        int(value["prompt_tokens"]),
        int(value["output_tokens"]),
    )


def _plain(row: dict[str, str], model: str) -> Request:
    return Request(
        float(row["t"]), row.get("model") or model, int(row["prompt_tokens"]), int(row["output_tokens"])
    )


def _azure_llm(row: dict[str, str], model: str) -> Request:
    text = row["TIMESTAMP"]
    head, _, fraction = text.partition(".")
    seconds = datetime.fromisoformat(head).timestamp() + float(f"0.{fraction.rstrip('Z') or 0}")
    return Request(seconds, model, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _azure_functions(row: dict[str, str], model: str) -> Request:
    duration_s = float(row["duration"])
    return Request(float(row["end_timestamp"]) - duration_s, model, 0, 0, duration_s)


_READERS: dict[frozenset[str], Callable[[dict[str, str], str], Request]] = {
    frozenset({"t", "model", "prompt_tokens", "output_tokens"}): _plain,
    frozenset({"t", "prompt_tokens", "output_tokens"}): _plain,
    frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}): _azure_llm,
    frozenset({"app", "func", "end_timestamp", "duration"}): _azure_functions,
}
