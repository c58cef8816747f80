"""Reasoning apart from the answer, in any pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teneral.handlers.openai.deltas import (
    FAMILIES,
    Answer,
    Delta,
    Finish,
    ReasoningReader,
    ReasoningTags,
    reasoning_tags,
)

TAGS = FAMILIES[0]
CUTS = st.lists(st.integers(0, 60), max_size=8)
PATIENT = settings(suppress_health_check=[HealthCheck.too_slow])


def read(pieces: Sequence[str], *, is_open: bool = False, tags: ReasoningTags = TAGS) -> tuple[str, str]:
    """The reasoning and the answer."""
    reader = ReasoningReader(tags, is_open=is_open)
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += reader.push(piece)
    answer = Answer.of([*deltas, *reader.finish(), Finish("stop")])
    return answer.reasoning, answer.text


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nLet me see.\n\nYes.\n</think>\n\nIt is 4.", False, ("Let me see.\n\nYes.", "It is 4.")),
        ("\nLet me see.\n</think>\nIt is 4.\n", True, ("Let me see.", "It is 4.\n")),
        ("<think>again</think>4", True, ("again", "4")),
        ("It is 4.", False, ("", "It is 4.")),
        ("The tag <think> opens.</think>", False, ("", "The tag <think> opens.</think>")),
        ("<think>cut of", False, ("cut of", "")),
        ("cut off </thi", True, ("cut off </thi", "")),
        ("<think>\n\n</think>\n\nNo thought.", False, ("", "No thought.")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
        (" <thin", False, ("", " <thin")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_and_answer_in_any_pieces(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    assert read([text], is_open=is_open) == expected
    assert read(list(text), is_open=is_open) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # As Gemma 4's template has it, with and without a thought
        ("<|channel>thought\nLet me see.\n<channel|>It is 4.", ("Let me see.", "It is 4.")),
        ("<|channel>thought\n<channel|>It is 4.", ("", "It is 4.")),
        ("<|channel>though", ("though", "")),
        ("<|channel>Let me see.<channel|>4", ("Let me see.", "4")),
        ("It is 4.", ("", "It is 4.")),
    ],
)
def test_a_word_behind_the_opening_tag_belongs_to_it(text: str, expected: tuple[str, str]) -> None:
    tags = reasoning_tags({"default": "{{ part.split('<|channel>')[0] }}"})
    assert tags is not None
    assert tags.is_open("<|turn>model\n<|channel>thought\n")
    assert not tags.is_open("<|turn>model\n<|channel>thought\n<channel|>")
    assert read([text], tags=tags) == expected
    assert read(list(text), tags=tags) == expected


@PATIENT
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", "think>", "\n", " ", "a", "bc", "</"]), max_size=10
    ),
    st.booleans(),
    CUTS,
)
def test_the_result_does_not_depend_on_the_pieces(parts: list[str], is_open: bool, cuts: list[int]) -> None:
    text = "".join(parts)
    cuts = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read([text], is_open=is_open)
    assert read(pieces, is_open=is_open) == whole
    assert read(list(text), is_open=is_open) == whole
    kept = "".join(whole)
    without = text.replace("<think>", "", 2).replace("</think>", "", 1)
    assert len(kept.replace("\n", "")) >= len(without.replace("\n", "").strip())


def test_a_model_reasons_where_its_template_has_the_tags() -> None:
    assert reasoning_tags({"default": "{{ x.split('</think>') }}"}) == TAGS
    assert reasoning_tags({"default": "{{ messages }}"}) is None
    assert reasoning_tags({"default": "<think>"}, "off") is None
