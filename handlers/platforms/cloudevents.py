"""CloudEvents over HTTP, from Knative and Eventarc: POST / and POST /events. Binary, structured and
batched mode, and Pub/Sub's own push messages; a function's result is returned as an event in the
mode of the request. OPTIONS /events is the handshake of webhooks.

The function's event is always the CloudEvent's JSON form: a dict with `type`, `source`, `id` and so
on, and the payload under `data`, or `data_base64` if it is neither JSON nor text. It is parsed and
written here and not by the SDK for CloudEvents, which accepts invalid JSON as text, does not undo
quotes in headers, accepts attributes of any size and type, and does not support batches; it is the
oracle of the tests.

Sources: CloudEvents 1.0.2 with its HTTP binding and JSON format; Knative's eventing data plane
contract (statuses that are retried: 404, 408, 409, 429 and 5xx). Ids are not stored: an event may
arrive twice, and a function that must not repeat its work has to check `source` and `id`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote_to_bytes

from aiohttp import web

from ...loader.errors import TeneralError
from ...runtime.errors import HandlerError, RequestError
from ..function.handler import Handler
from ..http.errors import ApiError, as_api_error
from ..http.invoke import invoking
from ..http.json_bodies import JsonDecoder, encode
from ..plain import handler as plain

if TYPE_CHECKING:
    from ..function.context import Context
    from ..http.service import Service

Event = dict[str, Any]  # a CloudEvent's JSON form

SPECVERSION = "1.0"
STRUCTURED = "application/cloudevents"
STRUCTURED_JSON = "application/cloudevents+json"
BATCH = "application/cloudevents-batch"
BATCH_JSON = "application/cloudevents-batch+json"
MAX_ATTRIBUTES = 64
# All of one event; intermediaries need not accept more than 64 KiB.
MAX_ATTRIBUTES_CHARS = 64 << 10
MAX_BATCH_EVENTS = 256
# Concurrent invocations: the engine batches their requests.
MAX_BATCH_AT_A_TIME = 16
PUBSUB_TYPE = "google.cloud.pubsub.topic.v1.messagePublished"  # Eventarc's type of the same message
TRACING = ("traceparent", "tracestate")  # copied from an event to its reply
REQUIRED = ("specversion", "id", "source", "type")
_DATA_KEYS = frozenset({"data", "data_base64"})
_NAME = re.compile(r"[a-z0-9]{1,64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,12})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
_SENDER = re.compile(r"[A-Za-z0-9.-]{1,253}")
_JSON_MEDIA = re.compile(r"[\w.-]+/([\w.-]+\+)?json", re.ASCII)
# All of printable ASCII is literal in a header, except space, quote and percent.
_SAFE_IN_HEADERS = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


class CloudEventRoute:
    def __init__(self, service: Service, handler: Handler | None) -> None:
        """Without a handler, the event's data is a request to the model, as in `plain`."""
        self._service = service
        self._handler = handler or Handler(_ask_model)
        self._source = f"/teneral/{quote(service.instance.model_name, safe='')}"
        self._decoder: JsonDecoder[Any] = JsonDecoder(Any)

    async def post(self, request: web.Request) -> web.StreamResponse:
        async with self._service.admission.body(request) as data:
            content_type = request.headers.get("Content-Type", "")
            media = content_type.partition(";")[0].strip().lower()
            if media.startswith(BATCH):
                return await self._batch(media, data)
            if media.startswith(STRUCTURED):
                _check_format(media, STRUCTURED_JSON)
                event = checked_event(self._decoder.decode(data))
            elif any(name.lower().startswith("ce-") for name in request.headers):
                event = self._from_binary(request, content_type, data)
            else:
                event = from_pubsub(self._decoder.decode(data))
            reply = await self._reply(event)
            if reply is None:
                return web.Response(status=204)
            if media.startswith(STRUCTURED):
                return web.Response(body=encode(reply), headers={"Content-Type": STRUCTURED_JSON})
            headers, body = to_binary(reply)
            return web.Response(body=body, headers=headers)

    async def permit(self, request: web.Request) -> web.Response:
        """The answer to a sender's request to deliver events here, as Event Grid sends it: yes.

        That protects other servers from unwanted deliveries; it authorises no caller. The API key
        counts.
        """
        sender = request.headers.get("WebHook-Request-Origin", "")
        if not _SENDER.fullmatch(sender):
            raise ApiError(405, "events are sent by POST", headers={"Allow": "OPTIONS, POST"})
        headers = {"Allow": "OPTIONS, POST", "WebHook-Allowed-Origin": sender, "WebHook-Allowed-Rate": "*"}
        return web.Response(headers=headers)

    async def _batch(self, media: str, data: bytearray) -> web.Response:
        """Handle all events of a batch, some concurrently. Returns their replies, in order, without
        empty ones.

        If one fails the whole batch does: the protocol has no other status. It is retried if that
        helps any of them.
        """
        _check_format(media, BATCH_JSON)
        items = self._decoder.decode(data)
        if not isinstance(items, list):
            raise RequestError("a batch of CloudEvents is a JSON list")
        if len(items) > MAX_BATCH_EVENTS:
            raise ApiError(413, f"a batch may have {MAX_BATCH_EVENTS} events, not {len(items)}")
        events = [checked_event(item) for item in items]
        turns = asyncio.Semaphore(MAX_BATCH_AT_A_TIME)

        async def one(event: Event) -> Event | TeneralError | None:
            async with turns:
                try:
                    return await self._reply(event)
                except TeneralError as error:
                    return error

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(event)) for event in events]
        outcomes = [task.result() for task in tasks]
        errors = [outcome for outcome in outcomes if isinstance(outcome, TeneralError)]
        if errors:
            raise next((error for error in errors if _is_worth_a_retry(error)), errors[0])
        replies = [reply for reply in outcomes if reply is not None]
        if not replies:
            return web.Response(status=204)
        return web.Response(body=encode(replies), headers={"Content-Type": BATCH_JSON})

    def _from_binary(self, request: web.Request, content_type: str, data: bytearray) -> Event:
        event: Event = {}
        for name, value in request.headers.items():
            attribute = name.lower().removeprefix("ce-")
            if not name.lower().startswith("ce-"):
                continue
            if attribute in event or attribute == "datacontenttype" or attribute in _DATA_KEYS:
                raise RequestError(
                    f"the header {name[:100]!r} is invalid or duplicated", param=attribute[:64]
                )
            event[attribute] = header_value(attribute, value)
        if content_type:
            event["datacontenttype"] = content_type
        event = checked_event(event)
        return {**event, **self._payload(content_type, bytes(data))}

    def _payload(self, content_type: str, data: bytes) -> Event:
        """The payload in JSON's terms. Raises `RequestError` for invalid JSON or text."""
        media = content_type.partition(";")[0].strip().lower()
        if not data:
            return {}
        if not media or _JSON_MEDIA.fullmatch(media):
            return {"data": self._decoder.decode(data)}
        if media.startswith("text/"):
            try:
                return {"data": data.decode()}
            except UnicodeDecodeError:
                pass  # another charset: the function knows which
        return {"data_base64": base64.b64encode(data).decode("ascii")}

    async def _reply(self, event: Event) -> Event | None:
        trace_id = event.get("traceparent")
        async with invoking(self._service, self._handler, event, trace_id=trace_id) as values:
            given = [value async for value in values]
        value = given if self._handler.kind.is_generator or len(given) != 1 else given[0]
        if value is None:
            return None
        if isinstance(value, dict) and "specversion" in value:
            try:
                return checked_event({"id": str(uuid.uuid4()), "source": self._source, **value})
            except RequestError as error:
                raise HandlerError(
                    f"{self._handler.name} returned an invalid CloudEvent: {error.message}"
                ) from error
        if event["source"] == self._source:
            return None  # a reply to our own reply: if all events come back, it would be an endless loop
        return {
            "specversion": SPECVERSION,
            "id": str(uuid.uuid4()),
            "source": self._source,
            "type": f"{event['type']}.reply",
            **{name: event[name] for name in ("subject", *TRACING) if name in event},
            **_data_of(value),
        }


