"""Reading a range of an object in several attempts: what to ask for next, and whether an answer is just that.

Pure but for the count of what has arrived. Knows no sockets.
"""

from __future__ import annotations

from ..errors import UnavailableError
from . import checks
from .http_head import Head, Headers, is_strong_etag


class RangeRead:
    """The bytes [start, start + length) of one version of an object; the first `done` have arrived."""

    def __init__(self, source: str, name: str, start: int, length: int, version: str | None) -> None:
        self.done = 0
        self._source = source
        self._name = name
        self._start = start
        self._end = start + length
        self._version = version

    def headers(self) -> Headers:
        """What asks for the bytes that are still missing."""
        wanted = [("Range", f"bytes={self._start + self.done}-{self._end - 1}")]
        if self._version is not None and is_strong_etag(self._version):
            wanted.append(("If-Match", self._version))
        return tuple(wanted)

    def check(self, head: Head) -> None:
        """Raises unless the answer's body is exactly the missing bytes, of the version that was begun.

        `UnavailableError` where another attempt may bring the right answer, else `ChangedError`.
        """
        total_bytes = self._check_whole(head) if head.status == 200 else self._check_range(head)
        version = head.version(total_bytes)
        if self._version is None:
            self._version = version  # a resumed range must not be patched together from two objects
        elif self._version != version and ("etag" in head.headers or not is_strong_etag(self._version)):
            detail = f"version {self._version} was expected, {version} is there"
            raise checks.changed(self._source, self._name, detail)

    def _check_whole(self, head: Head) -> int:
        """A server that ignores ranges gives the whole object: usable only if that is what was wanted."""
        if self._start != 0 or head.content_length != self._end:
            raise UnavailableError(
                f"{self._source} answers with the whole of {self._name} where a range was asked for",
                source=self._source,
                name=self._name,
                hint="The server must support byte ranges, as S3, nginx and most others do.",
            )
        self.done = 0
        return self._end

    def _check_range(self, head: Head) -> int | None:
        given, start = head.content_range, self._start + self.done
        if given and given.start == start and given.end == given.total and given.end < self._end:
            raise checks.ended_early(self._source, self._name, start, self._end, given.total)
        is_exact = given is not None and (given.start, given.end) == (start, self._end)
        if given is None or not is_exact or head.content_length != self._end - start:
            raise UnavailableError(
                f"{self._source} answers with other bytes of {self._name} than {start:,} to {self._end:,}",
                source=self._source,
                name=self._name,
            )
        return given.total
