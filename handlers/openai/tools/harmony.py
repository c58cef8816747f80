"""gpt-oss' chat format, harmony: an answer is a sequence of messages, each with a header that names its channel.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

`analysis` is reasoning, and `final` the answer. A message to `functions.NAME` is a call, on the channel `commentary`;
on that channel a message without a recipient is text for the user. A header has the recipient before or behind the
channel. The prompt ends inside of a message: behind `<|start|>assistant`, or in a text that the answer continues.

Models write some headers wrong. None of that is an error: what is no header is text of its message, and a message on
no known channel is text of the answer.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ....runtime.text.detokenizer import open_length
from ..deltas import CHANNEL, MESSAGE, Delta, ReasoningDelta, TextDelta, ToolCallDelta
from .format import CallShape, Functions, JsonBlock, NotACallError, ToolFormat, object_text

START, CONSTRAIN = "<|start|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ASSISTANT, ANALYSIS, COMMENTARY, FINAL = "assistant", "analysis", "commentary", "final"
NAMESPACE = "functions."
MAX_HEADER_CHARS = 512

_OTHER_ROLES = frozenset({"user", "system", "developer", "tool"})
_HEADER_ENDS = (MESSAGE, END, RETURN, CALL, START)
_TEXT_ENDS = (END, RETURN, CALL, START, CHANNEL)
# With which the rest of a header begins, behind the role.
_BEGINNINGS = (CHANNEL, CONSTRAIN, *_HEADER_ENDS, "to=")
_ROLE = re.compile(r"\s*([^\s<]*)")
_CHANNELS = re.compile(r"<\|channel\|>(analysis|commentary|final)\b")
_RECIPIENTS = re.compile(r"\bto=([^\s<]+)")
_IN_HEADER = re.compile(
    r"^\s*assistant\b|<\|channel\|>(?:\s*(?:analysis|commentary|final)\b)?|\bto=[^\s<]+|<\|constrain\|>(?:\s*json)?"
)
_WORDS = (ASSISTANT, ANALYSIS, COMMENTARY, FINAL, "to=")

HARMONY = ToolFormat(
    name="harmony",
    # A call ends the answer.
    shape=CallShape(
        before_name=f"{CHANNEL}{COMMENTARY} to={NAMESPACE}",
        before_arguments=f" {CONSTRAIN}json{MESSAGE}",
        after_arguments="",
        separator="",
    ),
    openers=(),  # `ChannelReader` finds calls by their headers
    is_bare=False,
    block=lambda opener, names: JsonBlock(opener, "", names),
    markers=(START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL),
)


class HarmonyPlace(enum.Enum):
    BETWEEN = enum.auto()  # behind a message
    HEADER = enum.auto()
    TEXT = enum.auto()


class Header(Struct, frozen=True):
    """The header of a message, as far as it is known."""

    role: str = ASSISTANT
    channel: str = ""
    recipient: str = ""

    @classmethod
    def read(cls, text: str) -> Header:
        """From the text between `<|start|>` and `<|message|>`. Of two channels or recipients the last counts."""
        role = _ROLE.match(text)
        channels, recipients = _CHANNELS.findall(text), _RECIPIENTS.findall(text)
        return cls(
            (role[1] if role else "") or ASSISTANT,
            channels[-1] if channels else "",
            recipients[-1] if recipients else "",
        )

    @property
    def is_of_assistant(self) -> bool:
        """False for messages of other roles, such as a tool's result, which some models make up."""
        return self.role not in _OTHER_ROLES and not self.role.startswith(NAMESPACE)


