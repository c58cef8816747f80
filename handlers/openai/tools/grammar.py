"""The grammar of an answer with calls: exactly the format's shape, each function's arguments by its schema.

An answer that may also be text is free until a call begins, which its special token or its opening text tells; from
there on it is guided.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ....runtime.errors import RequestError
from ....runtime.grammar.spec import GrammarKind, GrammarSpec, SchemaTime
from ..deltas import CHANNEL, MESSAGE, ReasoningTags
from .format import CallShape, ToolFormat
from .functions import MAX_CALLS, ToolMode, ToolPlan, properties_of
from .harmony import (
    ANALYSIS,
    ASSISTANT,
    COMMENTARY,
    END,
    FINAL,
    HARMONY,
    START,
    HarmonyPlace,
    Header,
    PromptEnd,
)


def calls_grammar(
    fmt: ToolFormat,
    plan: ToolPlan,
    answer: GrammarSpec | None,
    reasoning: ReasoningTags | None,
    *,
    is_open: bool,
) -> GrammarSpec:
    """`answer` is the form of an answer that calls nothing; None: any text. Raises `RequestError`."""
    markers = list(fmt.markers)
    rules = _call_rules(fmt, plan, markers)
    if plan.mode is ToolMode.REQUIRED:
        start, answer = "calls", None
    elif answer is None:
        start = _free_start(fmt, plan, markers, rules)
    elif fmt.is_bare and fmt.argument_rules is None:
        rules, start = _json_rules(fmt, plan, answer), "calls | @answer"
    else:
        start = "calls | @answer"
    rules.insert(0, _start(start, markers, reasoning, is_open=is_open))
    return GrammarSpec.composed("\n".join(rules), markers=markers, answer=answer, param="tools")


def reasoning_grammar(answer: GrammarSpec, tags: ReasoningTags, *, is_open: bool) -> GrammarSpec:
    """`answer`, with free reasoning before it."""
    markers: list[str] = []
    start = _start("@answer", markers, tags, is_open=is_open)
    return GrammarSpec.composed(start, markers=markers, answer=answer, param=answer.param)


def channels_grammar(plan: ToolPlan | None, answer: GrammarSpec | None, prompt_end: PromptEnd) -> GrammarSpec:
    """An answer in channels: free reasoning and text for the user, then one call of `plan`, or a last message of the
    form `answer`; None: any text. A required call leaves no last message.
    """
    markers = list(HARMONY.markers)
    rules: list[str] = []
    ends: list[str] = []
    if plan is not None:
        rules += _alternatives("call", HARMONY.shape.before_name, HARMONY, plan, markers)
        ends.append("call")
    last = "WORDS?" if answer is None else "@answer"
    if plan is None or plan.mode is not ToolMode.REQUIRED:
        ends.append("last")
        rules.append(f"last: {_text(f'{CHANNEL}{FINAL}{MESSAGE}', markers)} {last}")
    if last == "WORDS?":
        rules.append("WORDS: /(?s:.+)/")
    next_message = _text(f"{START}{ASSISTANT}", markers)
    until_next = f"until_{markers.index(END)} {next_message}"
    channels = f'("{ANALYSIS}" | "{COMMENTARY}")'
    rules.append(f"message: {_text(CHANNEL, markers)} {channels} {_text(MESSAGE, markers)} {until_next}")
    start = f"message* ({' | '.join(ends)})"
    if prompt_end.place is HarmonyPlace.BETWEEN:
        start = f"{next_message} {start}"
    elif prompt_end.place is HarmonyPlace.TEXT:
        is_last = "last" in ends and Header.read(prompt_end.header).channel == FINAL
        start = last if is_last else f"{until_next} {start}"
    param = "tools" if answer is None or plan is not None else answer.param
    return GrammarSpec.composed(
        "\n".join([f"start: {start}", *rules]), markers=markers, answer=answer, param=param
    )


def _start(rest: str, markers: list[str], tags: ReasoningTags | None, *, is_open: bool) -> str:
    """The rule `start`: `rest`, with reasoning before it where the model reasons."""
    if tags is None:
        return f"start: {rest}"
    close = _marker(tags.close, markers)
    thought = f"until_{close} BREAKS?"
    if not is_open:
        thought = f"(marker_{_marker(tags.open, markers)} {thought})?"
    return f"start: {thought} ({rest})\nBREAKS: /[\\r\\n]{{1,2}}/"


def _free_start(fmt: ToolFormat, plan: ToolPlan, markers: list[str], rules: list[str]) -> str:
    """Text with calls in it. A bare call can only be the answer's beginning: text that begins otherwise is free."""
    if fmt.is_bare:
        rules.append(r"WORDS: /([^{\[\s](?s:.*))?/")
        return "calls | WORDS"
    # The opener is where the free text ends, so it is taken out of what follows it.
    opener, shape = fmt.openers[0], fmt.shape
    if shape.first:
        first = f"{_text(shape.first.removeprefix(opener), markers)} call"
    else:
        rules += _alternatives("opened", shape.before_name.removeprefix(opener), fmt, plan, markers)
        first = "opened"
    more = _more_calls(shape, plan, markers)
    rules.append(f"free: until_{markers.index(opener)} {first}{more} {_text(shape.last, markers)}")
    rules.append("WORDS: /(?s:.+)/")
    return "(free | WORDS)?" if plan.max_calls == 1 else "free* WORDS?"


