"""Event Grid's events of new blobs, in its own schema and as CloudEvents, as the same values; and
its handshake.

Pure. The blob's name comes from the event's subject, which is not encoded; the address in its data
is.
"""

from __future__ import annotations

import re
from typing import Any

from ...runtime.errors import RequestError
from .object_ref import ObjectRef

EVENT_TYPES = "Microsoft.Storage."
CREATED = "Microsoft.Storage.BlobCreated"
VALIDATION = "Microsoft.EventGrid.SubscriptionValidationEvent"
# With a hierarchical namespace a file is created empty, and has another event when it is flushed and closed.
UNFINISHED = ("CreateFile",)
MAX_CODE_CHARS = 200
_ACCOUNT = re.compile(r"/storageAccounts/([^/]+)/?$", re.IGNORECASE)
_SUBJECT = re.compile(r"/blobServices/default/containers/([^/]+)/blobs/(.+)", re.DOTALL)


def is_grid_event(event: Any) -> bool:
    """True for an event in Event Grid's own schema."""
    return isinstance(event, dict) and isinstance(event.get("eventType"), str) and "subject" in event


def validation_code(event: Any) -> str:
    """The validation code that the answer to a subscription's handshake repeats. Raises `RequestError`."""
    data = event.get("data")
    code = data.get("validationCode") if isinstance(data, dict) else None
    if not isinstance(code, str) or not 0 < len(code) <= MAX_CODE_CHARS:
        raise RequestError("the event has no validationCode", param="data")
    return code


def created_blob(event: Any) -> ObjectRef | None:
    """The blob of an event in either schema; None for other events of a blob. Raises
    `RequestError`.
    """
    if event.get("type", event.get("eventType")) != CREATED:
        return None
    data = event.get("data")
    if not isinstance(data, dict):
        raise RequestError("the event has no data", param="data")
    if data.get("api") in UNFINISHED:
        return None
    account = _found(_ACCOUNT.search, event.get("source", event.get("topic")))
    blob = _found(_SUBJECT.fullmatch, event.get("subject"))
    if account is None or blob is None:
        raise RequestError("the event names no storage account, container and blob", param="subject")
    return ObjectRef(
        blob[1], blob[2], str(data.get("eTag") or "").strip('"'), scheme="az", account=account[1]
    )


def _found(look: Any, value: Any) -> re.Match[str] | None:
    found: re.Match[str] | None = look(value) if isinstance(value, str) else None
    return found
