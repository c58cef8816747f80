"""Files of sound as a job's input: one, or all of a folder, as lines that no object holds, each a request that names
its file. And the files that any line names, next to the input.

A file's version is in its line, so a job reads each file as it was when the job began. This module knows no sound
and no answers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ...loader.errors import ChangedError, UsageError
from ...loader.sources.base import ObjectInfo, Source
from ...loader.sources.open import scheme_of
from ...runtime.errors import RequestError
from .input import MAX_ID_CHARS

# Those of OpenAI's API and of Ogg. A file that cannot be decoded becomes an error.
SUFFIXES = (
    ".wav", ".flac", ".mp3", ".mp4", ".mpeg", ".mpga", ".m4a", ".ogg", ".oga", ".opus", ".webm",
)  # fmt: skip

_NUM_SILENT, _RATE = 1_600, 16_000
# A WAV file that any model of speech answers.
SILENCE = struct.pack(
    "<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + 2 * _NUM_SILENT, b"WAVE", b"fmt ", 16, 1, 1, _RATE, 2 * _RATE, 2, 16,
    b"data", 2 * _NUM_SILENT,
) + bytes(2 * _NUM_SILENT)  # fmt: skip


def is_sound(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def shared_version(address: str, version: str) -> str:
    """The version of an object at this address on any node: of a file without its inode, which differs between those
    that mount the same folder.
    """
    version = version.strip('"')
    return version.rpartition("-")[0] if scheme_of(address) == "" else version


@dataclass(frozen=True, slots=True)
class Files:
    """The files next to an input, in whose folder `source` is."""

    source: Source
    address: str  # of the input
    are_input: bool  # not only named by it

    def read(self, name: str, version: str, *, max_bytes: int) -> bytearray:
        """A whole file; of this version, unless that is ''. Blocks.

        Raises `ChangedError` for another version, `RequestError` for a larger file, and the store's errors.
        """
        info = self.source.stat(name)
        if version and shared_version(self.address, info.version) != version.strip('"'):
            raise ChangedError(
                f"{name} has the version {info.version}, not {version}",
                source=self.source.url,
                name=name,
                hint="It was replaced: the newer version is a job of its own.",
            )
        if info.size_bytes > max_bytes:
            raise RequestError(
                f"{name} has {info.size_bytes} bytes, more than the {max_bytes} that are allowed",
                hint="Set --max-body-bytes.",
            )
        buffer = bytearray(info.size_bytes)
        self.source.read_into(name, 0, memoryview(buffer), version=info.version)
        return buffer


class SoundLines:
    """A `Source` of one object, of any name: a line for each file of sound. Of one file, its version is the file's; of
    a folder, the digest of the lines.
    """

    def __init__(
        self, source: Source, name: str, *, address: str, fields: Mapping[str, Any], max_lines: int
    ) -> None:
        """The lines of the file `name` of the source, or with '' of all its files of sound, whose requests have these
        `fields`. With more than `max_lines` files, there is one line more than that.
        """
        self.url = source.url
        self._source = source
        self._name = name
        self._address = address
        self._fields = fields
        self._max_lines = max_lines
        self._lines = b""
        self._version: str | None = None  # of the lines

    def stat(self, name: str) -> ObjectInfo:
        """The lines of the files as they are now. Raises `UsageError` for a folder without files of sound."""
        found = [self._source.stat(self._name)] if self._name else list(self._found())
        self._lines = b"".join(map(self._line, found))
        self._version = found[0].version if self._name else hashlib.sha256(self._lines).hexdigest()
        return ObjectInfo(name, len(self._lines), self._version)

    def read(self, name: str, *, max_bytes: int) -> tuple[bytes, ObjectInfo]:
        info = self.stat(name)
        return self._lines, info

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        if self._version is None:
            self.stat(name)
        if version not in (None, self._version):
            raise ChangedError(f"{self._address} was changed", source=self.url, name=name)
        buffer[:] = self._lines[start : start + len(buffer)]
        return self._version

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(())

    def close(self) -> None:
        self._source.close()

    def _found(self) -> Iterator[ObjectInfo]:
        num_found = 0
        for info in self._source.list():
            if is_sound(info.name) and num_found <= self._max_lines:
                num_found += 1
                yield info
        if not num_found:
            raise UsageError(
                f"{self._address} has no files of sound",
                key="input",
                hint=f"Their names end in {', '.join(SUFFIXES)}.",
            )

    def _line(self, info: ObjectInfo) -> bytes:
        own = {"custom_id": info.name} if len(info.name) <= MAX_ID_CHARS else {}
        version = shared_version(self._address, info.version)
        return msgspec.json.encode({**self._fields, **own, "file": info.name, "version": version}) + b"\n"
