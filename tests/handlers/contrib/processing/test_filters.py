"""Refusals before the model; redaction of whole texts and of streams, which come to the same."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.inspection import held_by

from teneral.handlers.contrib.processing import Redact, Refuse, handler
from teneral.handlers.contrib.processing.filters import MAX_HELD_CHARS, Scanner
from teneral.handlers.http.errors import as_api_error
from teneral.loader.errors import UsageError
from teneral.runtime.errors import HandlerError, RefusedError, RequestError

# Each with the most characters that a match has, with what it looks at.
PATTERNS = {
    r"ab": 2,
    r"a{1,4}": 4,
    r"aa": 2,
    r"\bab\b": 4,
    r"(?<=b)a(?!b)": 3,
    r"a|abab": 4,
    r"b(a{1,3}b)?": 5,
    r"(?m)^a": 2,
    r"\Aa": 1,
    r"a$": 3,
    r"x*": 1,
    r"[^a]b": 2,
}


@given(
    text=st.text(alphabet="ab \n", max_size=60),
    pattern=st.sampled_from(list(PATTERNS)),
    extra=st.integers(0, 3),
    data=st.data(),
)
@settings(max_examples=400, deadline=None)
def test_a_stream_is_redacted_as_the_whole_text_is(text, pattern, extra, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    redact = Redact(pattern, replacement="#", max_match_chars=PATTERNS[pattern] + extra)
    expected = "".join("#" if match else rest for rest, match in by_re(pattern, text))
    assert "".join(redact.stream(iter(pieces), None)) == expected
    assert redact.text(text) == expected


def by_re(pattern: str, text: str) -> list[tuple[str, bool]]:
    """The oracle: what Python's own search over the whole text finds."""
    parts, end = [], 0
    for match in re.finditer(pattern, text):
        if match.end() > match.start():
            parts += [(text[end : match.start()], False), (match[0], True)]
            end = match.end()
    return [part for part in [*parts, (text[end:], False)] if part[0]]


def digits(text):
    return [match.span() for match in re.finditer(r"(?<!\d)\d{3}(?!\d)", text)]


@given(text=st.text(alphabet="ab1 ", max_size=60), data=st.data())
@example(text="1111 111 ", data=None)
@settings(max_examples=200, deadline=None)
def test_several_finders_redact_all_that_any_of_them_finds(text, data):
    finders = (r"ab{1,3}", r"b{1,3}1", digits)
    redact = Redact(*finders, replacement="#", max_match_chars=5)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12))) if data else [5]
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    streamed = "".join(redact.stream(iter(pieces), None))
    assert streamed == redact.text(text)
    found = [match.span() for finder in finders[:2] for match in re.finditer(finder, text)] + digits(text)
    expected, end = "", 0
    for start, stop in sorted(found):
        if start >= end:  # those that overlap become one
            expected += text[end:start] + "#"
        end = max(end, stop)
    assert streamed == expected + text[end:]


def test_a_stream_holds_back_no_more_than_it_must():
    redact = Redact(r"secret-\d{4}", max_match_chars=11)
    given_so_far, read = "", []

    def pieces():
        for piece in ["so far so good, ", "the code is secret-12", "34, they say", " and so on"]:
            read.append(piece)
            yield piece

    for piece in redact.stream(pieces(), None):
        given_so_far += piece
        assert len("".join(read)) - len(given_so_far) <= 11 + len("secret-1234")
    assert given_so_far == "so far so good, the code is [redacted], they say and so on"


def test_a_match_longer_than_announced_is_found_in_a_stream_too():
    redact = Redact(r"\d+", replacement="#", max_match_chars=4)
    assert "".join(redact.stream(iter(["a", *"1" * 500, "b"]), None)) == "a#b"


def test_what_is_held_is_bounded():
    scanner = Scanner([re.compile("1+")], 4)
    for _ in range(300):
        scanner.feed("1" * 1_000)
        assert len(held_by(scanner)) <= MAX_HELD_CHARS + 1_004


async def test_objects_in_a_stream_keep_their_shape(invoke):
    def values(event, context):
        yield {"text": "call 555-"}
        yield {"text": "1234 now"}
        yield {"finish_reason": "stop", "note": "555-1234"}

    async def avalues(event, context):
        for value in values(event, context):
            yield value

    for function in (values, avalues):
        results = await invoke(handler(post_stream=Redact(r"\d{3}-\d{4}", replacement="#").stream)(function))
        assert results[-1] == {"finish_reason": "stop", "note": "#"}
        assert "".join(value["text"] for value in results[:-1]) == "call # now"


async def test_whole_values_are_redacted_wherever_texts_stand(invoke):
    @handler(post=Redact(r"\d{3}-\d{4}", replacement="#"))
    def answer(event, context):
        return {"text": "call 555-1234", "others": ["555-1234", 5, None], "555-1234": True}

    assert await invoke(answer) == [{"text": "call #", "others": ["#", 5, None], "555-1234": True}]


async def test_an_answer_that_is_too_long_to_look_through_is_not_given_out(invoke):
    with pytest.raises(HandlerError, match="characters"):
        await invoke(handler(post=Redact("x", max_chars=10))(lambda event, context: "y" * 11))


async def test_a_request_is_refused_with_its_code_before_the_model_sees_it(invoke):
    seen = []
    guarded = handler(pre=Refuse(r"(?i)forbidden", str.isspace, code="policy"))(
        lambda event, context: seen.append(event)
    )
    for event in ("a Forbidden thing", {"messages": [{"content": "forbidden"}]}, {"forbidden": 1}, ["  "]):
        with pytest.raises(RefusedError) as caught:
            await invoke(guarded, event)
        refusal = as_api_error(caught.value)
        assert (refusal.status, refusal.code) == (400, "policy")
        assert "forbidden" not in refusal.message.lower()
    assert seen == []
    await invoke(guarded, {"prompt": "fine", "n": 3})
    assert seen == [{"prompt": "fine", "n": 3}]


async def test_the_error_names_the_place_of_the_refused_text(invoke):
    with pytest.raises(RefusedError) as caught:
        await invoke(
            handler(pre=Refuse("bad"))(lambda event, context: None),
            {"messages": [{"content": "good"}, {"content": "bad"}]},
        )
    assert caught.value.param == "messages[1].content"


async def test_events_are_bounded_before_they_are_searched(invoke):
    guarded = handler(pre=Refuse("x", max_chars=100))(lambda event, context: None)
    with pytest.raises(RequestError, match="100 characters"):
        await invoke(guarded, ["y" * 60, "y" * 60])
    deep: object = "y"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(RequestError, match="nested"):
        await invoke(guarded, deep)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Redact(),
        lambda: Redact("x", max_match_chars=0),
        lambda: Redact("x", max_match_chars=1 << 20),
        Refuse,
    ],
)
def test_filters_that_can_find_nothing_are_refused(make):
    with pytest.raises(UsageError):
        make()
