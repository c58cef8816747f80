"""The API keys of a server: one, or several while callers switch to a new one.

    --api-key KEY                    one
    --api-key OLD,NEW                several
    --api-key @/run/secrets/keys     those of a file, one a line; lines that begin with # are none

A file is read once, at the start. No key is ever shown, neither in errors nor in `repr`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...loader.errors import UsageError
from .errors import ApiError

MAX_KEYS = 64
MAX_KEY_CHARS = 4096
MAX_FILE_BYTES = 1 << 20


class ApiKeys:
    """A set of keys. Only digests are stored and compared: all of them, each in a time that depends
    neither on the difference nor on the length of a key.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._salt = secrets.token_bytes(16)
        self._digests = [self._digest(key.encode()) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def opens(self, given: bytes) -> bool:
        return self.place_of(given) > 0

    def check(self, headers: Mapping[str, str]) -> None:
        """Check the key in a request. Raises `ApiError` with 401."""
        if self.opens(given_key(headers)):
            return
        raise ApiError(
            401,
            "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def place_of(self, given: bytes) -> int:
        """The key's place in the setting, from 1; 0 for one that opens nothing. It names a key where none is shown."""
        digest = self._digest(given)
        found = 0
        for place, each in enumerate(self._digests, 1):
            found = max(found, place * hmac.compare_digest(digest, each))
        return found

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._salt, digest_size=32).digest()


def given_key(headers: Mapping[str, str]) -> bytes:
    """The key in a request: a bearer token, or in the header of Anthropic's clients; b'' for none."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    key = token if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.strip().encode("utf-8", "surrogateescape")


def parse_keys(setting: str) -> list[str]:
    """The keys in a setting; clients should send the first. Raises `UsageError`, for none as well:
    a server configured with a key must not be open.
    """
    given = _of_file(Path(setting[1:])) if setting.startswith("@") else setting.split(",")
    keys = [key.strip() for key in given if key.strip()]
    if not 0 < len(keys) <= MAX_KEYS or not all(map(_can_be_sent, keys)):
        raise UsageError(
            f"api_key must be 1 to {MAX_KEYS} keys of visible ASCII, of up to {MAX_KEY_CHARS} characters",
            key="api_key",
            hint="Separate several by commas, or name a file of them, one a line, as @/run/secrets/keys.",
        )
    return keys


def _can_be_sent(key: str) -> bool:
    return len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable() and " " not in key


def _of_file(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read the API keys in {path}: {error.strerror or error}", key="api_key"
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"the API keys in {path} are more than {MAX_FILE_BYTES} bytes", key="api_key")
    lines = data.decode("utf-8", "replace").splitlines()
    return [line for line in lines if not line.lstrip().startswith("#")]
