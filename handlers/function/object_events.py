"""Events of new objects in a store: S3's, Cloud Storage's and Event Grid's, as the same values.

A reference to an object of a store, from an event. Pure.

S3's events of new objects: its own notifications, and EventBridge's "Object Created" events, as
the same values.

Pure. Shared by all functions that take events; it does not know their purpose.

Cloud Storage's events of new objects: Eventarc's CloudEvents, and Pub/Sub's notifications, as
the same values.

Pure. Only the attributes of a notification are read, so its payload format does not matter.

Event Grid's events of new blobs, in its own schema and as CloudEvents, as the same values; and
its handshake.

Pure. The blob's name comes from the event's subject, which is not encoded; the address in its data
is.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any
from urllib.parse import unquote_plus

from msgspec import Struct

from ...runtime.errors import RequestError

MAX_ADDRESS_CHARS = 1_200
FORMS = {"s3": "s3://bucket/key", "gs": "gs://bucket/key", "az": "az://account/container/key"}


class ObjectRef(Struct, frozen=True):
    """An object's version with this ETag (in Cloud Storage: generation) or id; '' for the current
    one.

    In Azure, `bucket` is the container and `account` the storage account; elsewhere there is no
    account.
    """

    bucket: str
    key: str
    etag: str = ""
    version_id: str = ""
    scheme: str = "s3"
    account: str = ""

    @classmethod
    def parse(cls, address: Any, *, param: str = "", schemes: tuple[str, ...] = ("s3",)) -> ObjectRef:
        """Parse an address in one of these kinds of stores. Raises `RequestError`."""
        scheme, _, rest = address.partition("://") if isinstance(address, str) else ("", "", "")
        place = rest
        account = ""
        if scheme == "az":
            account, _, place = rest.partition("/")
        bucket, _, key = place.partition("/")
        is_whole = bool(bucket and key and (account or scheme != "az"))
        if scheme not in schemes or not is_whole or len(rest) > MAX_ADDRESS_CHARS:
            forms = [FORMS[name] for name in schemes]
            shown = " or ".join([", ".join(forms[:-1]), forms[-1]] if forms[1:] else forms)
            raise RequestError(f"{param or 'the address'} must be {shown}", param=param)
        return cls(bucket, key, scheme=scheme, account=account)

    @property
    def root(self) -> str:
        """The address of the bucket, or of the account's container."""
        return (
            f"{self.scheme}://{self.account}/{self.bucket}"
            if self.account
            else f"{self.scheme}://{self.bucket}"
        )

    @property
    def url(self) -> str:
        return f"{self.root}/{self.key}"


MAX_OBJECTS = 1_000  # of one event
# Sent once, when notifications are configured.
TEST_EVENT = "s3:TestEvent"
S3_CREATED = "Object Created"


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
            found = [_s3_ref(detail["bucket"]["name"], key, detail["object"], version="version-id")]
            return found if event["detail-type"] == S3_CREATED else []
        records = event["Records"][: MAX_OBJECTS + 1]
        if len(records) > MAX_OBJECTS:
            raise RequestError(f"the event has more than {MAX_OBJECTS} records", param="Records")
        return [
            _s3_ref(
                of["bucket"]["name"], unquote_plus(of["object"]["key"]), of["object"], version="versionId"
            )
            for of in (record["s3"] for record in records if record["eventName"].startswith("ObjectCreated:"))
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise RequestError("this is not an S3 object-created event") from error


def _s3_ref(bucket: Any, key: Any, described: dict[str, Any], *, version: str) -> ObjectRef:
    if not (isinstance(bucket, str) and isinstance(key, str)):
        raise RequestError("the event's bucket and key must be strings")
    etag = str(described.get("eTag") or described.get("etag") or "")
    return ObjectRef(bucket, key, etag, str(described.get(version) or ""))


GS_EVENT_TYPES = "google.cloud.storage.object.v1."  # prefix of the types of its CloudEvents
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
    return _gs_ref(data.get("bucket"), data.get("name"), data.get("generation"))


def is_notification(message: Any) -> bool:
    """True for a Pub/Sub message that is a Cloud Storage notification."""
    attributes = message.get("attributes") if isinstance(message, dict) else None
    return isinstance(attributes, dict) and {"eventType", "bucketId", "objectId"} <= attributes.keys()


def notified_object(message: Any) -> ObjectRef | None:
    """The object of a notification; None for other events. Raises `RequestError`."""
    attributes = message["attributes"]
    if attributes["eventType"] != NOTIFIED:
        return None
    return _gs_ref(attributes["bucketId"], attributes["objectId"], attributes.get("objectGeneration"))


def message_text(message: Any) -> str:
    """The text of a Pub/Sub message. Raises `RequestError` for other bytes."""
    data = message.get("data") if isinstance(message, dict) else None
    try:
        return base64.b64decode(data or "", validate=True).decode()
    except (TypeError, ValueError, binascii.Error):
        raise RequestError("the message's data is not a text in base64", param="data") from None


def _gs_ref(bucket: Any, key: Any, generation: Any) -> ObjectRef:
    if not (isinstance(bucket, str) and isinstance(key, str)):
        raise RequestError("the event names no bucket and object")
    known = "" if generation is None else str(generation)
    is_number = not known or (known.isascii() and known.isdigit())
    if type(generation) not in (int, str, type(None)) or not is_number:
        raise RequestError("the event's generation is not a number", param="generation")
    if len(known) > MAX_DIGITS:
        raise RequestError("the event's generation is too long", param="generation")
    return ObjectRef(bucket, key, known, scheme="gs")


EVENT_GRID_TYPES = "Microsoft.Storage."
BLOB_CREATED = "Microsoft.Storage.BlobCreated"
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
    if event.get("type", event.get("eventType")) != BLOB_CREATED:
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
