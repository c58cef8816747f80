"""Cloud Storage's events of new objects: Eventarc's CloudEvents, and Pub/Sub's notifications, as
the same values.

Pure. Only the attributes of a notification are read, so its payload format does not matter.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from ...runtime.errors import RequestError
from .object_ref import ObjectRef

EVENT_TYPES = "google.cloud.storage.object.v1."  # prefix of the types of its CloudEvents
FINALIZED = "google.cloud.storage.object.v1.finalized"
NOTIFIED = "OBJECT_FINALIZE"
PUBSUB_TYPE = "google.cloud.pubsub.topic.v1.messagePublished"
MAX_DIGITS = 19


def finalized_object(event: Any) -> ObjectRef | None:
    """The object of a CloudEvent of Cloud Storage; None for other events. Raises `RequestError`."""
    if event.get("type") != FINALIZED:
        return None
    data = event.get("data")
    if not isinstance(data, dict):
        raise RequestError(
            "the event's data is not JSON",
            param="data",
            hint="Create the trigger with --event-data-content-type=application/json.",
        )
    return _ref(data.get("bucket"), data.get("name"), data.get("generation"))


def is_notification(message: Any) -> bool:
    """True for a Pub/Sub message that is a Cloud Storage notification."""
    attributes = message.get("attributes") if isinstance(message, dict) else None
    return isinstance(attributes, dict) and {"eventType", "bucketId", "objectId"} <= attributes.keys()


def notified_object(message: Any) -> ObjectRef | None:
    """The object of a notification; None for other events. Raises `RequestError`."""
    attributes = message["attributes"]
    if attributes["eventType"] != NOTIFIED:
        return None
    return _ref(attributes["bucketId"], attributes["objectId"], attributes.get("objectGeneration"))


def message_text(message: Any) -> str:
    """The text of a Pub/Sub message. Raises `RequestError` for other bytes."""
    data = message.get("data") if isinstance(message, dict) else None
    try:
        return base64.b64decode(data or "", validate=True).decode()
    except (TypeError, ValueError, binascii.Error):
        raise RequestError("the message's data is not a text in base64", param="data") from None


def _ref(bucket: Any, key: Any, generation: Any) -> ObjectRef:
    if not (isinstance(bucket, str) and isinstance(key, str)):
        raise RequestError("the event names no bucket and object")
    known = "" if generation is None else str(generation)
    is_number = not known or (known.isascii() and known.isdigit())
    if type(generation) not in (int, str, type(None)) or not is_number:
        raise RequestError("the event's generation is not a number", param="generation")
    if len(known) > MAX_DIGITS:
        raise RequestError("the event's generation is too long", param="generation")
    return ObjectRef(bucket, key, known, scheme="gs")
