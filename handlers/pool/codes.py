"""The codes of everything that can be wrong with a pool file, and the errors and warnings that carry them.

Knows no platform: `teneral pool render` raises and returns these values as well, with its own messages.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from ...loader.errors import UsageError


class Code(enum.StrEnum):
    """E: the command ends with status 2. W: printed to standard error; with `--strict`, an error."""

    E0 = "E0"  # the file cannot be read, or is not TOML
    E1 = "E1"  # unknown key
    E2 = "E2"  # wrong type or out of range, or a required key is missing
    E3 = "E3"  # min_warm > max_instances
    E4 = "E4"  # max_concurrency < target_concurrency
    E5 = "E5"  # traffic, shadow or pins name a version that is not served, or weights do not sum to 100
    E6 = "E6"  # beyond the platform's limit
    E7 = "E7"  # scale to zero on a platform where nothing holds the request
    E8 = "E8"  # min_warm + buffer > max_instances
    E9 = "E9"  # the same served name twice
    E10 = "E10"  # `pool run`: the warm instances do not fit in the node's memory
    E11 = "E11"  # the file's version is newer than this program
    W1 = "W1"  # not available on this platform, left out
    W2 = "W2"  # approximated by something else
    W3 = "W3"  # requests fail while the model wakes
    W4 = "W4"  # a patch changes a value that a key of the file sets


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a key in a pool file. `line` counts from 1; 0 means that the key is not written there."""

    file: str
    key: str
    line: int = 0

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.key}" if self.key else where


class PoolFileError(UsageError):
    """A pool file that cannot be used. `code` and `place` say why and where, for machines."""

    def __init__(self, code: Code, place: Place, message: str, *, hint: str = "") -> None:
        """`message` continues a sentence that begins with the key: 'must be a whole number from 0 to 1000'."""
        super().__init__(f"{place}: {message} [{code}]", key=place.key, hint=hint)
        self.code = code
        self.place = place
        self.detail = message

    def as_json(self) -> dict[str, Any]:
        return _as_json(self.code, self.place, self.detail, self.hint)


@dataclass(frozen=True, slots=True)
class PoolWarning:
    """Something in a pool file that a platform cannot do, or not exactly."""

    code: Code
    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message} [{self.code}]"

    def as_error(self) -> PoolFileError:
        """The same as an error, for `--strict`."""
        return PoolFileError(self.code, self.place, self.message, hint="--strict makes warnings errors.")

    def as_json(self) -> dict[str, Any]:
        return _as_json(self.code, self.place, self.message, "")


def _as_json(code: Code, place: Place, message: str, hint: str) -> dict[str, Any]:
    report = {"code": str(code), "file": place.file, "key": place.key, "line": place.line, "message": message}
    return {**report, "hint": hint} if hint else report
