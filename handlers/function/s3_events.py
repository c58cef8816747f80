"""S3's events of new objects: its own notifications, and EventBridge's "Object Created" events, as
the same values.

Pure. Shared by all functions that take events; it does not know their purpose.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_plus

from ...runtime.errors import RequestError
from .object_ref import ObjectRef

__all__ = ["CREATED", "MAX_OBJECTS", "TEST_EVENT", "ObjectRef", "created_objects"]

MAX_OBJECTS = 1_000  # of one event
# Sent once, when notifications are configured.
TEST_EVENT = "s3:TestEvent"
CREATED = "Object Created"


def created_objects(event: Any) -> list[ObjectRef]:
    """The objects of an S3 notification or an "Object Created" event of EventBridge; none for S3's
    other events.

    Raises `RequestError` for anything else.
    """
    try:
        if event.get("Event") == TEST_EVENT:
            return []
        if "detail" in event:
            detail = event["detail"]
            key = detail["object"]["key"]  # unlike a notification's, not quoted
            found = [_ref(detail["bucket"]["name"], key, detail["object"], version="version-id")]
            return found if event["detail-type"] == CREATED else []
        records = event["Records"][: MAX_OBJECTS + 1]
        if len(records) > MAX_OBJECTS:
            raise RequestError(f"the event has more than {MAX_OBJECTS} records", param="Records")
        return [
            _ref(of["bucket"]["name"], unquote_plus(of["object"]["key"]), of["object"], version="versionId")
            for of in (record["s3"] for record in records if record["eventName"].startswith("ObjectCreated:"))
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise RequestError("this is not an S3 object-created event") from error


def _ref(bucket: Any, key: Any, described: dict[str, Any], *, version: str) -> ObjectRef:
    if not (isinstance(bucket, str) and isinstance(key, str)):
        raise RequestError("the event's bucket and key must be strings")
    etag = str(described.get("eTag") or described.get("etag") or "")
    return ObjectRef(bucket, key, etag, str(described.get(version) or ""))