def _ask_model(event: Event, context: Context) -> Any:
    return plain(message_of(event) if event["type"] == PUBSUB_TYPE else event.get("data"), context)


def checked_event(given: Any) -> Event:
    """Validate an event. Returns it without null attributes. Raises `RequestError`."""
    if not isinstance(given, dict):
        raise RequestError(f"a CloudEvent is a JSON object, not {type(given).__name__}")
    event: Event = {name: value for name, value in given.items() if value is not None or name == "data"}
    for name in REQUIRED:
        if not isinstance(event.get(name), str) or not event[name]:
            raise RequestError(f"the CloudEvent has no {name}, which every one has", param=name)
    if event["specversion"] != SPECVERSION:
        raise RequestError(
            f"CloudEvents of version {event['specversion'][:20]!r} are not supported", param="specversion"
        )
    attributes = {name: value for name, value in event.items() if name not in _DATA_KEYS}
    if len(attributes) > MAX_ATTRIBUTES:
        raise RequestError(f"a CloudEvent may have {MAX_ATTRIBUTES} attributes, not {len(attributes)}")
    for name, value in attributes.items():
        _check_attribute(name, value)
    num_chars = sum(len(name) + len(str(value)) for name, value in attributes.items())
    if num_chars > MAX_ATTRIBUTES_CHARS:
        raise RequestError(
            f"a CloudEvent's attributes may have {MAX_ATTRIBUTES_CHARS} characters, not {num_chars}"
        )
    if "data_base64" in event:
        if "data" in event:
            raise RequestError("a CloudEvent has data or data_base64, not both", param="data_base64")
        _base64_bytes(event["data_base64"], "data_base64")
    return event


