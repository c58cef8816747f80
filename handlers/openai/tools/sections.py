"""Calls in a section of their own, each a head with the function's name and a JSON object: DeepSeek's and Kimi's.

DeepSeek V3 and R1 write `function`, a separator, the name and the object in a fence of Markdown; V3.1 the name, the
separator and the object alone. Kimi K2 writes `functions.NAME:0`, the call's id, before the separator.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from .format import (
    SPACES,
    CallShape,
    Functions,
    JsonScanner,
    NotACallError,
    ParsedCall,
    ToolBlock,
    ToolFormat,
    object_text,
)

MAX_HEAD_CHARS = 512
_FENCE = re.compile(r"```(?:json)?")
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?\Z")


class SectionMarks(Struct, frozen=True):
    first: str  # before the section
    last: str
    call: str  # before a call
    separator: str
    end: str  # behind a call
    name_of: Callable[[str], str]  # the function's name, from what is written for it


class _Begun(Struct):
    """A call that has begun: its name, and where its arguments are."""

    name: str
    start: int
    end: int | None = None


class SectionBlock(ToolBlock):
    """A section of calls, or calls without one."""

    def __init__(self, opener: str, functions: Functions, marks: SectionMarks) -> None:
        self._functions, self._marks = functions, marks
        self._index = len(opener) if opener == marks.first else 0
        self._calls: list[_Begun] = []
        self._scanner = JsonScanner()
        self._num_scanned = 0
        self._end: int | None = None
        self._is_given = False  # whether `partial` gave calls before they were complete

    def read(self, text: str, *, is_final: bool) -> tuple[list[ParsedCall], int] | None:
        self._advance(text)
        is_complete = bool(self._calls) and self._calls[-1].end is not None
        if self._end is None and not (is_final and is_complete):
            if is_final:
                raise NotACallError
            return None
        return [self._parsed(text, call) for call in self._calls], len(
            text
        ) if self._end is None else self._end

    def partial(self, text: str) -> tuple[list[ParsedCall], int]:
        with contextlib.suppress(NotACallError):
            self._advance(text)
        self._is_given = self._is_given or bool(self._calls)
        calls = [ParsedCall(call.name, text[call.start : call.end]) for call in self._calls]
        last = self._calls[-1].end if self._calls else 0
        return calls, len(text) if last is None else last

    def _parsed(self, text: str, call: _Begun) -> ParsedCall:
        arguments = text[call.start : call.end]
        try:
            return ParsedCall(call.name, object_text(arguments.encode()))
        except NotACallError:
            if not self._is_given:
                raise
            return ParsedCall(call.name, arguments)

    def _advance(self, text: str) -> None:
        """Read as far as the text goes. Raises `NotACallError`."""
        while self._end is None and self._step(text):
            pass

    def _step(self, text: str) -> bool:
        """One part of the section; False: more text is needed."""
        marks = self._marks
        if self._calls and self._calls[-1].end is None:
            end = self._scanner.feed(text, self._num_scanned)
            self._num_scanned = len(text)
            if end is None:
                return False
            self._calls[-1].end = self._index = end
            return True
        start = self._index
        while start < len(text) and (text[start] in SPACES or (text[start] == "`" and self._calls)):
            start += 1
        following = {mark: text.startswith(mark, start) for mark in (marks.end, marks.last, marks.call)}
        if self._calls and following[marks.end]:
            self._index = start + len(marks.end)
            return True
        if self._calls and following[marks.last]:
            self._end = start + len(marks.last)
            return True
        if following[marks.call]:
            return self._begin(text, start + len(marks.call))
        if any(mark.startswith(text[start:]) for mark in following):
            return False
        if not self._calls:
            raise NotACallError
        self._end = self._index
        return True

    def _begin(self, text: str, start: int) -> bool:
        brace = text.find("{", start)
        head = text[start : brace if brace >= 0 else None]
        if len(head) > MAX_HEAD_CHARS:
            raise NotACallError
        if brace < 0:
            return False
        parts = _FENCE.sub("", head).split(self._marks.separator)
        name = self._marks.name_of(next((part.strip() for part in reversed(parts) if part.strip()), ""))
        if name not in self._functions:
            raise NotACallError
        self._calls.append(_Begun(name, brace))
        self._scanner, self._num_scanned = JsonScanner(), brace
        return True


def _kimi_name(text: str) -> str:
    found = _KIMI_ID.match(text)
    return "" if found is None else found["name"]


def kimi_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with ids as the model writes them: its template shows a call by its id alone."""
    ids: dict[str, str] = {}
    changed = []
    for message in messages:
        result = dict(message)
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                new = f"functions.{call['function']['name']}:{len(ids)}"
                ids[call.get("id", new)] = new
                calls.append({**call, "id": new})
            result["tool_calls"] = calls
        if "tool_call_id" in message:
            result["tool_call_id"] = ids.get(message["tool_call_id"], message["tool_call_id"])
        changed.append(result)
    return changed


_DEEPSEEK = SectionMarks(
    first="<｜tool▁calls▁begin｜>",
    last="<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
    name_of=str,
)
_KIMI = SectionMarks(
    first="<|tool_calls_section_begin|>",
    last="<|tool_calls_section_end|>",
    call="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    name_of=_kimi_name,
)


def _format(name: str, marks: SectionMarks) -> ToolFormat:
    return ToolFormat(
        name=name,
        shape=CallShape(
            before_name=marks.call,
            before_arguments=marks.separator,
            after_arguments=marks.end,
            separator="",
            first=marks.first,
            last=marks.last,
        ),
        openers=(marks.first, marks.call),
        is_bare=False,
        block=lambda opener, functions: SectionBlock(opener, functions, marks),
        markers=(marks.first, marks.last, marks.call, marks.separator, marks.end),
    )


DEEPSEEK = _format("deepseek", _DEEPSEEK)
# V3 and R1
DEEPSEEK_FENCED = replace(
    DEEPSEEK,
    shape=replace(
        DEEPSEEK.shape,
        before_name=f"{_DEEPSEEK.call}function{_DEEPSEEK.separator}",
        before_arguments="\n```json\n",
        after_arguments=f"\n```{_DEEPSEEK.end}",
        separator="\n",
    ),
)
KIMI = _format("kimi", _KIMI)
KIMI = replace(
    KIMI,
    shape=replace(
        KIMI.shape,
        before_name=f"{_KIMI.call}functions.",
        before_arguments=f":0{_KIMI.separator}",
    ),
    given_ids=kimi_ids,
)
