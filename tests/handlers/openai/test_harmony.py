"""Answers in channels: reasoning, text and calls in any pieces, headers that are none, and grammars of such answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.grammar_vocabulary import Vocabulary

from teneral.handlers.openai.deltas import Answer, Delta, Finish
from teneral.handlers.openai.tools.functions import tool_plan
from teneral.handlers.openai.tools.grammar import channels_grammar
from teneral.handlers.openai.tools.harmony import (
    HARMONY,
    MAX_HEADER_CHARS,
    ChannelReader,
    HarmonyPlace,
    PromptEnd,
    harmony_messages,
    harmony_tools,
)
from teneral.runtime.grammar.spec import GrammarSpec

PATIENT = settings(suppress_health_check=[HealthCheck.too_slow])
CUTS = st.lists(st.integers(0, 300), max_size=8)
PROMPT = "<|start|>user<|message|>Hello<|end|><|start|>assistant"
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS: dict[str, Any] = {"weather": PLACE, "get.time": {}}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
WEATHER = ("weather", '{"city": "Oslo"}')
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'


def read(
    pieces: Sequence[str], *, prompt: str = PROMPT, **options: Any
) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, text and calls."""
    reader = ChannelReader(PromptEnd.of(prompt), FUNCTIONS, **options)
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += reader.push(piece)
    answer = Answer.of([*deltas, *reader.finish(), Finish("stop")])
    return answer.reasoning, answer.text, [(call.name, call.arguments) for call in answer.calls]