class PromptEnd(Struct, frozen=True):
    """The place in a conversation where a prompt ends, with the header of its last message up to there."""

    place: HarmonyPlace
    header: str = ""

    @classmethod
    def of(cls, prompt: str) -> PromptEnd:
        start = prompt.rfind(START)
        if start < 0:
            return cls(HarmonyPlace.BETWEEN)
        header, marker, text = prompt[start + len(START) :].partition(MESSAGE)
        if not marker:
            return cls(HarmonyPlace.HEADER, header.rstrip())
        if any(end in text for end in (END, RETURN, CALL)):
            return cls(HarmonyPlace.BETWEEN)
        return cls(HarmonyPlace.TEXT, header)

    @property
    def is_reasoning(self) -> bool:
        """True if the prompt ends inside of reasoning."""
        return self.place is HarmonyPlace.TEXT and Header.read(self.header).channel == ANALYSIS

    @property
    def reasoning_marks(self) -> tuple[str, str]:
        """The texts with which reasoning begins and ends."""
        return f"{CHANNEL}{ANALYSIS}{MESSAGE}", END

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that may be special tokens."""
        return HARMONY.markers

    def reader(
        self, functions: Functions, *, max_calls: int | None, is_eager: bool, gives_reasoning: bool
    ) -> ChannelReader:
        """A reader of one answer, as `ChannelReader` has it."""
        return ChannelReader(
            self, functions, max_calls=max_calls, is_eager=is_eager, gives_reasoning=gives_reasoning
        )


class _ChannelKind(enum.Enum):
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()
    NOTHING = enum.auto()


class ChannelReader:
    """One answer's text, as it comes, into reasoning, text and calls. The result does not depend on the pieces.

    A call is a message to one of `functions`. In streams (`is_eager`) its arguments are given out as they come;
    elsewhere a call is given out if it ends as a JSON object, and is text otherwise. Behind `max_calls` calls nothing
    more is given out.
    """

    def __init__(
        self,
        prompt_end: PromptEnd,
        functions: Functions,
        *,
        max_calls: int | None = None,
        is_eager: bool = False,
        gives_reasoning: bool = True,
    ) -> None:
        """Without `gives_reasoning` the channel `analysis` is text, too."""
        self._functions = functions
        self._max_calls = max_calls
        self._is_eager = is_eager
        self._gives_reasoning = gives_reasoning
        self._place = prompt_end.place
        self._header = prompt_end.header  # the prompt's part of the header
        # Whether the answer may have no header at all: some models leave it out.
        self._may_be_bare = self._place is HarmonyPlace.HEADER and CHANNEL not in self._header
        if self._may_be_bare:
            self._header += " "
        self._text = ""  # what is not decided
        self._kind = _ChannelKind.NOTHING  # of the open message
        self._name = ""  # of the function that it calls
        self._own: list[str] = []  # pieces of its text
        self._given: set[_ChannelKind] = set()  # kinds of messages that were given out
        self._num_calls = 0
        self._is_over = False
        self._deltas: list[Delta] = []
        if self._place is HarmonyPlace.TEXT:
            self._begin(Header.read(self._header))

    def push(self, text: str) -> list[Delta]:
        """The deltas of this much more text."""
        self._text += text
        return self._run(is_final=False)

    def finish(self) -> list[Delta]:
        """The rest, once the text has ended."""
        return self._run(is_final=True)

    def _run(self, *, is_final: bool) -> list[Delta]:
        steps = {
            HarmonyPlace.BETWEEN: self._between,
            HarmonyPlace.HEADER: self._in_header,
            HarmonyPlace.TEXT: self._in_text,
        }
        while not self._is_over and steps[self._place](is_final=is_final):
            pass
        if self._is_over:
            self._text = ""
        deltas, self._deltas = self._deltas, []
        return deltas

    # -- places: each step decides about some of the text; False: it takes more text

    def _between(self, *, is_final: bool) -> bool:
        rest = self._text.lstrip()
        if rest.startswith(START):
            self._to_header(rest[len(START) :])
            return True
        if not rest or (not is_final and START.startswith(rest)):
            return False
        self._begin(Header())
        self._place = HarmonyPlace.TEXT
        return True

    def _in_header(self, *, is_final: bool) -> bool:
        if self._may_be_bare:
            rest = self._text.lstrip()
            if not is_final and any(each.startswith(rest) for each in _BEGINNINGS):
                return False
            self._may_be_bare = False
            if not rest.startswith(_BEGINNINGS):
                self._begin(Header())
                self._place = HarmonyPlace.TEXT
                return True
        place, marker = _first(self._text, _HEADER_ENDS)
        if not marker and not is_final and place < MAX_HEADER_CHARS + len(MESSAGE):
            return False
        if place > MAX_HEADER_CHARS:
            place, marker = MAX_HEADER_CHARS, ""
        text = self._header + self._text[:place]
        self._text = self._text[place + len(marker) :]
        header = Header.read(text)
        self._begin(header if marker else replace(header, recipient=""))
        if marker != MESSAGE:  # a header that is none
            self._give(_rest_of_header(text, is_cut=not marker and not self._text))
        if marker in (MESSAGE, ""):
            self._place = HarmonyPlace.TEXT
        else:
            self._end()
            self._leave(marker)
        return True

    def _in_text(self, *, is_final: bool) -> bool:
        place, marker = _first(self._text, _TEXT_ENDS)
        if not marker:
            held = 0 if is_final else max(open_length(self._text, each) for each in _TEXT_ENDS)
            self._give(self._text[: place - held])
            self._text = self._text[place - held :]
            if is_final:
                self._end()
                self._place = HarmonyPlace.BETWEEN
            return False
        self._give(self._text[:place])
        self._end()
        self._text = self._text[place + (len(marker) if marker != CHANNEL else 0) :]
        self._leave(marker)
        return True

    def _leave(self, marker: str) -> None:
        """Go to the place behind a message that ended by `marker`."""
        if marker in (START, CHANNEL):
            self._to_header(self._text)
        else:
            self._place = HarmonyPlace.BETWEEN

    def _to_header(self, text: str) -> None:
        self._text, self._header, self._place = text, "", HarmonyPlace.HEADER

    # -- the open message

    def _begin(self, header: Header) -> None:
        self._own.clear()
        name = self._function(header.recipient)
        if not header.is_of_assistant:
            self._kind = _ChannelKind.NOTHING
        elif name is not None:
            self._kind, self._name = _ChannelKind.CALL, name
            if self._is_eager:
                self._begin_call()
        elif header.channel == ANALYSIS and self._gives_reasoning:
            self._kind = _ChannelKind.REASONING
        else:
            self._kind = _ChannelKind.TEXT

    def _function(self, recipient: str) -> str | None:
        """The function that a message to this recipient calls."""
        for name in (recipient.removeprefix(NAMESPACE), recipient):
            if name in self._functions:
                return name
        return None

    def _give(self, text: str) -> None:
        if not text:
            return
        if self._kind is _ChannelKind.CALL:
            if self._is_eager:
                self._deltas.append(ToolCallDelta(self._num_calls - 1, text))
        elif self._kind is not _ChannelKind.NOTHING:
            separator = "\n" if not self._own and self._kind in self._given else ""
            self._given.add(self._kind)
            make = ReasoningDelta if self._kind is _ChannelKind.REASONING else TextDelta
            self._deltas.append(make(separator + text))
        self._own.append(text)

    def _end(self) -> None:
        if self._kind is _ChannelKind.CALL:
            self._end_call("".join(self._own))
        self._kind = _ChannelKind.NOTHING
        self._own.clear()

    def _begin_call(self) -> None:
        self._deltas.append(ToolCallDelta(self._num_calls, id=HARMONY.new_id(), name=self._name))
        self._num_calls += 1

    def _end_call(self, arguments: str) -> None:
        if self._is_eager:
            if not arguments.strip():
                self._give("{}")
        else:
            try:
                written = object_text(arguments.encode()) if arguments.strip() else "{}"
            except (NotACallError, UnicodeEncodeError):
                self._kind = _ChannelKind.TEXT
                self._own.clear()
                self._give(arguments)
                return
            self._begin_call()
            self._deltas.append(ToolCallDelta(self._num_calls - 1, written))
        self._is_over = self._num_calls == self._max_calls


def _first(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """The first place of a marker, and the marker; without one the text's length and ''."""
    return min(
        ((place, marker) for marker in markers if (place := text.find(marker)) >= 0), default=(len(text), "")
    )


