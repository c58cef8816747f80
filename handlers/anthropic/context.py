"""Context management of the Messages API: older reasoning and older results of tools are cleared from a conversation.

Works on the messages of a chat. The number of tokens comes from the caller, which has a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from ...runtime.errors import RequestError
from ..openai.schemas import FunctionCall, Message, ToolCall
from .bodies import ContextEdit, ContextManagement, Threshold

Json = dict[str, Any]
CLEAR_THINKING, CLEAR_TOOL_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"
CLEARED = "[cleared to save context]"
DEFAULT_TRIGGER_TOKENS, DEFAULT_KEPT_USES = 100_000, 3  # Anthropic's


class AppliedEdits(msgspec.Struct, frozen=True):
    """The messages that are left, and the report of what was cleared."""

    messages: list[Message]
    report: list[Json]
    warnings: list[str]


def apply_edits(
    messages: Sequence[Message],
    management: ContextManagement,
    count_tokens: Callable[[Sequence[Message]], int],
) -> AppliedEdits:
    """Apply the edits in their order. `count_tokens` blocks. Raises `RequestError` for thresholds of unknown types."""
    left, report, warnings = list(messages), list[Json](), list[str]()
    for number, edit in enumerate(management.edits or []):
        where = f"context_management.edits[{number}]"
        if edit.type not in (CLEAR_THINKING, CLEAR_TOOL_USES):
            warnings.append(f"{where} is left out: edits of type {edit.type[:50]!r} are not supported")
            continue
        if edit.type == CLEAR_THINKING:
            changed, counts = _without_thinking(left, edit, where)
        else:
            changed, counts = _without_results(left, edit, where, count_tokens)
        if not any(counts.values()):
            continue
        num_cleared = max(0, count_tokens(left) - count_tokens(changed))
        least = _value(edit.clear_at_least, f"{where}.clear_at_least", "input_tokens", 0)
        if num_cleared < least:
            continue
        left = changed
        report.append({"type": edit.type, **counts, "cleared_input_tokens": num_cleared})
    return AppliedEdits(left, report, warnings)


def _without_thinking(
    messages: Sequence[Message], edit: ContextEdit, where: str
) -> tuple[list[Message], dict[str, int]]:
    """Keep the reasoning of the last turns alone."""
    places = [place for place, message in enumerate(messages) if message.reasoning_content]
    if edit.keep == "all":
        return list(messages), {"cleared_thinking_turns": 0}
    if isinstance(edit.keep, str):
        raise RequestError(f"{where}.keep must be 'all' or a number of thinking_turns", param=f"{where}.keep")
    num_kept = _value(edit.keep, f"{where}.keep", "thinking_turns", 1)
    cleared = set(places[: max(0, len(places) - num_kept)])
    changed = [
        replace(message, reasoning_content=None) if place in cleared else message
        for place, message in enumerate(messages)
    ]
    return changed, {"cleared_thinking_turns": len(cleared)}


def _without_results(
    messages: Sequence[Message],
    edit: ContextEdit,
    where: str,
    count_tokens: Callable[[Sequence[Message]], int],
) -> tuple[list[Message], dict[str, int]]:
    """Once the trigger is passed, clear the results of all calls but the last ones."""
    calls = [call for message in messages for call in message.tool_calls or []]
    trigger = edit.trigger
    if trigger is not None and trigger.type == "tool_uses":
        is_due = len(calls) > trigger.value
    else:
        limit = _value(trigger, f"{where}.trigger", "input_tokens", DEFAULT_TRIGGER_TOKENS)
        is_due = count_tokens(messages) > limit
    if isinstance(edit.keep, str):
        raise RequestError(f"{where}.keep must be a number of tool_uses", param=f"{where}.keep")
    num_kept = _value(edit.keep, f"{where}.keep", "tool_uses", DEFAULT_KEPT_USES)
    excluded = frozenset(edit.exclude_tools or ())
    old = [call for call in calls[: max(0, len(calls) - num_kept)] if call.function.name not in excluded]
    results = {
        message.tool_call_id for message in messages if message.role == "tool" and message.content != CLEARED
    }
    cleared = {call.id: call for call in old if call.id in results} if is_due else {}
    inputs = edit.clear_tool_inputs

    def without(call: ToolCall) -> ToolCall:
        is_cleared = inputs is True or (isinstance(inputs, list) and call.function.name in inputs)
        if call.id not in cleared or not is_cleared:
            return call
        return replace(call, function=FunctionCall(name=call.function.name, arguments="{}"))

    def changed(message: Message) -> Message:
        if message.role == "tool" and message.tool_call_id in cleared:
            return replace(message, content=CLEARED)
        if message.tool_calls:
            return replace(message, tool_calls=[without(call) for call in message.tool_calls])
        return message

    return list(map(changed, messages)), {"cleared_tool_uses": len(cleared)}


def _value(threshold: Threshold | None, where: str, kind: str, default: int) -> int:
    if threshold is None:
        return default
    if threshold.type != kind or threshold.value < 0:
        raise RequestError(f"{where} must be of type {kind!r}, with a value of 0 or more", param=where)
    return threshold.value
