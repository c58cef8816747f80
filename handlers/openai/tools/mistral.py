"""Calls as Mistral's models write them, in two forms: `[TOOL_CALLS][{…}, {…}]`, and of newer ones
`[TOOL_CALLS]name[ARGS]{…}` for each call.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string

from msgspec.structs import replace

from .format import (
    SPACES,
    CallShape,
    Functions,
    JsonBlock,
    JsonScanner,
    NotACallError,
    ParsedCall,
    ToolBlock,
    ToolFormat,
    object_text,
)

OPENER, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID_CHARS = 9  # their templates refuse ids of another length
MAX_NAME_CHARS = 256  # of a name and its id: beyond that it is no call
_ALPHABET = string.ascii_letters + string.digits
_ID = re.compile(rf"[A-Za-z0-9]{{{ID_CHARS}}}")


def new_id() -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(ID_CHARS))


def given_id(text: str) -> str:
    """An id of another server's making, as these templates take it: the same for the same."""
    if _ID.fullmatch(text):
        return text
    digest = hashlib.sha256(text.encode(errors="replace")).digest()
    return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest[:ID_CHARS])


class NamedBlock(ToolBlock):
    """One call, its name before its arguments; or a list of calls, as `JsonBlock` has it."""

    def __init__(self, opener: str, names: Functions) -> None:
        self._opener, self._names = opener, names
        self._list = JsonBlock(opener, "", names)
        self._scanner = JsonScanner()
        self._num_scanned = 0
        self._begun: tuple[str, int] | None = None  # the name, and where the arguments begin
        self._end: int | None = None

    def read(self, text: str, *, is_final: bool) -> tuple[list[ParsedCall], int] | None:
        body = text[len(self._opener) :].lstrip(SPACES)
        if not body or body[0] in "[{":
            return self._list.read(text, is_final=is_final)
        self._advance(text)
        if self._begun is None or self._end is None:
            if is_final:
                raise NotACallError
            return None
        name, start = self._begun
        return [ParsedCall(name, object_text(text[start : self._end].encode()))], self._end

    def partial(self, text: str) -> tuple[list[ParsedCall], int]:
        body = text[len(self._opener) :].lstrip(SPACES)
        if not body or body[0] in "[{":
            return self._list.partial(text)
        try:
            self._advance(text)
        except NotACallError:
            return [], 0
        if self._begun is None:
            return [], 0
        name, start = self._begun
        return [ParsedCall(name, text[start : self._end])], len(text) if self._end is None else self._end

    def _advance(self, text: str) -> None:
        if self._begun is None:
            start = text.find("{", len(self._opener))
            head = text[len(self._opener) : start if start >= 0 else None].strip(SPACES)
            if len(head) > MAX_NAME_CHARS:
                raise NotACallError
            if start < 0:
                return
            name = head.removesuffix(ARGUMENTS).partition(CALL_ID)[0].strip(SPACES)
            if name not in self._names:
                raise NotACallError
            self._begun, self._num_scanned = (name, start), start
        if self._end is None:
            self._end = self._scanner.feed(text, self._num_scanned)
            self._num_scanned = len(text)


LIST = ToolFormat(
    name="mistral",
    shape=CallShape(
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        after_arguments="}",
        separator=", ",
        first=f"{OPENER}[",
        last="]",
    ),
    openers=(OPENER,),
    is_bare=False,
    block=NamedBlock,
    markers=(OPENER, ARGUMENTS, CALL_ID),
    new_id=new_id,
    given_id=given_id,
)
NAMED = replace(
    LIST,
    shape=CallShape(before_name=OPENER, before_arguments=ARGUMENTS, after_arguments="", separator=""),
)
