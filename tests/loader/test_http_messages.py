"""Heads, ranges, redirects, dates and addresses of the web client, without a server."""

from __future__ import annotations

from email.utils import formatdate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral.loader.errors import (
    ChangedError,
    UnavailableError,
    UsageError,
)
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.http.address import Origin
from teneral.loader.sources.http.head import (
    Head,
    HeadError,
    RangeRead,
    Request,
    parse_content_range,
    parse_date,
    parse_head,
    redirected,
)
from teneral.loader.sources.http.retry import MAX_RETRY_AFTER_S, pause_s
from teneral.loader.sources.http.source import HttpSource


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_head_or_a_head_error(data: bytes) -> None:
    try:
        head = parse_head(data)
    except HeadError:
        return
    assert 100 <= head.status <= 999
    assert head.content_length is None or head.content_length >= 0


TOKENS = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12).filter(
    lambda name: name not in ("content-length", "transfer-encoding", "connection")
)


VALUES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=20)


@settings(deadline=None)
@given(st.integers(200, 599), st.dictionaries(TOKENS, VALUES, max_size=6))
def test_a_sound_head_keeps_its_fields(status: int, fields: dict[str, str]) -> None:
    lines = [
        f"HTTP/1.1 {status} Whatever It Is",
        *(f"{name.title()}:  {value} " for name, value in fields.items()),
    ]
    assert parse_head("\r\n".join(lines).encode()) == Head(status, fields, keeps_alive=True)


@settings(deadline=None)
@given(st.text(max_size=40) | st.from_regex(r"bytes \d{1,4}-\d{1,4}/(\d{1,4}|\*)", fullmatch=True))
def test_a_content_range_is_half_open_or_none(value: str) -> None:
    parsed = parse_content_range(value)
    if parsed is not None:
        total = "*" if parsed.total is None else parsed.total
        first, _, last = value.removeprefix("bytes ").partition("/")[0].partition("-")
        assert (int(first), int(last) + 1, total) == (parsed.start, parsed.end, total)


@settings(deadline=None)
@given(
    st.integers(0, 200), st.integers(1, 200), st.integers(0, 400), st.integers(0, 400), st.integers(1, 400)
)
def test_only_the_very_range_asked_for_is_accepted(
    start: int, length: int, first: int, last: int, total: int
) -> None:
    wanted = RangeRead("http://host", "blob", start, length, None)
    fields = {"content-range": f"bytes {first}-{last}/{total}", "content-length": str(last - first + 1)}
    try:
        wanted.check(Head(206, fields, keeps_alive=True), 0)
    except (UnavailableError, ChangedError):
        assert (first, last) != (start, start + length - 1)
    else:
        assert (first, last) == (start, start + length - 1)


@pytest.mark.parametrize(
    "location", ["http://host/blob", "file:///etc/passwd", "ftp://host/x", "http://u:p@host/"]
)
def test_a_redirect_never_leaves_tls_or_the_web(location: str) -> None:
    request = Request("GET", Origin("https", "host", 443), "/blob")
    assert redirected(request, location) is None


def test_a_redirect_within_the_origin_keeps_the_headers() -> None:
    request = Request(
        "GET", Origin("http", "host", 80), "/a/b?x=1", (("Range", "bytes=0-1"),), (("Key", "secret"),)
    )
    assert redirected(request, "../c d?y=2") == Request(
        "GET", request.origin, "/c%20d?y=2", request.headers, request.private_headers
    )


def test_pauses_grow_vary_and_respect_the_servers_wish() -> None:
    assert [pause_s(failed, None, 1.0) for failed in (1, 2, 3, 30)] == [0.2, 0.4, 0.8, 5.0]
    assert pause_s(3, None, 0.0) == 0.0
    assert pause_s(1, 7.0, 0.5) == 7.1
    assert pause_s(1, 3600.0, 0.0) == MAX_RETRY_AFTER_S


@pytest.mark.parametrize(
    ("retry_after", "date", "expected_s"),
    [
        ("7", "", 7.0),
        ("Wed, 21 Oct 2026 07:28:30 GMT", "Wed, 21 Oct 2026 07:28:00 GMT", 30.0),
        ("Thu, 01 Mar 2029 00:00:01 GMT", "Wed, 28 Feb 2029 23:59:59 GMT", 2.0),
        ("Thu, 01 Mar 2029 00:00:01 GMT", "Fri, 02 Mar 2029 00:00:00 GMT", 0.0),
        ("Wed, 21 Oct 2026 07:28:30 GMT", "", None),  # by whose clock?
        ("Wed, 21 Foo 2026 07:28:30 GMT", "Wed, 21 Oct 2026 07:28:00 GMT", None),
        ("-1", "", None),
        ("soon", "", None),
    ],
)
def test_a_wish_to_be_asked_later_is_a_number_or_a_date(
    retry_after: str, date: str, expected_s: float | None
) -> None:
    fields = {"retry-after": retry_after} | ({"date": date} if date else {})
    assert Head(503, fields, keeps_alive=True).retry_after_s == expected_s


@settings(deadline=None)
@given(st.integers(-(2**31), 2**37))
def test_a_date_is_read_as_others_write_it(unix_s: int) -> None:
    assert parse_date(formatdate(unix_s, usegmt=True)) == unix_s


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///m",
        "http://host:port/m",
        "http://user:hunter2@host/m",
        "http://[::1/m",
        "http://h:99999",
    ],
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        HttpSource(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("header", [("X", "a\r\nEvil: 1"), ("X:", "a"), ("", "a"), ("X", "ü\u2028")])
def test_a_header_that_would_break_out_of_its_line_is_refused(header: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match="header"):
        HttpSource("http://host/m", SourceOptions(headers=(header,)))


@pytest.mark.parametrize("key", ["hedge_after_s", "min_rate_bytes_s"])
def test_limits_that_may_be_off_must_not_be_negative(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        HttpSource("http://host/m", SourceOptions(**{key: -1}))
    assert caught.value.key == key
    HttpSource("http://host/m", SourceOptions(**{key: 0})).close()


@pytest.mark.parametrize("key", ["connect_timeout_s", "read_timeout_s", "max_attempts", "max_connections"])
def test_limits_must_be_positive(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        HttpSource("http://host/m", SourceOptions(**{key: 0}))
    assert caught.value.key == key
