"""The parser of events into jobs and requests, by their structure alone, and the errors of events.

Events come wrapped in each other: S3's in SNS's in SQS's, Cloud Storage's in Pub/Sub's. For any
event `parse_event` returns valid values or raises `EventError`. It does no I/O, and does not know
the use of an answer.

Errors have two names that a platform's retry rules can distinguish: on Lambda they are the
`errorType`, the names in Step Functions' `ErrorEquals`.

    JobRetryError    worth another run, which continues from this one
    JobFailedError   another run fails in the same way
    └── EventError   … because the event is invalid
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from ....loader.errors import TeneralError, UsageError
from ....loader.sources.base import check_name
from ....loader.sources.open import check_bucket
from ....runtime.errors import RequestError, TryAgainError
from ...function import object_events
from ...function.object_events import (
    FORMS,
    MAX_ADDRESS_CHARS,
    S3_CREATED,
    TEST_EVENT,
    ObjectRef,
    created_objects,
)
from ..spec import WORTH_ANOTHER_RUN, JobSpec, Share

# Of one batch: SQS's maximum for a function.
MAX_MESSAGES = 10_000
MAX_ITEMS = 10_000  # of one batch of Step Functions
MAX_MESSAGE_CHARS = 1 << 20
MAX_DEPTH = 4  # nested wrappings
MAX_GRID_EVENTS = 5_000  # of one delivery of Event Grid
_REQUEST_KEYS = ("prompt", "messages", "input", "custom_id", "url", "method", "body")
_LIMITS = ("max_line_bytes", "max_lines", "part_lines")
_JOB_KEYS = frozenset({"input", "output", "version", "worker", *_LIMITS})
_DECODER = msgspec.json.Decoder(Any)
_MESSAGE_ID = re.compile(r"[\w.:-]{1,200}", re.ASCII)
_QUEUE = re.compile(r"[\w-]{1,80}(\.fifo)?", re.ASCII)
_ETAG = re.compile(r"[!-~]{0,200}")
_STORES = tuple(FORMS)
_PREFIXES = tuple(f"{scheme}://" for scheme in FORMS)
_OTHER_NEWS = "the event is not for a new object"


@dataclass(frozen=True, slots=True)
class Job:
    """A job; `output` is None if the event names none."""

    input: ObjectRef
    output: str | None = None
    share: Share | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)  # fields of JobSpec, by name
    # The event announces the upload of the input.
    is_upload: bool = False

    def spec(self, output: str) -> JobSpec:
        """The job's specification. Raises `UsageError`."""
        return JobSpec(
            input=self.input.url,
            output=output,
            input_version=self.input.etag or None,
            share=self.share,
            **self.limits,
        )


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request, like a line of a job's input. An invalid one is answered with an error."""

    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ignored:
    """Nothing to do, with the reason."""

    reason: str


Asked = Job | BatchRequest | Ignored


@dataclass(frozen=True, slots=True)
class AwaitedCall:
    """A request whose sender waits for the result."""

    asked: Asked


@dataclass(frozen=True, slots=True)
class Items:
    """Several such requests, in order."""

    asked: tuple[Asked, ...]


@dataclass(frozen=True, slots=True)
class Notice:
    """An event whose result is not read: only success or an error counts."""

    asked: tuple[Asked, ...]


@dataclass(frozen=True, slots=True)
class QueueMessage:
    """A message of a queue. `group` is None without ordering. `parse_message` parses `body`."""

    id: str
    queue: str
    group: str | None
    body: Any


@dataclass(frozen=True, slots=True)
class Queue:
    messages: tuple[QueueMessage, ...]


@dataclass(frozen=True, slots=True)
class Handshake:
    """Event Grid's handshake: the answer repeats the code, and the subscription begins."""

    code: str


Event = AwaitedCall | Items | Notice | Queue | Handshake


