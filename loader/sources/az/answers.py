"""The XML of Blob Storage's answers, and the errors that its refusals mean.

Documents are scanned, not parsed, as `http/xml.py` does it: no entities to expand, no nesting. The
caller bounds their size.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from ...errors import AccessDeniedError, FormatError, NotFoundError, SourceError
from ..http.bucket import Listed, ListingPage
from ..http.head import Head, is_strong_etag, parse_date
from ..http.source import status_error
from ..http.xml import element_text, parse_problem
from .credentials import WAYS_TO_GIVE

_ENCODED_NAME = re.compile(r'<Name Encoded="true">([^<]*)</Name>')
_LOST = frozenset(
    {
        "BlobAlreadyExists",
        "ConditionNotMet",
        "InvalidBlockList",  # the first commit drops the blocks of all others
        "TargetConditionNotMet",
        "UnauthorizedBlobOverwrite",
    }
)
_RIGHTS = (
    "The identity needs the role Storage Blob Data Reader (Storage Blob Data Contributor to write), "
    "a signature the permissions r and l (and c, w, d)."
)


def parse_page(document: bytes, *, where: str) -> ListingPage:
    """A page of List Blobs. Raises `FormatError` for anything else."""
    text = document.decode("utf-8", "replace")
    if "<EnumerationResults" not in text:
        raise FormatError(f"{where} did not answer with a list of blobs", where=where)
    objects = []
    for piece in text.split("<Blob>")[1:]:
        entry = piece.partition("</Blob>")[0]
        if element_text(entry, "ResourceType") == "directory":
            continue
        found = _ENCODED_NAME.search(entry)
        key = unquote(found[1]) if found else element_text(entry, "Name")
        size, etag = element_text(entry, "Content-Length"), element_text(entry, "Etag") or ""
        version = version_of(etag)
        if (
            not key
            or size is None
            or not (size.isascii() and size.isdigit())
            or len(size) > 19
            or not version
        ):
            raise FormatError(f"{where} lists a blob without a name, size or ETag", where=where)
        modified = parse_date(element_text(entry, "Last-Modified") or "")
        objects.append(Listed(key, int(size), version, modified))
    return ListingPage(tuple(objects), element_text(text, "NextMarker") or None)


def version_of(etag: str) -> str | None:
    """An ETag in quotes, which lists leave out; None for what is none."""
    quoted = etag if etag.startswith('"') else f'"{etag}"'
    return quoted if len(quoted) > 2 and len(quoted) < 200 and is_strong_etag(quoted) else None


def is_lost(head: Head, body: bytes) -> bool:
    """True if a write's condition did not hold."""
    return head.status == 412 or parse_problem(body).code in _LOST


def explain(head: Head, body: bytes, *, source: str, name: str, is_anonymous: bool) -> SourceError:
    """The error for an answer of this status."""
    status = head.status
    code, message, _ = parse_problem(body)
    what = f"{name} in {source}" if name else source
    detail = " ".join(text for text in (str(status), code, message) if text)
    if code == "ContainerNotFound":
        hint = "Check the container's name and the account."
        return NotFoundError(
            f"the container of {source} does not exist", source=source, hint=hint, is_bucket=True
        )
    if code == "BlobArchived":
        hint = "Change its access tier first, and wait until that is done."
        return SourceError(f"{what} is archived and cannot be read", source=source, name=name, hint=hint)
    if status in (401, 403) or code == "PublicAccessNotPermitted":
        is_refused = code in ("AuthenticationFailed", "InvalidAuthenticationInfo")
        hint = WAYS_TO_GIVE if is_refused or is_anonymous else _RIGHTS
        text = f"{what}: access is denied ({detail})"
        return AccessDeniedError(text, source=source, name=name, hint=hint)
    return status_error(source, name, status, detail=detail, retry_after_s=head.retry_after_s)
