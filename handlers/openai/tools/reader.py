"""A model's text, as it comes, into text and calls.

The result does not depend on how the text is cut into pieces, and no character is lost: text that turns out to be no
call is given out as text. Only whitespace around calls, and what a format writes around a call's name and arguments,
is not given out.

Where a grammar guides the answer (`is_guided`), a call can only be completed as it began, so its arguments are given
out as they come. In streams (`is_eager`) the arguments of other calls are, too, once the name is certain, and a call
that breaks off stays so. Elsewhere a call is held back until all of it is there and sound.

Where `max_tokens` or a stop string cut the answer off, a call whose name is not complete is not given out at all: its
opening is no text for a reader.
"""

from __future__ import annotations

import enum

from ....runtime.text.detokenizer import open_length
from ..deltas import Delta, TextDelta, ToolCallDelta
from .format import SPACES, Functions, JsonScanner, NotACallError, ParsedCall, ToolBlock, ToolFormat


class _ReaderPlace(enum.Enum):
    EDGE = enum.auto()  # the answer's beginning, or right behind a call: only whitespace since
    TEXT = enum.auto()
    BLOCK = enum.auto()  # a block of calls may have begun
    ARGUMENTS = enum.auto()  # of a guided call
    TAIL = enum.auto()  # behind them
    NEXT = enum.auto()  # behind a guided call, in its block
    OVER = enum.auto()  # the request allows no further calls