def parse_event(event: Any) -> Event:
    """Parse an event. Raises only `EventError`."""
    return _parse(event, 0)


def parse_message(body: Any) -> tuple[Asked, ...]:
    """Parse a queue's message: any other event as JSON. Raises `EventError`."""
    return _flat(_parse(_decoded(body, "body"), 1))


def _parse(event: Any, depth: int) -> Event:
    if isinstance(event, list) and event and all(map(object_events.is_grid_event, event)):
        return _grid(event)
    if not isinstance(event, dict):
        raise EventError(f"the event must be an object, not {type(event).__name__}")
    if depth > MAX_DEPTH:
        raise EventError(f"the event has more than {MAX_DEPTH} wrappings")
    if event.get("Event") == TEST_EVENT:
        return Notice((Ignored("a test event of S3"),))
    if "Records" in event:
        return _records(event, depth)
    if "detail" in event:
        return _eventbridge(event, depth)
    if "specversion" in event:
        return _cloudevent(event, depth)
    if "message" in event and "subscription" in event:
        return _pubsub(event["message"], depth)
    if object_events.is_grid_event(event):
        return _grid([event])
    if "Items" in event:
        return _items(event)
    if event.get("Type") == "Notification" and "Message" in event:
        return _parse(_decoded(event["Message"], "Message"), depth + 1)
    return AwaitedCall(_asked(event))


def _cloudevent(event: dict[str, Any], depth: int) -> Event:
    kind = _text(event, "type")
    try:
        if kind.startswith(object_events.GS_EVENT_TYPES):
            return Notice((_news(object_events.finalized_object(event)),))
        if kind.startswith(object_events.EVENT_GRID_TYPES):
            return Notice((_news(object_events.created_blob(event)),))
    except RequestError as error:
        raise EventError(error.message, param=error.param, hint=error.hint) from error
    data = event.get("data")
    if kind == object_events.PUBSUB_TYPE:
        return _pubsub(data.get("message") if isinstance(data, dict) else None, depth)
    brought = _parse(data, depth + 1)
    # A CloudEvent's answer is only used for requests. A job must fail to be sent again.
    is_request = isinstance(brought, AwaitedCall) and isinstance(brought.asked, BatchRequest)
    return brought if is_request else Notice(_flat(brought))


def _pubsub(message: Any, depth: int) -> Notice:
    """A Cloud Storage notification, or any other event as the message's data. Its answer is never
    read.
    """
    try:
        if object_events.is_notification(message):
            return Notice((_news(object_events.notified_object(message)),))
        text = object_events.message_text(message)
    except RequestError as error:
        raise EventError(error.message, param=error.param) from error
    return Notice(_flat(_parse(_decoded(text, "data"), depth + 1)))


def _grid(events: list[dict[str, Any]]) -> Notice | Handshake:
    """Events in Event Grid's own schema, which arrive as a list."""
    if len(events) > MAX_GRID_EVENTS:
        raise EventError(f"the delivery has more than {MAX_GRID_EVENTS} events")
    try:
        for event in events:
            if event["eventType"] == object_events.VALIDATION:
                return Handshake(object_events.validation_code(event))
        return Notice(tuple(_news(object_events.created_blob(event)) for event in events))
    except RequestError as error:
        raise EventError(error.message, param=error.param) from error


def _news(ref: ObjectRef | None) -> Asked:
    return Ignored(_OTHER_NEWS) if ref is None else _upload(ref)


def _flat(event: Event) -> tuple[Asked, ...]:
    """The requests of a wrapped event."""
    match event:
        case AwaitedCall(asked):
            return (asked,)
        case Items(asked) | Notice(asked):
            return asked
        case Handshake():
            raise EventError("a subscription must be validated by its own event, not inside another one")
        case _:
            raise EventError("a message cannot contain a queue's messages", param="Records")


