"""Deltas, the parts of a chat's answer as they arrive, for any route; and a model's reasoning,
`<think>…</think>` before its answer, apart from it.

Some models open the tag themselves; others have it in the prompt, from their chat template, and
only close it. The result does not depend on how the text is cut into pieces. Line breaks next to
the tags belong to the tags; everything else is given out.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ...runtime.text.detokenizer import open_length

BREAKS = "\r\n"
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"  # in the headers of harmony's messages


class TextDelta(Struct, frozen=True):
    """More of the answer's text."""

    text: str


class ReasoningDelta(Struct, frozen=True):
    """More of the reasoning before the answer."""

    text: str


class ToolCallDelta(Struct, frozen=True):
    """A call of a function, or more of one: its first delta has `id` and `name`, the others have ''."""

    index: int  # among the calls of the answer, from 0
    arguments: str = ""  # a piece of a JSON object; of a custom tool, its input
    id: str = ""
    name: str = ""
    is_custom: bool = False


class Finish(Struct, frozen=True):
    """The answer's end; always the last."""

    reason: str  # stop, length or tool_calls


Delta = TextDelta | ReasoningDelta | ToolCallDelta | Finish


class AnswerToolCall(Struct, frozen=True):
    id: str
    name: str
    arguments: str  # a JSON object, as the model wrote it; cut off where `max_tokens` cut the answer


class Answer(Struct, frozen=True):
    """A whole answer, from all of its deltas."""

    text: str
    reasoning: str
    calls: tuple[AnswerToolCall, ...]
    finish_reason: str

    @classmethod
    def of(cls, deltas: list[Delta]) -> Answer:
        texts: list[str] = []
        reasoning: list[str] = []
        heads: list[tuple[str, str]] = []  # id and name
        arguments: list[list[str]] = []
        reason = "stop"
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    texts.append(text)
                case ReasoningDelta(text):
                    reasoning.append(text)
                case ToolCallDelta(index, piece, call_id, name):
                    if call_id:
                        heads.append((call_id, name))
                        arguments.append([])
                    arguments[index].append(piece)
                case Finish(reason):
                    pass
        calls = (
            AnswerToolCall(*head, arguments="".join(pieces))
            for head, pieces in zip(heads, arguments, strict=True)
        )
        return cls("".join(texts), "".join(reasoning), tuple(calls), reason)


class ReasoningTags(Struct, frozen=True):
    """The texts between which a family's models reason."""

    open: str
    close: str
    head: str = ""  # a word behind the opening tag, which belongs to it

    def is_open(self, prompt: str) -> bool:
        """True if the prompt ends between the opening and the closing tag."""
        return prompt.rstrip().endswith((self.open, self.open + self.head))


FAMILIES = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningTags("◁think▷", "◁/think▷"),
    ReasoningTags("<|channel>", "<channel|>", head="thought"),
)
REASONING_OFF = "off"
SETTINGS = ("auto", REASONING_OFF)


def answers_in_channels(templates: Mapping[str, str], setting: str = "auto") -> bool:
    """True if the model's answers are messages on channels, with or without calls among them: those of
    `tools/harmony.py`, which only such models import.
    """
    return setting == "harmony" or (setting in ("auto", "off") and has_channels(templates))


def has_channels(templates: Mapping[str, str]) -> bool:
    """True for the chat templates of models that answer in channels."""
    return any(CHANNEL in text and MESSAGE in text for text in templates.values())


def reasoning_tags(templates: Mapping[str, str], setting: str = "auto") -> ReasoningTags | None:
    """Those of the model whose chat templates these are; None: it does not reason, or the setting is "off"."""
    if setting == REASONING_OFF:
        return None
    text = "\n".join(templates.values())
    return next((tags for tags in FAMILIES if tags.open in text or tags.close in text), None)


class ReasoningReader:
    """One answer's."""

    def __init__(self, tags: ReasoningTags, *, is_open: bool) -> None:
        """`is_open` says that the prompt ended inside of the reasoning."""
        self._tags = tags
        self._text = ""  # what is not decided
        self._is_inside = is_open
        self._may_repeat = is_open  # the prompt's tag, by the model
        self._has_head = False  # the tag's word was removed, or does not follow
        self._is_edge = True  # nothing but line breaks since the tag, or the beginning
        self._is_over = False  # no reasoning can come any more

    def push(self, text: str) -> list[Delta]:
        """The deltas of this much more text: `ReasoningDelta` and `TextDelta`."""
        if self._is_over and not self._is_edge:
            return [TextDelta(text)] if text else []
        self._text += text
        return self._run(is_final=False)

    def finish(self) -> list[Delta]:
        """The rest, once the text has ended."""
        return self._run(is_final=True)

    def _run(self, *, is_final: bool) -> list[Delta]:
        deltas: list[Delta] = []
        if not self._is_inside and not self._is_over and not self._begin(is_final=is_final):
            return deltas
        if self._is_inside:
            deltas += self._inside(is_final=is_final)
        if self._is_over:
            deltas += self._answer()
        return deltas

    def _begin(self, *, is_final: bool) -> bool:
        """True once enough text has come to tell if the answer begins with reasoning."""
        rest = self._text.lstrip()
        if rest.startswith(self._tags.open):
            self._text, self._is_inside = rest[len(self._tags.open) :], True
        elif is_final or not self._tags.open.startswith(rest):
            self._is_over, self._is_edge = True, False
        else:
            return False
        return True

    def _inside(self, *, is_final: bool) -> list[Delta]:
        if self._is_edge:
            self._text = self._text.lstrip(BREAKS)
            if self._may_begin(self._tags.head, is_final=is_final):
                return []
            if self._may_repeat and self._text.startswith(self._tags.open):
                self._text = self._text[len(self._tags.open) :].lstrip(BREAKS)
                self._may_repeat = False
            elif self._may_repeat and not is_final and self._tags.open.startswith(self._text):
                return []
            self._is_edge = not self._text
        reasoning, tag, rest = self._text.partition(self._tags.close)
        if tag:
            self._text, self._is_inside, self._is_over, self._is_edge = rest, False, True, True
            reasoning = reasoning.rstrip(BREAKS)
        elif not is_final:
            held = open_length(reasoning, self._tags.close)
            kept = reasoning[: len(reasoning) - held].rstrip(BREAKS)
            self._text, reasoning = reasoning[len(kept) :], kept
        else:
            self._text = ""
        return [ReasoningDelta(reasoning)] if reasoning else []

    def _may_begin(self, head: str, *, is_final: bool) -> bool:
        """True while the text may be the beginning of `head`; removes it once it is there."""
        if self._has_head or not head:
            return False
        if len(self._text) < len(head) and head.startswith(self._text) and not is_final:
            return True
        self._text, self._has_head = self._text.removeprefix(head).lstrip(BREAKS), True
        return False

    def _answer(self) -> list[Delta]:
        text, self._text = self._text, ""
        if self._is_edge:
            text = text.lstrip(BREAKS)
            self._is_edge = not text
        return [TextDelta(text)] if text else []
