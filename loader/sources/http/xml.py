"""Just enough XML for S3's answers: errors, and pages of a listing.

S3's documents are flat, and are scanned, not parsed: there are no entities to expand, no DTD and no
nesting that a hostile server could make expensive. The caller bounds their size.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote_plus

from ...errors import FormatError
from ..base import shown_text
from .bucket import Listed, ListingPage
from .head import parse_time

_ENTITY = re.compile(r"&(#x[0-9a-fA-F]{1,6}|#[0-9]{1,7}|lt|gt|amp|quot|apos);")
_NAMED = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "apos": "'"}


class S3Problem(NamedTuple):
    """The code and message of an error document, as `shown_text`; '' where it has none."""

    code: str
    message: str
    region: str


def parse_problem(document: bytes) -> S3Problem:
    """Never raises: what is not an S3 error document has no code."""
    text = document.decode("utf-8", "replace")
    code, message, region = (
        shown_text(element_text(text, tag) or "") for tag in ("Code", "Message", "Region")
    )
    return S3Problem(code, " ".join(message.split()), region)


def parse_page(document: bytes, *, where: str) -> ListingPage:
    """A page of ListObjectsV2. Raises `FormatError` for anything else."""
    text = document.decode("utf-8", "replace")
    if "<ListBucketResult" not in text:
        raise FormatError(f"{where} did not answer with a list of objects", where=where)
    is_encoded = element_text(text, "EncodingType") == "url"
    objects = []
    for piece in text.split("<Contents>")[1:]:
        entry = piece.partition("</Contents>")[0]
        key, size, etag, modified = (
            element_text(entry, tag) for tag in ("Key", "Size", "ETag", "LastModified")
        )
        if key is None or size is None or not size.isdecimal() or len(size) > 19:
            raise FormatError(f"{where} lists an object without a key or size", where=where)
        name = unquote_plus(key) if is_encoded else key
        objects.append(Listed(name, int(size), etag or "", parse_time(modified)))
    is_truncated = element_text(text, "IsTruncated") == "true"
    token = element_text(text, "NextContinuationToken")
    if is_truncated and not token:
        raise FormatError(f"{where} does not say how its list goes on", where=where)
    return ListingPage(tuple(objects), token if is_truncated else None)


def element_text(document: str, tag: str) -> str | None:
    """The text of the first element of that name; None where there is none."""
    found = re.search(f"<{tag}>([^<]*)</{tag}>", document)
    return _ENTITY.sub(_character, found[1]) if found else None


def _character(entity: re.Match[str]) -> str:
    name = entity[1]
    if not name.startswith("#"):
        return _NAMED[name]
    number = int(name[2:], 16) if name[1] == "x" else int(name[1:])
    is_character = number < 0x110000 and not 0xD800 <= number < 0xE000  # no half of a surrogate pair
    return chr(number) if is_character else "\ufffd"