class CallReader:
    """One answer's, without its reasoning."""

    def __init__(
        self,
        fmt: ToolFormat,
        functions: Functions,
        *,
        is_guided: bool,
        max_calls: int | None,
        is_eager: bool = False,
    ) -> None:
        """`functions` may be called. Behind `max_calls` calls nothing more is given out."""
        writes_json = fmt.argument_rules is None
        self._fmt = fmt
        self._functions = functions
        self._is_guided = is_guided and writes_json
        self._is_eager = is_eager or (is_guided and not writes_json)
        self._max_calls = max_calls
        self._place = _ReaderPlace.EDGE
        self._text = ""  # what is not decided
        self._spaces = ""  # before the block
        self._block: ToolBlock | None = None
        self._given: list[int] = []  # characters of arguments that were given out, of each call of the block
        self._scanner = JsonScanner()
        self._deltas: list[Delta] = []
        self._is_cut = False
        self.num_calls = 0

    def push(self, text: str) -> list[Delta]:
        """The deltas of this much more text."""
        if not text:
            return []
        self._text += text
        return self._run(is_final=False)

    def finish(self, *, is_cut: bool = False) -> list[Delta]:
        """The rest, once the text has ended; `is_cut` says that the model would have gone on."""
        self._is_cut = is_cut
        return self._run(is_final=True)

    def _run(self, *, is_final: bool) -> list[Delta]:
        while self._text and self._step(is_final=is_final):
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def _step(self, *, is_final: bool) -> bool:
        """One decision about the text; False: it takes more text."""
        match self._place:
            case _ReaderPlace.EDGE:
                return self._edge(is_final=is_final)
            case _ReaderPlace.TEXT:
                return self._plain(is_final=is_final)
            case _ReaderPlace.BLOCK:
                return self._begin_block(is_final=is_final)
            case _ReaderPlace.ARGUMENTS:
                return self._arguments()
            case _ReaderPlace.TAIL:
                return self._tail(is_final=is_final)
            case _ReaderPlace.NEXT:
                return self._next(is_final=is_final)
            case _ReaderPlace.OVER:
                self._text = ""
                return False

    def _edge(self, *, is_final: bool) -> bool:
        """Whitespace before a call belongs to the call; before text it belongs to the text."""
        separators = self._fmt.separators if self.num_calls else SPACES
        rest = self._text.lstrip(separators)
        if not rest and not is_final:
            return False
        if rest and self._fmt.is_bare and rest[0] in "{[":
            self._open_block(len(self._text) - len(rest))
            return True
        rest = self._text.lstrip(SPACES)
        if rest.startswith(self._fmt.openers):
            self._open_block(len(self._text) - len(rest))
            return True
        if not is_final and any(opener.startswith(rest) for opener in self._fmt.openers):
            return False
        if is_final and not rest and self.num_calls:
            self._text = ""
            return False
        self._place = _ReaderPlace.TEXT
        return True

    def _plain(self, *, is_final: bool) -> bool:
        found = [start for opener in self._fmt.openers if (start := self._text.find(opener)) >= 0]
        if found:
            self._give_text(min(found))
            self._open_block(0)
            return True
        held = (
            0 if is_final else max((open_length(self._text, each) for each in self._fmt.openers), default=0)
        )
        self._give_text(len(self._text) - held)
        return False

    def _open_block(self, num_spaces: int) -> None:
        self._spaces, self._text = self._text[:num_spaces], self._text[num_spaces:]
        self._place = _ReaderPlace.BLOCK

    def _begin_block(self, *, is_final: bool) -> bool:
        if self._is_guided and self._block is None:
            before = self._fmt.shape.first
            if self._guided_head(before):
                return True
            if not is_final and self._may_be_head(before):
                return False
        return self._held_block(is_final=is_final)

    def _held_block(self, *, is_final: bool) -> bool:
        opener = next((each for each in self._fmt.openers if self._text.startswith(each)), "")
        if self._block is None:
            self._block = self._fmt.block(opener, self._functions)
        num_certain = 0
        if self._is_eager:
            calls, num_certain = self._block.partial(self._text)
            self._give_begun(calls)
        try:
            read = self._block.read(self._text, is_final=is_final)
        except NotACallError:
            self._block = None
            if self._is_cut and (opener or self._given or self._may_be_guided(self._fmt.shape.first)):
                self._text = ""
                return False
            if self._given:  # what follows the calls that were given is text again
                self._given.clear()
                self._text, self._place = self._text[num_certain:], _ReaderPlace.EDGE
                self._end_if_enough()
                return True
            self._text = self._spaces + self._text
            self._give_text(len(self._spaces) + (len(opener) or 1))
            self._place = _ReaderPlace.TEXT
            return True
        if read is None:
            return False
        calls, end = read
        self._block = None
        self._text, self._place = self._text[end:], _ReaderPlace.EDGE
        given, self._given = self._given, []
        for number, call in enumerate(calls):
            if number < len(given):
                self._give_arguments(self.num_calls - len(given) + number, call.arguments[given[number] :])
        self._end_if_enough()
        for call in calls[len(given) :]:
            self._give_call(call)
        return True

    def _guided_head(self, before: str) -> bool:
        """True if a guided call follows `before`; its arguments come next."""
        for name in self._functions:
            head = self._head(before, name)
            if self._text.startswith(head):
                self._text, self._place = self._text[len(head) :], _ReaderPlace.ARGUMENTS
                self._scanner = JsonScanner()
                self._begin_call(name)
                return True
        return False

    def _may_be_guided(self, before: str) -> bool:
        """True if a guided call may have begun, behind `before`."""
        return self._is_guided and self._may_be_head(before)

    def _may_be_head(self, before: str) -> bool:
        return any(self._head(before, name).startswith(self._text) for name in self._functions)

    def _head(self, before: str, name: str) -> str:
        shape = self._fmt.shape
        return f"{before}{shape.before_name}{name}{shape.before_arguments}"

    def _arguments(self) -> bool:
        end = self._scanner.feed(self._text)
        piece = self._text if end is None else self._text[:end]
        self._deltas.append(ToolCallDelta(self.num_calls - 1, piece))
        self._text = self._text[len(piece) :]
        if end is not None:
            self._place = _ReaderPlace.TAIL
        return end is not None

    def _tail(self, *, is_final: bool) -> bool:
        tail = self._fmt.shape.after_arguments
        if self._text.startswith(tail):
            self._text, self._place = self._text[len(tail) :], _ReaderPlace.NEXT
        elif tail.startswith(self._text):
            if is_final:
                self._text = ""
            return False
        else:
            self._place = _ReaderPlace.EDGE
        self._end_if_enough()
        return True

    def _next(self, *, is_final: bool) -> bool:
        shape = self._fmt.shape
        if self._guided_head(shape.separator):
            return True
        if shape.last and self._text.startswith(shape.last):
            self._text, self._place = self._text[len(shape.last) :], _ReaderPlace.EDGE
            return True
        if not is_final and (
            self._may_be_head(shape.separator) or (shape.last and shape.last.startswith(self._text))
        ):
            return False
        if self._is_cut and self._may_be_head(shape.separator):
            self._text = ""
        self._place = _ReaderPlace.EDGE
        return True

    def _give_text(self, length: int) -> None:
        if length:
            self._deltas.append(TextDelta(self._text[:length]))
            self._text = self._text[length:]

    def _begin_call(self, name: str) -> None:
        self._deltas.append(ToolCallDelta(self.num_calls, id=self._fmt.new_id(), name=name))
        self.num_calls += 1

    def _give_begun(self, calls: list[ParsedCall]) -> None:
        """Give out what is certain of the block's calls, and was not given before."""
        for number, call in enumerate(calls):
            if number == len(self._given):
                if self.num_calls == self._max_calls:
                    return
                self._begin_call(call.name)
                self._given.append(0)
            first = self.num_calls - len(self._given)
            self._give_arguments(first + number, call.arguments[self._given[number] :])
            self._given[number] = len(call.arguments)

    def _give_arguments(self, index: int, piece: str) -> None:
        if piece:
            self._deltas.append(ToolCallDelta(index, piece))

    def _give_call(self, call: ParsedCall) -> None:
        if self._place is _ReaderPlace.OVER:
            return
        self._begin_call(call.name)
        self._deltas.append(ToolCallDelta(self.num_calls - 1, call.arguments))
        self._end_if_enough()

    def _end_if_enough(self) -> None:
        if self._max_calls is not None and self.num_calls >= self._max_calls:
            self._place = _ReaderPlace.OVER
