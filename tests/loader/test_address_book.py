"""The order in which a connection tries a host's addresses."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import pytest
from tests.support.load import patience_s

from teneral.loader.sources.http.address import Origin
from teneral.loader.sources.http.wire import AddressBook

HOST = Origin("https", "store.example", 443)
FOUR = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"192.0.2.{number}", 443)) for number in (1, 2, 3)]
SIX = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (f"2001:db8::{number}", 443, 0, 0)) for number in (1, 2)]


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts that were looked up; every host has two IPv6 and three IPv4 addresses."""
    seen: list[str] = []

    def look_up(host: str | bytes, *_: Any, **__: Any) -> list[Any]:
        seen.append(host if isinstance(host, str) else host.decode())
        return [*SIX, *FOUR]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return seen


def first(book: AddressBook) -> str:
    return book.addresses(HOST)[0][2][0]


def test_connections_take_turns_among_the_preferred_kind_and_look_up_once(lookups: list[str]) -> None:
    book = AddressBook()
    assert [first(book) for _ in range(4)] == ["2001:db8::1", "2001:db8::2"] * 2
    assert len(book.addresses(HOST)) == 5
    assert lookups == ["store.example"]


def test_an_address_that_failed_is_tried_last(lookups: list[str]) -> None:
    book = AddressBook()
    bad = book.addresses(HOST)[0]
    book.failed(HOST, bad)
    for _ in range(3):
        given = book.addresses(HOST)
        assert (given[0][2][0], given[-1]) == ("2001:db8::2", bad)


def test_when_a_whole_kind_failed_the_other_takes_turns(lookups: list[str]) -> None:
    book = AddressBook()
    for _ in SIX:
        book.failed(HOST, book.addresses(HOST)[0])
    assert {first(book) for _ in range(6)} == {"192.0.2.1", "192.0.2.2", "192.0.2.3"}


def test_a_host_that_is_forgotten_is_looked_up_again(lookups: list[str]) -> None:
    book = AddressBook()
    book.addresses(HOST)
    book.forget(HOST)
    book.addresses(HOST)
    assert len(lookups) == 2


def test_looking_up_a_name_imports_no_tables_of_letters() -> None:
    code = (
        "import sys; from teneral.loader.sources.http.wire import AddressBook; "
        "from teneral.loader.sources.http.address import Origin; "
        "assert AddressBook().addresses(Origin('http', 'localhost', 80)); "
        "assert 'encodings.idna' not in sys.modules and 'unicodedata' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience_s(60))


@pytest.mark.parametrize("host", ["a..b", "x" * 300, "no\0name", "nöch.invalid"])
def test_a_name_that_cannot_be_one_is_an_error_of_looking_up(host: str) -> None:
    with pytest.raises((OSError, UnicodeError)):
        AddressBook().addresses(Origin("http", host, 80))
