"""Stop strings: nothing of them is given out, all before them is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teneral.runtime.text.detokenizer import StopStrings


def run(stop, pieces):
    """The text given out over all pieces, and whether a stop string was found."""
    watch = StopStrings(stop)
    text = ""
    for piece in pieces:
        out, stopped = watch.push(piece)
        text += out
        if stopped:
            return text, True
    return text + watch.flush(), False


def cut_at_first_complete(stop, text):
    """The output of a reader that takes one character at a time."""
    for end in range(1, len(text) + 1):
        found = [each for each in stop if text[:end].endswith(each)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (["END"], ["some text EN", "D and more"], "some text "),
        (["END"], ["some text E", "N", "D"], "some text "),
        (["\n\n"], ["line\n", "\nnext"], "line"),
        (["aab"], ["aa", "aab"], "aa"),
        (["c", "bcd"], ["ab", "cd"], "ab"),
        (["stop", "op"], ["st", "op"], ""),
    ],
)
def test_a_stop_string_across_pieces_is_found_and_the_text_before_it_kept(stop, pieces, expected):
    assert run(stop, pieces) == (expected, True)


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_decided():
    watch = StopStrings(["<end>"])
    assert watch.push("answer <") == ("answer ", False)
    assert watch.push("en") == ("", False)
    assert watch.push("emy>") == ("<enemy>", False)


def test_what_was_held_back_is_given_out_at_the_end_of_the_sequence():
    watch = StopStrings(["###"])
    assert watch.push("text ##") == ("text ", False)
    assert watch.flush() == "##"
    assert watch.flush() == ""


def test_no_more_is_held_back_than_could_begin_a_stop_string():
    watch = StopStrings(["ababc"])
    assert watch.push("xabab") == ("x", False)
    assert watch.push("ab") == ("ab", False)


def test_without_stop_strings_all_text_passes():
    assert StopStrings(()).push("anything") == ("anything", False)


letters = st.text(alphabet="ab", max_size=12)


@given(
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(letters, max_size=8),
)
def test_the_result_does_not_depend_on_how_the_text_is_cut(stop, pieces):
    assert run(stop, pieces) == cut_at_first_complete(stop, "".join(pieces))


def test_an_included_stop_string_ends_the_text():
    watch = StopStrings(["END"], included=True)
    assert watch.push("some E") == ("some ", False)
    assert watch.push("ND and more") == ("END", True)


def test_a_stop_string_counts_from_the_text_that_may_end_it():
    watch = StopStrings(["ab", "abc"])
    assert watch.push("xab", counts=False) == ("x", False)
    assert watch.push("d") == ("abd", False)  # complete before
    assert watch.push("a", counts=False) == ("", False)
    assert watch.push("b") == ("", True)
