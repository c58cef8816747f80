"""The output line of each input record.

A request in OpenAI's form is answered in the form of OpenAI's batch output; a plain one by a small
flat record. A record is one line of JSON, which shows whether it is an error. This module does not
know where records are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from .lines import Line, Problem

if TYPE_CHECKING:
    import numpy as np

    from ..function.streams import Completion


@dataclass(frozen=True, slots=True)
class Record:
    """A record. `data` ends with a line end."""

    data: bytes
    is_failed: bool
    num_tokens: int = 0  # generated tokens


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


_BODY = msgspec.json.Decoder(_Body)


def answered_call(line: Line, record_id: str, status: int, body: bytes) -> Record:
    """The record of an HTTP API answer. `body` is its unchanged JSON on one line."""
    try:
        usage = _BODY.decode(body).usage
    # Our own routes never return that.
    except (msgspec.DecodeError, UnicodeDecodeError):
        usage, body = None, msgspec.json.encode(body.decode(errors="replace"))
    response = {"status_code": status, "request_id": f"req_{record_id}", "body": msgspec.Raw(body)}
    return Record(
        _line(_openai(line, record_id, response, None)),
        is_failed=status != 200,
        num_tokens=usage.completion_tokens if usage is not None else 0,
    )


def generated(line: Line, completion: Completion) -> Record:
    record = {"custom_id": line.custom_id, **completion.to_dict()}
    return Record(_line(record), is_failed=False, num_tokens=completion.usage.completion_tokens)


def embedded(line: Line, vector: np.ndarray) -> Record:
    return Record(_line({"custom_id": line.custom_id, "embedding": vector.tolist()}), is_failed=False)


def failed(line: Line, record_id: str, problem: Problem) -> Record:
    error = {"code": problem.code, "message": problem.message}
    if line.is_openai:
        return Record(_line(_openai(line, record_id, None, error)), is_failed=True)
    return Record(_line({"custom_id": line.custom_id, "error": error}), is_failed=True)


def _openai(
    line: Line, record_id: str, response: dict[str, Any] | None, error: dict[str, str] | None
) -> dict[str, Any]:
    return {
        "id": f"batch_req_{record_id}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }


def _line(record: dict[str, Any]) -> bytes:
    return msgspec.json.encode(record) + b"\n"