def _check_attribute(name: str, value: Any) -> None:
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{name[:64]!r} is not a valid attribute name: only lower-case letters and digits are allowed"
        )
    if isinstance(value, bool) or (isinstance(value, int) and -(1 << 31) <= value < 1 << 31):
        return
    if not isinstance(value, str):
        raise RequestError(f"{name} is a text, a boolean or a whole number of 32 bits", param=name)
    if _CONTROL.search(value):
        raise RequestError(f"{name} has characters that an attribute cannot have", param=name)
    if name == "time" and not _TIME.fullmatch(value):
        raise RequestError("time is not a time as RFC 3339 writes it", param="time")


def _check_format(media: str, known: str) -> None:
    if media != known:
        raise ApiError(415, f"CloudEvents must be {known}, not {media[:100]}", code="unsupported_format")


def from_pubsub(body: Any) -> Event:
    """A pushed message of Pub/Sub, as Eventarc's CloudEvent for it. Raises `RequestError`."""
    message = body.get("message") if isinstance(body, dict) else None
    if not isinstance(message, dict) or not isinstance(body.get("subscription"), str):
        raise RequestError(
            "this is neither a CloudEvent nor a message of Pub/Sub",
            hint=f"Send the ce- headers with the data as the body, or {STRUCTURED_JSON}.",
        )
    event: Event = {
        "specversion": SPECVERSION,
        "id": message.get("messageId") or message.get("message_id"),
        "source": f"//pubsub.googleapis.com/{body['subscription']}",
        "type": PUBSUB_TYPE,
        "datacontenttype": "application/json",
        "time": message.get("publishTime") or message.get("publish_time"),
    }
    return checked_event({**event, "data": body})


def header_value(name: str, value: str) -> str:
    """The value of an attribute's header: quotes are undone, then percent signs, once. Raises
    `RequestError`.
    """
    if len(value) > 1 and value[0] == value[-1] == '"':
        value = re.sub(r"\\(.)", r"\1", value[1:-1])
    try:
        return unquote_to_bytes(value).decode()
    except UnicodeError:
        raise RequestError(f"the header of {name[:64]} is not UTF-8", param=name[:64]) from None


def to_binary(event: Event) -> tuple[dict[str, str], bytes]:
    """An event as headers and body."""
    headers = {
        f"ce-{name}": quote(_canonical(value), safe=_SAFE_IN_HEADERS)
        for name, value in event.items()
        if name not in _DATA_KEYS and name != "datacontenttype"
    }
    media = str(event.get("datacontenttype", "application/json"))
    headers["Content-Type"] = quote(media, safe=_SAFE_IN_HEADERS + ' "')
    if "data_base64" in event:
        return headers, _base64_bytes(event["data_base64"], "data_base64")
    if "data" not in event:
        return headers, b""
    data = event["data"]
    if isinstance(data, str) and not _JSON_MEDIA.fullmatch(media.partition(";")[0].strip().lower()):
        return headers, data.encode()
    return headers, encode(data)


def _canonical(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _data_of(value: Any) -> Event:
    """A function's result as an event's payload."""
    if isinstance(value, bytes):
        return {
            "datacontenttype": "application/octet-stream",
            "data_base64": base64.b64encode(value).decode("ascii"),
        }
    if isinstance(value, str):
        return {"datacontenttype": "text/plain; charset=utf-8", "data": value}
    return {"datacontenttype": "application/json", "data": value}


def _base64_bytes(value: Any, name: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise RequestError(f"{name} is not base64", param=name) from None


def _is_worth_a_retry(error: TeneralError) -> bool:
    status = as_api_error(error).status
    return status >= 500 or status in (404, 408, 409, 429)


def message_of(event: Mapping[str, Any]) -> Any:
    """The content of a Pub/Sub message in an event: JSON, else text, else bytes; None without data.

    For functions: `from teneral.handlers.platforms.cloudevents import message_of`. Raises
    `RequestError` for an event without a message.
    """
    data = event.get("data")
    message = data.get("message") if isinstance(data, dict) else None
    if not isinstance(message, dict):
        raise RequestError("the event has no Pub/Sub message", param="data")
    if not message.get("data"):
        return None
    content = _base64_bytes(message["data"], "data.message.data")
    try:
        return JsonDecoder(Any).decode(content)
    except RequestError:
        pass
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content