def _decoded(text: Any, param: str) -> Any:
    if not isinstance(text, str) or len(text) > MAX_MESSAGE_CHARS:
        raise EventError(f"{param} must be a text of at most {MAX_MESSAGE_CHARS} characters", param=param)
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise EventError(f"{param} is not JSON: {str(error)[:200]}", param=param) from error


def _records(event: dict[str, Any], depth: int) -> Event:
    records = event["Records"]
    if not isinstance(records, list) or not records or not all(isinstance(of, dict) for of in records):
        raise EventError("Records must be a list of objects", param="Records")
    if len(records) > MAX_MESSAGES:
        raise EventError(f"the event has more than {MAX_MESSAGES} records", param="Records")
    if all("s3" in record for record in records):
        return Notice(_uploads(event))
    sources = {_text(record, "eventSource") or _text(record, "EventSource") for record in records}
    if sources == {"aws:sqs"}:
        return Queue(tuple(_message(record, number) for number, record in enumerate(records)))
    if sources == {"aws:sns"}:
        notifications = [record.get("Sns") for record in records]
        messages = [of.get("Message") if isinstance(of, dict) else None for of in notifications]
        return Notice(
            tuple(asked for text in messages for asked in _flat(_parse(_decoded(text, "Message"), depth + 1)))
        )
    raise EventError("the records are neither S3's, nor SQS's, nor SNS's", param="Records")


def _text(record: dict[str, Any], name: str) -> str:
    value = record.get(name)
    return value if isinstance(value, str) else ""


def _message(record: dict[str, Any], number: int) -> QueueMessage:
    message_id = _text(record, "messageId")
    if not _MESSAGE_ID.fullmatch(message_id):
        raise EventError(f"record {number} has no messageId", param="Records")
    queue = _text(record, "eventSourceARN").rpartition(":")[2]
    queue = queue if _QUEUE.fullmatch(queue) else ""
    attributes = record.get("attributes")
    group = _text(attributes, "MessageGroupId") if isinstance(attributes, dict) else ""
    # Queues without ordering may have groups too, for fairness among tenants.
    return QueueMessage(message_id, queue, group if queue.endswith(".fifo") else None, record.get("body"))


def _eventbridge(event: dict[str, Any], depth: int) -> Event:
    if event.get("source") != "aws.s3":
        return Notice(_flat(_parse(event["detail"], depth + 1)))
    if event.get("detail-type") != S3_CREATED:
        return Notice((Ignored("the S3 event is not for a new object"),))
    return Notice(_uploads(event))


def _uploads(event: dict[str, Any]) -> tuple[Asked, ...]:
    try:
        found = created_objects(event)
    except RequestError as error:
        raise EventError(error.message, param=error.param) from error
    if not found:
        return (Ignored("the S3 event is not for a new object"),)
    return tuple(_upload(ref) for ref in found)


def _upload(ref: ObjectRef) -> Asked:
    if ref.key.endswith("/"):
        return Ignored(f"{ref.url[:MAX_ADDRESS_CHARS]!r} marks a folder")
    return Job(_checked(ref, "key"), is_upload=True)


def _items(event: dict[str, Any]) -> Items:
    items, common = event["Items"], event.get("BatchInput", {})
    if not isinstance(items, list) or not 0 < len(items) <= MAX_ITEMS:
        raise EventError(f"Items must be a list of 1 to {MAX_ITEMS} objects", param="Items")
    if not isinstance(common, dict) or not all(isinstance(item, dict) for item in items):
        raise EventError("Items and BatchInput must contain objects", param="Items")
    return Items(tuple(_asked({**common, **item}) for item in items))


def _asked(fields: dict[str, Any]) -> Job | BatchRequest:
    if _is_job(fields):
        return _job(fields)
    if any(name in fields for name in _REQUEST_KEYS):
        return BatchRequest(fields)
    keys = ", ".join(repr(str(key)[:40]) for key in list(fields)[:8])
    raise EventError(
        f"the event starts no job: it has {keys or 'no fields'}",
        hint='A job is {"input": "s3://…/in.jsonl", "output": "s3://…/out.jsonl"}.',
    )


