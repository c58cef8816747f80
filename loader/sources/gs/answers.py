"""The JSON of Cloud Storage's answers, and the errors that its refusals mean.

All of it is outside input: the caller bounds its size, each field is checked before it is used.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ...errors import AccessDeniedError, FormatError, NotFoundError, SourceError
from ..base import MAX_SHOWN_CHARS, ObjectInfo, shown_text
from ..http.bucket import Listed, ListingPage
from ..http.head import Head, parse_time
from ..http.source import status_error
from .address import is_number, version_of

_THROTTLED = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})
WAYS_TO_GIVE = (
    "Run under a service account on Google Cloud, set GOOGLE_APPLICATION_CREDENTIALS to a service account's key "
    "or a workload identity federation file, run gcloud auth application-default login, or read a public bucket "
    "with --anonymous."
)
_RIGHTS = (
    "The account needs storage.objects.get here (roles/storage.objectViewer; roles/storage.objectUser to write); "
    "without storage.objects.list, Cloud Storage says the same of objects that do not exist."
)


class ErrorContent(NamedTuple):
    """The content of an error document, as `shown_text`; '' where it says nothing."""

    reason: str
    message: str


def parse_problem(document: bytes) -> ErrorContent:
    """Never raises: anything but an error document has no reason."""
    try:
        error = json.loads(document.decode())["error"]
        reason = str(error["errors"][0]["reason"]) if error.get("errors") else ""
        return ErrorContent(shown_text(reason), shown_text(str(error.get("message", ""))))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return ErrorContent("", shown_text(document[: 4 * MAX_SHOWN_CHARS].decode("utf-8", "replace")))


def parse_object(document: bytes, name: str, *, where: str) -> ObjectInfo:
    """The answer to an upload. Raises `FormatError`."""
    listed = _listed(_parse(document, where), where)
    return ObjectInfo(name, listed.size_bytes, listed.version)


def parse_page(document: bytes, *, where: str) -> ListingPage:
    """A page of a listing. Raises `FormatError`."""
    page = _parse(document, where)
    items, token = page.get("items", []), page.get("nextPageToken")
    if type(items) is not list or (token is not None and (type(token) is not str or not token)):
        raise FormatError(f"{where} did not answer with a list of objects", where=where)
    return ListingPage(tuple(_listed(item, where) for item in items), token)


def explain(head: Head, body: bytes, *, source: str, name: str, is_anonymous: bool) -> SourceError:
    """The error for an answer of this status."""
    status = head.status
    problem = parse_problem(body)
    what = f"{name} in {source}" if name else source
    detail = " ".join(text for text in (str(status), problem.reason, problem.message) if text)
    match status:
        case _ if problem.reason in _THROTTLED:
            status = 429
        case 401 if not is_anonymous:
            message = f"{what}: the access token is not accepted ({detail})"
            return AccessDeniedError(message, source=source, name=name, hint=WAYS_TO_GIVE)
        case 401 | 403:
            hint = WAYS_TO_GIVE if status == 401 else _RIGHTS
            message = f"{what}: access is denied ({detail})"
            return AccessDeniedError(message, source=source, name=name, hint=hint, may_be_absent=True)
        case 404 if "bucket" in problem.message.lower() and "object" not in problem.message.lower():
            hint = "Check the bucket's name and the project."
            return NotFoundError(
                f"the bucket of {source} does not exist", source=source, hint=hint, is_bucket=True
            )
    return status_error(source, name, status, detail=detail, retry_after_s=head.retry_after_s)


def _parse(document: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(document.decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} did not answer with JSON: {error}", where=where) from None
    if type(value) is not dict:
        raise FormatError(f"{where} did not answer with a JSON object", where=where)
    return value


def _listed(item: object, where: str) -> Listed:
    if type(item) is not dict:
        raise FormatError(f"{where} lists something other than objects", where=where)
    key, size, generation = (item.get(field) for field in ("name", "size", "generation"))
    if type(key) is not str or not key or not is_number(size) or not is_number(generation):
        raise FormatError(f"{where} lists an object without a name, size or generation", where=where)
    return Listed(key, int(str(size)), version_of(str(generation)), parse_time(item.get("updated")))
