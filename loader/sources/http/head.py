"""HTTP/1.1 heads and ranges as values: requests written, responses parsed, ranges read in several
attempts.

Pure: no sockets, no clocks. Parsing is strict and bounded by its caller; what is ambiguous (two
lengths, folded lines, a length together with chunks) is refused, because two readers could disagree
on where the next answer begins.
"""

from __future__ import annotations

import re
import time
from typing import NamedTuple

from ...errors import UnavailableError
from .. import base
from .address import Origin, parse_address

Headers = tuple[tuple[str, str], ...]

# Compiled when they are first needed are those that the answers to a cold start's first requests do
# not need.
_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-9]\d\d)(?: [^\r\n]*)?")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_CONTENT_RANGE = r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)"
_STRONG_ETAG = re.compile(r'"[\x21\x23-\x7e\x80-\xff]*"')
_NUMBER = re.compile(r"\d{1,19}")
_DATE = r"[A-Z][a-z]{2}, (\d\d) ([A-Z][a-z]{2}) (\d{4}) (\d\d):(\d\d):(\d\d) GMT"
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class HeadError(ValueError):
    """A response's head that is not HTTP/1.1, or that could be read in two ways."""


class Request(NamedTuple):
    """One request. `private_headers` are for this origin alone: a redirect away drops them, as it does
    the body.
    """

    method: str
    origin: Origin
    target: str  # path and query, percent-encoded
    headers: Headers = ()
    private_headers: Headers = ()
    body: bytes = b""  # sent behind the head

    def encode(self) -> bytes:
        """The request's head."""
        lines = [
            f"{self.method} {self.target} HTTP/1.1",
            f"Host: {self.origin.authority}",
            "User-Agent: teneral",
            "Accept: */*",
            # A compressed answer would have other offsets than the object.
            "Accept-Encoding: identity",
            *(() if self.method == "GET" else (f"Content-Length: {len(self.body)}",)),
            *(f"{name}: {value}" for name, value in (*self.headers, *self.private_headers)),
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Head(NamedTuple):
    """A response's head. Field names are in lower case; repeated fields are joined by ', '."""

    status: int
    headers: dict[str, str]
    keeps_alive: bool

    @property
    def content_length(self) -> int | None:
        value = self.headers.get("content-length")
        return None if value is None else int(value)

    @property
    def is_chunked(self) -> bool:
        return "transfer-encoding" in self.headers

    @property
    def content_range(self) -> ContentRange | None:
        return parse_content_range(self.headers.get("content-range", ""))

    @property
    def retry_after_s(self) -> float | None:
        """The server's wish. A date is held against the answer's own, so that clocks need not
        agree.
        """
        value = self.headers.get("retry-after", "")
        if _NUMBER.fullmatch(value):
            return float(value)
        until_unix_s, now_unix_s = parse_date(value), parse_date(self.headers.get("date", ""))
        if until_unix_s is None or now_unix_s is None:
            return None
        return float(max(0, until_unix_s - now_unix_s))

    def version(self, size_bytes: int | None) -> str:
        """The version that tells this object from one that replaces it: a strong ETag, or the best
        of what is given.
        """
        etag, modified = self.headers.get("etag", ""), self.headers.get("last-modified", "")
        return etag if is_strong_etag(etag) else f"{size_bytes}/{etag or modified}"


class ContentRange(NamedTuple):
    """The bytes [start, end) of an object of `total` bytes; None is what the server did not say."""

    start: int
    end: int
    total: int | None


def parse_head(data: bytes) -> Head:
    """The head in `data`, which ends before the empty line. Raises `HeadError`."""
    first, *lines = data.decode("latin-1").split("\r\n")
    status_line = _STATUS_LINE.fullmatch(first)
    if not status_line:
        raise HeadError(f"not an HTTP/1.1 answer: {first[:80]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise HeadError(f"malformed header field {line[:80]!r}")
        if name in headers and not (name == "content-length" and headers[name] == value):
            value = f"{headers[name]}, {value}"
        headers[name] = value
    length, coding = headers.get("content-length"), headers.get("transfer-encoding")
    if length is not None and not _NUMBER.fullmatch(length):
        raise HeadError(f"unusable Content-Length {length[:80]!r}")
    if coding is not None and (coding.lower() != "chunked" or length is not None):
        raise HeadError(f"unusable Transfer-Encoding {coding[:80]!r}")
    options = headers.get("connection", "").lower()
    keeps_alive = "close" not in options and (status_line[1] == "1" or "keep-alive" in options)
    return Head(int(status_line[2]), headers, keeps_alive)


def parse_content_range(value: str) -> ContentRange | None:
    """None for anything that is not a single byte range."""
    found = re.fullmatch(_CONTENT_RANGE, value)
    if not found:
        return None
    return ContentRange(int(found[1]), int(found[2]) + 1, None if found[3] == "*" else int(found[3]))


def parse_date(value: str) -> int | None:
    """Unix seconds of a date as HTTP writes it, such as 'Sun, 06 Nov 1994 08:49:37 GMT'; None for
    all else.
    """
    found = re.fullmatch(_DATE, value)
    if not found or found[2] not in _MONTHS:
        return None
    day, year, hour, minute, second = (int(found[group]) for group in (1, 3, 4, 5, 6))
    # Days since 1970, with years that begin in March, so that the leap day is the last.
    month = (_MONTHS.index(found[2]) + 10) % 12  # March is 0
    year -= month >= 10
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5 + day - 719_469
    return ((days * 24 + hour) * 60 + minute) * 60 + second


def format_date(unix_s: float) -> str:
    """A time as HTTP writes it, whatever the locale."""
    now = time.gmtime(unix_s)
    return time.strftime(f"{_DAYS[now.tm_wday]}, %d {_MONTHS[now.tm_mon - 1]} %Y %H:%M:%S GMT", now)


def parse_time(text: object) -> float | None:
    """Unix seconds of a time in ISO 8601 with its zone; None for all else."""
    import datetime  # a cold start lists nothing

    try:
        moment = datetime.datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return moment.timestamp() if moment is not None and moment.tzinfo is not None else None


def is_strong_etag(value: str) -> bool:
    """True if a server can be asked to compare this byte for byte (If-Match)."""
    return _STRONG_ETAG.fullmatch(value) is not None


def is_header(name: str, value: str) -> bool:
    """True if a user's header can be sent without breaking out of its line."""
    return bool(_TOKEN.fullmatch(name) and _VALUE.fullmatch(value))


def redirected(request: Request, location: str) -> Request | None:
    """The request that a redirect asks for; None where it leads out of the web, or out of TLS."""
    from urllib.parse import urljoin  # few are redirected

    try:
        address = parse_address(urljoin(f"{request.origin}{request.target}", location))
    except ValueError:
        return None
    if address is None or (request.origin.scheme == "https" and address.origin.scheme == "http"):
        return None
    private_headers = request.private_headers if address.origin == request.origin else ()
    return Request(request.method, address.origin, address.target, request.headers, private_headers)


class WrongAnswerError(UnavailableError):
    """The answer is to another question. The store is there: this is no outage."""


class RangeRead:
    """The bytes [start, start + length) of one version of an object; the first `done` have arrived."""

    def __init__(self, source: str, name: str, start: int, length: int, version: str | None) -> None:
        self.done = 0
        self.name = name
        self._source = source
        self._start = start
        self._end = start + length
        self._version = version

    @property
    def version(self) -> str | None:
        """That of all bytes that have arrived; None before the first answer, unless one was asked
        for.
        """
        return self._version

    def headers(self) -> Headers:
        """The headers that request the bytes still missing."""
        wanted = [("Range", f"bytes={self._start + self.done}-{self._end - 1}")]
        if self._version is not None and is_strong_etag(self._version):
            wanted.append(("If-Match", self._version))
        return tuple(wanted)

    def check(self, head: Head, done: int) -> int:
        """The offset in the range at which the answer's body begins, for a request made when `done`
        bytes were there.

        Raises unless it is exactly the bytes then missing, of the version that was begun:
        `UnavailableError` where another attempt may bring the right answer, else `ChangedError`.
        """
        is_whole = head.status == 200
        total_bytes = self._check_whole(head) if is_whole else self._check_range(head, self._start + done)
        version = head.version(total_bytes)
        if self._version is None:
            self._version = version  # a range must not be patched together from two objects
        elif self._version != version and ("etag" in head.headers or not is_strong_etag(self._version)):
            detail = f"version {self._version} was expected, {version} is there"
            raise base.changed(self._source, self.name, detail)
        return 0 if is_whole else done

    def _check_whole(self, head: Head) -> int:
        """A server that ignores ranges gives the whole object: usable only if that is what was
        wanted.
        """
        if self._start != 0 or head.content_length != self._end:
            raise WrongAnswerError(
                f"{self._source} answers with the whole of {self.name} where a range was asked for",
                source=self._source,
                name=self.name,
                hint="The server must support byte ranges, as S3, nginx and most others do.",
            )
        return self._end

    def _check_range(self, head: Head, start: int) -> int | None:
        given = head.content_range
        if given and given.start == start and given.end == given.total and given.end < self._end:
            raise base.ended_early(self._source, self.name, start, self._end, given.total)
        is_exact = given is not None and (given.start, given.end) == (start, self._end)
        if given is None or not is_exact or head.content_length != self._end - start:
            raise WrongAnswerError(
                f"{self._source} answers with other bytes of {self.name} than {start:,} to {self._end:,}",
                source=self._source,
                name=self.name,
            )
        return given.total
