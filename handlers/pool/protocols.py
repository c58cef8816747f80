"""The last event of a stream whose instance is lost: an error in the protocol of the requested path."""

from __future__ import annotations

import re

import msgspec

from ..anthropic.errors import error_event
from ..anthropic.routes import is_anthropic
from ..http.errors import ApiError

RESPONSES_PATH = "/v1/responses"
_NUMBER = re.compile(rb'"sequence_number":(\d{1,9})}')
_TAIL_BYTES = 32  # of a piece, in which a number may begin


class StreamEnd:
    """The end of one stream of events that is passed on."""

    def __init__(self, path: str, request_id: str) -> None:
        self._path, self._request_id = path, request_id
        self._tail = b""
        self._next_number = 0  # of the Responses API's events

    def passed(self, piece: bytes) -> None:
        """Record what the client was sent."""
        text = self._tail + piece
        if self._path == RESPONSES_PATH and (found := text.rfind(b'"sequence_number":')) >= 0:
            number = _NUMBER.match(text, found)
            self._next_number = self._next_number if number is None else int(number[1]) + 1
        self._tail = text[-_TAIL_BYTES:]

    def event(self, error: ApiError) -> bytes:
        """The last event, which clients of the path's protocol take for an error."""
        apart = b"\n\n" if self._tail and not self._tail.endswith(b"\n\n") else b""
        return apart + self._event(error) + b"\n\n"

    def _event(self, error: ApiError) -> bytes:
        if is_anthropic(self._path, {}):
            return error_event(error, self._request_id)
        if self._path != RESPONSES_PATH:
            return b"data: " + error.body()
        fields = {
            "type": "error",
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "sequence_number": self._next_number,
        }
        return b"event: error\ndata: " + msgspec.json.encode(fields)