def _is_job(fields: dict[str, Any]) -> bool:
    """True if it is a job. A text to embed may be anything except an address in a store, which is a
    job's input.
    """
    if "custom_id" in fields:
        return False
    given = fields.get("input")
    return "output" in fields or (isinstance(given, str) and given.startswith(_PREFIXES))


def _job(fields: dict[str, Any]) -> Job:
    unknown = sorted(str(name) for name in fields.keys() - _JOB_KEYS)
    if unknown:
        raise EventError(
            f"a job has no field {unknown[0][:40]!r}",
            param=unknown[0][:40],
            hint=f"Its fields are {', '.join(sorted(_JOB_KEYS))}.",
        )
    output, worker, version = fields.get("output"), fields.get("worker"), fields.get("version", "")
    if not isinstance(version, str):
        raise EventError("version must be an ETag, or a generation", param="version")
    given = _address(fields.get("input"), "input")
    ref = replace(given, etag=version.strip('"'))
    _checked(replace(ref, key=ref.key.removesuffix("/")), "input")  # a folder of sound ends in one
    limits = {name: fields[name] for name in _LIMITS if name in fields}
    if not all(type(value) is int for value in limits.values()):
        raise EventError(f"{', '.join(limits)} must be whole numbers", param=next(iter(limits)))
    if output is not None:
        place = _address(output, "output")
        _checked(replace(place, key=place.key.removesuffix("/")), "output")
    try:
        share = Share.parse(str(worker)) if worker is not None else None
        job = Job(ref, output, share, limits)
        job.spec(output or ref.url)
    except UsageError as error:
        raise EventError(error.message, param=error.key, hint=error.hint) from error
    return job


def _address(value: Any, param: str) -> ObjectRef:
    """An address in a store: events are untrusted, and must not reach this machine's files."""
    try:
        return ObjectRef.parse(value, param=param, schemes=_STORES)
    except RequestError as error:
        raise EventError(error.message, param=param) from error


def _checked(ref: ObjectRef, param: str) -> ObjectRef:
    """Check that an object's address is valid. Raises `EventError`."""
    if not _ETAG.fullmatch(ref.etag):
        raise EventError(f"{ref.etag[:200]!r} is not an ETag", param="version")
    try:
        check_bucket(ref.root)
        check_name(ref.key)
    except (UsageError, ValueError) as error:
        raise EventError(f"{ref.url[:MAX_ADDRESS_CHARS]!r} is invalid: {error}", param=param) from error
    return ref


class JobRetryError(TryAgainError):
    """The job is not complete; another run continues it. Finished parts are kept."""

    code = "job_retry"


class JobFailedError(RequestError):
    """The job cannot be done, no matter how often it is retried."""

    code = "job_failed"


class EventError(JobFailedError):
    """An invalid event. `param` names the place. Lone surrogates in the event's text are shown as
    numbers, because they cannot be encoded.
    """

    code = "bad_event"

    def __init__(self, message: str, *, param: str = "", hint: str = "") -> None:
        super().__init__(_sendable(message), param=_sendable(param), hint=hint)


def as_job_error(error: TeneralError) -> JobRetryError | JobFailedError:
    """The error under one of the two names."""
    if isinstance(error, JobRetryError | JobFailedError):
        return error
    kind = type(error).__name__
    if isinstance(error, WORTH_ANOTHER_RUN):
        found: JobRetryError | JobFailedError = JobRetryError(f"{kind}: {error.message}", hint=error.hint)
    elif isinstance(error, UsageError):
        found = EventError(error.message, param=error.key, hint=error.hint)
    else:
        found = JobFailedError(f"{kind}: {error.message}", hint=error.hint)
    found.__cause__ = error
    return found


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