def _rest_of_header(text: str, *, is_cut: bool) -> str:
    """The rest of a header without its own words. `is_cut`: the answer ended in it, perhaps within one of them."""
    rest = _IN_HEADER.sub("", text).strip()
    return "" if is_cut and any(word.startswith(rest) for word in _WORDS) else rest


def harmony_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation as the models' template takes it: reasoning as `thinking`, and one call in a message, with its
    result directly behind it, since the template finds the name of a result in the call before.

    A message with a call cannot have both reasoning and text: the text is added to the reasoning.
    """
    changed: list[dict[str, Any]] = []
    pending: list[dict[str, Any]] = []  # results that follow a message with calls
    calls: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "tool" and calls:
            pending.append(dict(message))
            continue
        _add_results(changed, calls, pending)
        calls, pending = list(message.get("tool_calls") or ()), []
        result = dict(message)
        thinking = str(message.get("reasoning_content") or "")
        if calls:
            thinking = "\n".join(part for part in (thinking, message["content"]) if part)
            result |= {"content": "", "tool_calls": calls[:1]}
        if thinking:
            result |= {"thinking": thinking, "reasoning_content": thinking}
        changed.append(result)
    _add_results(changed, calls, pending)
    return changed


def _add_results(
    changed: list[dict[str, Any]], calls: Sequence[Mapping[str, Any]], pending: list[dict[str, Any]]
) -> None:
    """Add the results of `calls`, the first of which was added, and the other calls. Results without a known id belong
    to the calls in their order.
    """
    ids = {call.get("id") for call in calls}
    for number, call in enumerate(calls):
        if number:
            changed.append({"role": ASSISTANT, "content": "", "tool_calls": [call]})
        found = [each for each in pending if each.get("tool_call_id") == call.get("id")]
        found = found or [each for each in pending if each.get("tool_call_id") not in ids]
        if found:
            changed.append(found[0])
            pending.remove(found[0])
    changed += pending


def harmony_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Functions as the template takes them, which fails without a description."""
    if tools is None:
        return None
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]
