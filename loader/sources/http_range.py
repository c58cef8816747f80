"""Reading a range of an object in several attempts: what to ask for next, and whether an answer is just that.

Pure but for the count of what has arrived. Knows no sockets.
"""

from __future__ import annotations

from ..errors import UnavailableError
from . import checks
from .http_head import Head, Headers, is_strong_etag


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
        """That of all bytes that have arrived; None before the first answer, unless one was asked for."""
        return self._version

    def headers(self) -> Headers:
        """What asks for the bytes that are still missing."""
        wanted = [("Range", f"bytes={self._start + self.done}-{self._end - 1}")]
        if self._version is not None and is_strong_etag(self._version):
            wanted.append(("If-Match", self._version))
        return tuple(wanted)

    def check(self, head: Head, done: int) -> int:
        """Where in the range the answer's body begins, for what was asked when so many bytes were `done`.

        Raises unless it is exactly the bytes then missing, of the version that was begun: `UnavailableError`
        where another attempt may bring the right answer, else `ChangedError`.
        """
        is_whole = head.status == 200
        total_bytes = self._check_whole(head) if is_whole else self._check_range(head, self._start + done)
        version = head.version(total_bytes)
        if self._version is None:
            self._version = version  # a range must not be patched together from two objects
        elif self._version != version and ("etag" in head.headers or not is_strong_etag(self._version)):
            detail = f"version {self._version} was expected, {version} is there"
            raise checks.changed(self._source, self.name, detail)
        return 0 if is_whole else done

    def _check_whole(self, head: Head) -> int:
        """A server that ignores ranges gives the whole object: usable only if that is what was wanted."""
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
            raise checks.ended_early(self._source, self.name, start, self._end, given.total)
        is_exact = given is not None and (given.start, given.end) == (start, self._end)
        if given is None or not is_exact or head.content_length != self._end - start:
            raise WrongAnswerError(
                f"{self._source} answers with other bytes of {self.name} than {start:,} to {self._end:,}",
                source=self._source,
                name=self.name,
            )
        return given.total
