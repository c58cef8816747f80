"""Forms with files, as clients and attackers send them."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teneral.handlers.http.forms import MAX_FIELDS, parse_form
from teneral.runtime.errors import RequestError

TYPE = "multipart/form-data; boundary=XX"


def field(name: str, content: bytes, more: str = "") -> bytes:
    head = f'--XX\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + content + b"\r\n"


@given(st.lists(st.binary(max_size=200).filter(lambda content: b"--XX" not in content), max_size=5))
def test_fields_come_back(contents: list[bytes]) -> None:
    data = b"".join(field(f"f{number}", content) for number, content in enumerate(contents)) + b"--XX--\r\n"
    found = parse_form(TYPE, data)
    assert [(each.name, bytes(each.content)) for each in found] == [
        (f"f{number}", content) for number, content in enumerate(contents)
    ]


def test_names_of_files_and_quoted_boundaries() -> None:
    data = (
        b"before\r\n"
        + field("file", b"\0\r\n--X", '; filename="a b.wav"')
        + field("x", b"\xc3\xa9")
        + b"--XX--"
    )
    file, text = parse_form('Multipart/Form-Data; charset=utf-8; boundary="XX"', bytearray(data))
    assert (file.name, file.file_name, bytes(file.content)) == ("file", "a b.wav", b"\0\r\n--X")
    assert (text.name, text.file_name, text.text) == ("x", None, "é")


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("application/json", b"{}", "must be a form"),
        ("multipart/form-data", b"", "must be a form"),
        (TYPE, b"", "boundary is not in the body"),
        (TYPE, b"--XX", "cut off"),
        (TYPE, field("a", b"1"), "cut off"),
        (TYPE, field("a", b"1")[:-5] + b"--XX--", "cut off"),
        (TYPE, b"--XX\r\n" + b"a: " + b"x" * 5_000 + b"\r\n\r\n1\r\n--XX--", "too long"),
        (TYPE, b"--XX\r\n\r\n1\r\n--XX--", "has no name"),
        (TYPE, field("a", b"1") * (MAX_FIELDS + 1) + b"--XX--", f"more than {MAX_FIELDS} fields"),
    ],
)
def test_hostile_forms_are_refused(kind: str, data: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_form(kind, data)


def test_what_is_no_text_is_refused_by_its_name() -> None:
    (found,) = parse_form(TYPE, field("prompt", b"\xff") + b"--XX--")
    with pytest.raises(RequestError, match="prompt is not UTF-8"):
        _ = found.text


@given(st.binary(max_size=300))
def test_any_bytes_are_fields_or_refused(data: bytes) -> None:
    with suppress(RequestError):
        parse_form(TYPE, b"--XX" + data)