def _call_rules(fmt: ToolFormat, plan: ToolPlan, markers: list[str]) -> list[str]:
    shape = fmt.shape
    more = _more_calls(shape, plan, markers)
    calls = f"calls: {_text(shape.first, markers)} call{more} {_text(shape.last, markers)}"
    return [calls, *_alternatives("call", shape.before_name, fmt, plan, markers)]


def _json_rules(fmt: ToolFormat, plan: ToolPlan, answer: GrammarSpec) -> list[str]:
    """Bare calls if the answer may be JSON as well: objects by a schema, since two texts with the same beginning can
    only be distinguished by common rules. Raises `RequestError` for an answer of another form.
    """
    if answer.kind is not GrammarKind.JSON_SCHEMA:
        raise RequestError(
            f"{answer.param} and tools together need tool_choice 'none' or 'required' with this model, whose calls are "
            "bare JSON",
            param=answer.param,
        )
    names = [f"call_{number}" for number in range(len(plan.functions))]
    rules = [f"calls: call{_more_calls(fmt.shape, plan, [])}", f"call: {' | '.join(names)}"]
    bound = SchemaTime()
    for name, function in zip(names, plan.functions, strict=True):
        bound.check()
        schema = json.loads(function.arguments().text)
        shared = {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}
        properties = {"name": {"const": function.name}, fmt.arguments_key: schema}
        call = {"type": "object", "properties": properties, "required": list(properties)}
        whole = {**shared, **call, "additionalProperties": False}
        spec = GrammarSpec.json_schema(whole, param="tools", closes=False)
        rules.append(f"{name}: {spec.embedded_schema()}")
    return rules


def _more_calls(shape: CallShape, plan: ToolPlan, markers: list[str]) -> str:
    more = (plan.max_calls or MAX_CALLS) - 1
    return f" ({_text(shape.separator, markers)} call){{0,{more}}}" if more else ""


def _alternatives(
    rule: str, before_name: str, fmt: ToolFormat, plan: ToolPlan, markers: list[str]
) -> list[str]:
    """A rule for a call of any of the functions."""
    shape = fmt.shape
    rules = [f"{rule}: {' | '.join(f'{rule}_{number}' for number in range(len(plan.functions)))}"]
    tail = _text(shape.after_arguments, markers)
    bound = SchemaTime()
    for number, function in enumerate(plan.functions):
        bound.check()
        head = _text(f"{before_name}{function.name}{shape.before_arguments}", markers)
        # Where another function's strictness alone is why an answer is guided: any object.
        is_any = plan.mode is ToolMode.AUTO and plan.is_strict and not function.is_strict
        schema = GrammarSpec.json_schema({"type": "object"}) if is_any else function.arguments()
        if fmt.argument_rules is None:
            rules.append(f"{rule}_{number}: {head} {schema.embedded_schema()} {tail}")
        else:
            rules.append(f"{rule}_{number}: {head} {rule}_{number}_arguments {tail}")
            rules += fmt.argument_rules(f"{rule}_{number}_arguments", properties_of(schema))
    return rules


def _text(text: str, markers: Sequence[str]) -> str:
    """This exact text, in which markers may be special tokens."""
    parts: list[str] = []
    while text:
        starts = [
            (start, number) for number, marker in enumerate(markers) if (start := text.find(marker)) >= 0
        ]
        start, number = min(starts, default=(len(text), -1))
        if start:
            parts.append(json.dumps(text[:start]))
        if number >= 0:
            parts.append(f"marker_{number}")
            start += len(markers[number])
        text = text[start:]
    return " ".join(parts)


def _marker(text: str, markers: list[str]) -> int:
    """The marker's number, added to the others if it is new."""
    if text not in markers:
        markers.append(text)
    return markers.index(text)
