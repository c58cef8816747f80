"""Actions triggered by a result: `act(when=…, do=…)` as a `post` function.

The action runs before the result is returned, at least once: a caller may repeat an invocation
after an error or a time-out, although the action has already run. So each gets an idempotency key,
by which its receiver can detect repetitions. Ready-made actions publish to SNS and SQS, and post to
an HTTP address. This module knows nothing of models.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from ....runtime.errors import HandlerError
from ...function.context import Context
from ...function.handler import kind_of

MAX_TIMEOUT_S = 60.0
# Of an HTTP answer, which is read up to here so that the connection can be reused.
MAX_ANSWER_BYTES = 1 << 16

When = Callable[[Any], bool]
Do = Callable[[Any, str], Any] | Callable[[Any, str], Awaitable[Any]]
KeyOf = Callable[[Any, Context], str]


def idempotency_key(value: Any, context: Context) -> str:
    """The default key, equal for the same value of the same request; a retry with a new request id
    has another one.

    To detect those too, give `act` a `key` of your own, derived from the origin of the value.
    """
    content = json.dumps([context.request_id, value], sort_keys=True, default=repr, ensure_ascii=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def act(
    *, when: When, do: Do, key: KeyOf = idempotency_key, on_error: Literal["fail", "log"] = "fail"
) -> Callable[[Any, Context], Any]:
    """A `post` function that returns the value unchanged, after `do(value, key)` if `when(value)`
    is true.

    With `on_error="fail"` a failed action fails the invocation, so that it is retried; with "log"
    it is logged, and the value is returned. Errors of `when` and `key` always fail it, because they
    decide whether the action runs. An async `do` makes the handler async.
    """
    name = getattr(do, "__name__", type(do).__name__)
    if on_error not in ("fail", "log"):
        raise HandlerError(f"on_error is {on_error!r}, but must be 'fail' or 'log'")

    def failed(error: Exception, context: Context, given: str) -> None:
        if on_error == "fail":
            raise HandlerError(f"the action {name} failed: {type(error).__name__}: {error}") from error
        context.logger.error("the action %s failed, key %s: %s", name, given, error, exc_info=error)

    def run(value: Any, context: Context) -> Any:
        if when(value):
            given = key(value, context)
            try:
                do(value, given)
            except Exception as error:  # noqa: BLE001 - whatever the action raises, the policy says what becomes of it
                failed(error, context, given)
        return value

    async def arun(value: Any, context: Context) -> Any:
        if await asyncio.to_thread(when, value):
            given = key(value, context)
            try:
                async with asyncio.timeout(context.remaining_time_s()):
                    await do(value, given)
            except Exception as error:  # noqa: BLE001 - as above
                failed(error, context, given)
        return value

    chosen = arun if kind_of(do).is_async else run
    chosen.__name__ = f"act_{name}"
    return chosen


def publish_sns(topic_arn: str, *, client: Any = None) -> Callable[[Any, str], None]:
    """An action that publishes the value as JSON to SNS.

    The key is the message attribute `idempotency-key`, and on a FIFO topic also SNS's deduplication
    id. `client` is boto3's, made on first use by default.
    """
    get_client = _lazy_client("sns", client)

    def publish_sns(value: Any, key: str) -> None:
        attributes = {"idempotency-key": {"DataType": "String", "StringValue": key}}
        message = {"TopicArn": topic_arn, "Message": json.dumps(value), "MessageAttributes": attributes}
        get_client().publish(**message, **_fifo(topic_arn, key))

    return publish_sns


def send_sqs(queue_url: str, *, client: Any = None) -> Callable[[Any, str], None]:
    """An action that sends the value as JSON to an SQS queue, like `publish_sns`."""
    get_client = _lazy_client("sqs", client)

    def send_sqs(value: Any, key: str) -> None:
        attributes = {"idempotency-key": {"DataType": "String", "StringValue": key}}
        message = {"QueueUrl": queue_url, "MessageBody": json.dumps(value), "MessageAttributes": attributes}
        get_client().send_message(**message, **_fifo(queue_url, key))

    return send_sqs


def post_json(
    url: str, *, timeout_s: float = 5.0, headers: dict[str, str] | None = None
) -> Callable[[Any, str], Awaitable[None]]:
    """An async action that posts the value as JSON, with the key as `Idempotency-Key`.

    Any status but 2xx is an error; redirects are not followed.
    """
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise HandlerError(f"timeout_s is {timeout_s}, but must be up to {MAX_TIMEOUT_S:g} seconds")

    async def post_json(value: Any, key: str) -> None:
        # 169 ms that other handlers need not pay.
        import aiohttp

        sent = {**(headers or {}), "Idempotency-Key": key}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, json=value, headers=sent, allow_redirects=False) as answer,
        ):
            await answer.content.read(MAX_ANSWER_BYTES)
            if not 200 <= answer.status < 300:
                raise HandlerError(f"{answer.url.host} answered {answer.status} {answer.reason}")

    return post_json


def _lazy_client(service: str, given: Any) -> Callable[[], Any]:
    @functools.cache
    def client() -> Any:
        # 157 ms, and 0.1 s more for a client, that other handlers need not pay.
        import boto3

        make: Any = boto3.client  # its stubs want the service's name as a literal
        return make(service)

    return client if given is None else lambda: given


def _fifo(address: str, key: str) -> dict[str, str]:
    if not address.endswith(".fifo"):
        return {}
    return {"MessageGroupId": "teneral", "MessageDeduplicationId": key}
