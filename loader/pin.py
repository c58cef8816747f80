"""Pinned addresses: `s3://bucket/model@b3:<64 hex digits>`.

The digits are the BLAKE3-256 of the manifest, which holds the digests of everything else. Light: a
cold process splits the address that it was given before it does anything else.
"""

from __future__ import annotations

import re

from .errors import UsageError

PIN_MARK = "@b3:"
_PIN = re.compile(r"[0-9a-f]{64}\Z", re.IGNORECASE)


def split_pin(url: str) -> tuple[str, bytes | None]:
    """The address and the pinned digest (32 bytes), or None. Raises `UsageError` for half a pin."""
    address, mark, digits = url.rpartition(PIN_MARK)
    if not mark:
        return url, None
    if not address or not _PIN.match(digits):
        raise UsageError(
            f"{url!r} does not end in a whole pin",
            hint=f"A pin is {PIN_MARK} and the 64 hexadecimal digits that `teneral inspect` shows.",
        )
    return address, bytes.fromhex(digits)
