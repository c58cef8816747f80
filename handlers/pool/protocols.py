"""Streams that are passed on: their tokens, and the last event of one whose instance is lost, an error in the protocol
of the requested path.
"""

from __future__ import annotations

import re

import msgspec

from ..anthropic.errors import error_event
from ..anthropic.routes import is_anthropic
from ..http.errors import ApiError
from ..http.service import HttpCall

RESPONSES_PATH = "/v1/responses"
_NUMBER = re.compile(rb'"sequence_number":(\d{1,9})}')
_TOKENS = re.compile(rb"(\d{1,9})\+(\d{1,9})\n?")
_COMMENT = b"\n: tokens "
_TAIL_BYTES = 64  # of a piece, in which a number may begin


def read_tokens(text: str | bytes, call: HttpCall) -> None:
    """Note an instance's numbers of tokens, as `TOKENS_HEADER` has them."""
    data = text.encode() if isinstance(text, str) else text
    if found := _TOKENS.match(data):
        call.prompt_tokens, call.generated_tokens = int(found[1]), int(found[2])


class StreamEnd:
    """The end of one stream of events that is passed on.

    A stream whose client leaves has no comment with its tokens: each event counts as one until then.
    """

    def __init__(self, path: str, request_id: str, call: HttpCall | None = None) -> None:
        """`call` gets the numbers of tokens; None: they are not counted."""
        self._path, self._request_id = path, request_id
        self._call = call
        self._has_tokens = False
        self._tail = b""
        self._next_number = 0  # of the Responses API's events

    def passed(self, piece: bytes) -> None:
        """Record what the client was sent."""
        text = self._tail + piece
        if self._call is not None and not self._has_tokens:
            self._call.generated_tokens += piece.count(b"data: ")
            begin = text.rfind(_COMMENT)
            if begin >= 0 and text.find(b"\n", begin + 1) >= 0:
                read_tokens(text[begin + len(_COMMENT) :], self._call)
                self._has_tokens = True
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