CASES: list[tuple[str, tuple[str, str, list[tuple[str, str]]]]] = [
    (f"{THOUGHT}<|channel|>final<|message|>Four.<|return|>", ("Hm.", "Four.", [])),
    (f"{THOUGHT}<|channel|>final<|message|>Fo", ("Hm.", "Fo", [])),
    (f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>Four.", ("Hm.\nHm.", "Four.", [])),
    ("<|channel|>analysis<|message|>cut of", ("cut of", "", [])),
    ('<|channel|>final <|constrain|>json<|message|>{"a": 1}', ("", '{"a": 1}', [])),
    # Calls: the recipient behind the channel or before it, and the type with its mark or without
    (f"{THOUGHT}{CALL}<|call|>", ("Hm.", "", [WEATHER])),
    (
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
        ("", "", [WEATHER]),
    ),
    ("<|channel|>commentary to=functions.get.time<|message|>{}<|call|>", ("", "", [("get.time", "{}")])),
    ("<|channel|>commentary to=functions.get.time<|message|><|call|>", ("", "", [("get.time", "{}")])),
    ('<|channel|>analysis to=weather<|message|>{"city": "Oslo"}', ("", "", [WEATHER])),
    (
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}<|call|>",
        ("", "I look.", [WEATHER]),
    ),
    (
        f"{CALL}<|call|><|start|>assistant{CALL}<|end|><|start|>assistant<|channel|>final<|message|>So.",
        ("", "So.", [WEATHER, WEATHER]),
    ),
    # Tools that were not offered
    ("<|channel|>analysis to=python<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
    ("<|channel|>commentary to=functions.other<|message|>{}<|call|>", ("", "{}", [])),
    # Headers that are none
    ("It is four.", ("", "It is four.", [])),
    ('{"a": 1}', ("", '{"a": 1}', [])),
    ("tomorrow", ("", "tomorrow", [])),
    ("", ("", "", [])),
    (
        "<|channel|>I should<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        ("", "I should\nYes.", []),
    ),
    ("<|channel|>commentary?commentary?<|message|>Yes.", ("", "Yes.", [])),
    ("<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm.", ("Hm.", "", [])),
    ("<|channel|>final<|end|>", ("", "", [])),
    (f"{CALL.replace('<|message|>', '')}<|call|>", ("", "", [WEATHER])),
    ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", ("a", "b", [])),
    ("<|channel|>final<|message|>a<|end|>b", ("", "a\nb", [])),
    ("<|channel|>ana", ("", "", [])),
    ("<|channel|>commentary to=functions.weather", ("", "", [])),
    # Messages of others, which are no answer
    (
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"Sun"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Sun.",
        ("", "Sun.", []),
    ),
    ("<|channel|>final<|message|>Yes.<|end|><|start|>user<|message|>Sure?", ("", "Yes.", [])),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_an_answer_in_any_pieces(text: str, expected: tuple[str, str, list[tuple[str, str]]]) -> None:
    assert read([text]) == expected
    for is_eager in (False, True):
        assert read([text], is_eager=is_eager) == expected
        assert read(list(text), is_eager=is_eager) == expected
        for cut in range(1, len(text)):
            assert read([text[:cut], text[cut:]], is_eager=is_eager) == expected


def test_a_call_whose_arguments_are_no_object_is_text_unless_it_was_streamed() -> None:
    broken = CALL.replace('"}', "")
    assert read([broken]) == ("", '{"city": "Oslo', [])
    assert read(list(broken), is_eager=True) == ("", "", [("weather", '{"city": "Oslo')])


def test_arguments_are_streamed_as_they_come() -> None:
    reader = ChannelReader(PromptEnd.of(PROMPT), FUNCTIONS, is_eager=True)
    pieces = [len(reader.push(letter)) for letter in CALL]
    assert sum(pieces[:-16]) == 1  # the name, once the header is there
    assert sum(pieces[-16:]) == 16


def test_nothing_follows_the_last_call() -> None:
    text = f"{CALL}<|call|><|start|>assistant{CALL}<|call|><|start|>assistant<|channel|>final<|message|>So."
    for is_eager in (False, True):
        assert read([text], max_calls=1, is_eager=is_eager) == ("", "", [WEATHER])
        assert read(list(text), max_calls=1, is_eager=is_eager) == ("", "", [WEATHER])


def test_reasoning_and_calls_are_text_where_the_server_reads_none() -> None:
    reader = ChannelReader(PromptEnd.of(PROMPT), {}, gives_reasoning=False)
    answer = Answer.of([*reader.push(f"{THOUGHT}{CALL}<|call|>"), *reader.finish(), Finish("stop")])
    assert (answer.reasoning, answer.text, answer.calls) == ("", 'Hm.\n{"city": "Oslo"}', ())


@pytest.mark.parametrize("marker", ["", "<|message|>rest", "<|end|>"])
@pytest.mark.parametrize("excess", [-12, -1, 0, 1, 2, 9, 10, 11, 12, 40])
def test_a_long_header_is_text(marker: str, excess: int) -> None:
    text = "<|channel|>final" + "x" * (MAX_HEADER_CHARS - len("<|channel|>final") + excess) + marker
    whole = read([text])
    assert read(list(text)) == whole
    if excess > 0:
        assert whole[1].count("x") == text.count("x")


PARTS = (
    *(
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|constrain|>",
        "assistant",
        "final",
    ),
    *("analysis", "commentary", " to=functions.weather", " ", "\n", "{", "}", "{}", "a", "<", "|>", "user"),
)


@PATIENT
@given(
    st.lists(
        st.sampled_from(PARTS),
        max_size=14,
    ),
    st.sampled_from([PROMPT, f"{PROMPT}<|channel|>final<|message|>It", f"{PROMPT}<|channel|>", "Hello", ""]),
    CUTS,
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_the_result_does_not_depend_on_the_pieces(
    parts: list[str], prompt: str, cuts: list[int], max_calls: int | None, is_eager: bool
) -> None:
    text = "".join(parts)
    cuts = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    options: dict[str, Any] = {"prompt": prompt, "max_calls": max_calls, "is_eager": is_eager}
    whole = read([text], **options)
    assert read(pieces, **options) == whole
    assert read(list(text), **options) == whole


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        (PROMPT, HarmonyPlace.HEADER),
        (f"{PROMPT}\n", HarmonyPlace.HEADER),
        (f"{PROMPT}<|channel|>final<|message|>It is", HarmonyPlace.TEXT),
        (f"{PROMPT}<|channel|>final<|message|>Yes.<|return|>", HarmonyPlace.BETWEEN),
        ("Hello", HarmonyPlace.BETWEEN),
    ],
)
def test_the_place_where_a_prompt_ends(prompt: str, place: HarmonyPlace) -> None:
    assert PromptEnd.of(prompt).place is place


def test_an_answer_continues_the_message_of_its_prompt() -> None:
    assert read([" four."], prompt=f"{PROMPT}<|channel|>final<|message|>It is") == ("", " four.", [])
    assert read(["final<|message|>Four."], prompt=f"{PROMPT}<|channel|>") == ("", "Four.", [])
    assert read([f"<|start|>assistant{THOUGHT}"], prompt="<|start|>user<|message|>?<|end|>")[0] == "Hm."


# Conversations


def call(name: str, number: int) -> dict[str, Any]:
    return {
        "type": "function",
        "id": f"call_{number}",
        "function": {"name": name, "arguments": {"n": number}},
    }


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": str(number)}


def test_each_call_is_a_message_with_its_result_behind_it() -> None:
    messages = [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [call("a", 1), call("b", 2)],
        },
        result(2),
        result(1),
        {"role": "assistant", "content": "So.", "reasoning_content": "Done."},
    ]
    before = json.dumps(messages)
    user, first, first_result, second, second_result, last = harmony_messages(messages)
    assert json.dumps(messages) == before
    assert user == messages[0]
    assert (first["thinking"], first["content"], first["tool_calls"]) == ("Hm.\nI look.", "", [call("a", 1)])
    assert first_result == result(1)
    assert "thinking" not in second
    assert second["tool_calls"] == [call("b", 2)]
    assert second_result == result(2)
    assert (last["thinking"], last["content"]) == ("Done.", "So.")


