"""Deltas: the parts of a chat's answer, as they come, whatever route's wire they are written to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A call of a function, or more of one: its first delta has `id` and `name`, the others have ''."""

    index: int  # among the calls of the answer, from 0
    arguments: str = ""  # a piece of a JSON object
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer's end; always the last."""

    reason: str  # stop, length or tool_calls


Delta = TextDelta | ReasoningDelta | ToolCallDelta | Finish


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # a JSON object, as the model wrote it; cut off where `max_tokens` cut the answer


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, from all of its deltas."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
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
            ToolCall(*head, arguments="".join(pieces)) for head, pieces in zip(heads, arguments, strict=True)
        )
        return cls("".join(texts), "".join(reasoning), tuple(calls), reason)
