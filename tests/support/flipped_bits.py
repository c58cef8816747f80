"""Documents with one flipped bit each."""

from __future__ import annotations

from collections.abc import Callable

from teneral.loader.errors import FormatError


def accepted_flips(data: bytes, parse: Callable[[bytes], object]) -> list[tuple[int, int]]:
    """The bytes and bits whose change `parse` does not refuse. It does not refuse `data` itself."""
    parse(data)
    accepted = []
    for place in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            try:
                parse(bytes(flipped))
            except FormatError:
                continue
            accepted.append((place, bit))
    return accepted


def without_own_digest(document: bytes) -> bytes:
    """The JSON document as older writers made it."""
    before, mark, after = document.rpartition(b',"blake3":')
    if not mark:  # an indented one
        before, mark, after = document.rpartition(b',\n "blake3": ')
    assert mark
    return before + after[after.rindex(b'"') + 1 :]