def test_no_result_is_lost() -> None:
    unknown = {"role": "tool", "content": "no id"}
    calls = {"role": "assistant", "content": "", "tool_calls": [call("a", 1), call("b", 2)]}
    changed = harmony_messages([calls, unknown, result(2), result(9), result(2)])
    assert [each.get("content") for each in changed if each["role"] == "tool"] == ["no id", "2", "9", "2"]
    assert harmony_messages([unknown]) == [unknown]


def test_a_function_has_a_description() -> None:
    named = {"type": "function", "function": {"name": "a", "description": "A"}}
    assert harmony_tools([{"type": "function", "function": {"name": "a"}}, named]) == [
        {"type": "function", "function": {"name": "a", "description": ""}},
        named,
    ]
    assert harmony_tools(None) is None


# Grammars


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    markers = [each for each in HARMONY.markers if each != "<|return|>"]
    return Vocabulary(markers if request.param else (), end="<|return|>", special=True)


def plan(choice: Any, *, strict: bool = False) -> Any:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in FUNCTIONS.items()
    ]
    return tool_plan(tools, choice, None)


FORM = GrammarSpec.json_schema({"enum": ["yes", "no"]}, param="response_format")


@pytest.mark.parametrize(
    ("choice", "answer", "accepted", "refused"),
    [
        ("required", None, [f"{THOUGHT}{CALL}", CALL], [f"{THOUGHT}<|channel|>final<|message|>Four."]),
        (
            {"type": "function", "function": {"name": "get.time"}},
            None,
            ["<|channel|>commentary to=functions.get.time <|constrain|>json<|message|>{}"],
            [CALL],
        ),
        (
            "auto",
            None,
            [f"{THOUGHT}{CALL}", f"{THOUGHT}<|channel|>final<|message|>Four.", "<|channel|>final<|message|>"],
            [CALL.replace("Oslo", "Bern")],
        ),
        ("auto", FORM, [f"{THOUGHT}{CALL}", '<|channel|>final<|message|>"no"'], ["<|channel|>final<|message|>No"]),
        (None, FORM, [f'{THOUGHT}<|channel|>final<|message|>"yes"'], [CALL, '"yes"', THOUGHT]),
    ],
)  # fmt: skip
def test_a_grammar_has_free_reasoning_and_guides_the_rest(
    vocabulary: Vocabulary, choice: Any, answer: Any, accepted: list[str], refused: list[str]
) -> None:
    calls = None if choice is None else plan(choice, strict=True)
    spec = channels_grammar(calls, answer, PromptEnd.of(PROMPT))
    compact = '{"city": "Oslo"}', '{"city":"Oslo"}'
    for text in accepted:
        assert vocabulary.accepts(spec, text.replace(*compact)), text
    for text in refused:
        assert not vocabulary.accepts(spec, text.replace(*compact)), text


def test_required_calls_are_always_valid(vocabulary: Vocabulary) -> None:
    spec = channels_grammar(plan("required"), None, PromptEnd.of(PROMPT))
    texts = [vocabulary.sample(spec, seed, 2000) for seed in range(8)]
    assert sum(text is not None for text in texts) >= 2  # others go on thinking
    for text in texts:
        if text is not None:
            _, _, [(name, arguments)] = read([text], is_eager=True)
            assert name in FUNCTIONS
            assert isinstance(json.loads(arguments), dict)


def test_a_grammar_begins_where_the_prompt_ends(vocabulary: Vocabulary) -> None:
    continued = PromptEnd.of(f"{PROMPT}<|channel|>final<|message|>It is ")
    assert vocabulary.accepts(channels_grammar(None, FORM, continued), '"no"')
    behind = PromptEnd.of("<|start|>user<|message|>?<|end|>")
    spec = channels_grammar(None, FORM, behind)
    assert vocabulary.accepts(spec, f'<|start|>assistant{THOUGHT}<|channel|>final<|message|>"no"')
    assert not vocabulary.accepts(spec, '"no"')
