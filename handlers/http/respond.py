"""The way of a generation through HTTP, the same for completions and chats: let in, prepared, submitted, and given back whole
or bit by bit. What it looks like on the wire, a `Format` knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from ...runtime.requests import GenerationRequest
from .errors import as_api_error
from .responses import Usage
from .schemas import GenerationBody
from .sequences import Outcome, Sequences, Step
from .service import Call, Service, call_of
from .sse import SSE, EventStream

if TYPE_CHECKING:
    from ...runtime.tokenizer import TextTokenizer

# Rendering and tokenising so much holds the event loop for about a millisecond; more is done in a thread.
INLINE_PROMPT_BYTES = 4096


class Format(Protocol):
    """One request's side of the wire: `completions.CompletionFormat` or `chat.ChatFormat`. Does no I/O."""

    body: GenerationBody
    num_sequences: int

    def prepare(self, tokenizer: TextTokenizer) -> list[GenerationRequest]:
        """What the engine is asked. Called once, maybe in a thread, before all that follows. Raises `RequestError`."""

    @property
    def num_prompt_tokens(self) -> int: ...

    def chunks(self, step: Step) -> list[bytes]:
        """What a stream says of a step: any number of JSON items."""

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes: ...


async def respond(
    service: Service, request: web.Request, fmt: Format, *, body_bytes: int
) -> web.StreamResponse:
    """The response to one generation request whose body, of `body_bytes`, was decoded and checked into `fmt`."""
    if not fmt.body.stream:
        return await _whole(service, call_of(request), fmt, body_bytes)
    return await _stream(service, request, fmt, body_bytes)


async def _whole(service: Service, call: Call, fmt: Format, body_bytes: int) -> web.Response:
    outcomes = [Outcome() for _ in range(fmt.num_sequences)]
    with _sequences(service, call, on_overflow=_never) as sequences:
        await _submit(service, call, fmt, sequences, body_bytes)
        async for steps in sequences.steps():
            for index, event in steps:
                outcomes[index].add(event)
    usage = Usage.of(fmt.num_prompt_tokens, sum(len(outcome.tokens) for outcome in outcomes))
    return web.Response(body=fmt.whole(outcomes, usage), content_type="application/json")


async def _stream(service: Service, request: web.Request, fmt: Format, body_bytes: int) -> web.StreamResponse:
    call = call_of(request)
    num_generated = 0
    options = fmt.body.stream_options
    async with EventStream(request, SSE, service.limits, comment=service.load_comment) as stream:
        try:
            with _sequences(service, call, on_overflow=stream.abort) as sequences:
                await _submit(service, call, fmt, sequences, body_bytes)
                async for steps in sequences.steps():
                    num_generated += sum(len(event.tokens) for _, event in steps)
                    if items := [item for step in steps for item in fmt.chunks(step)]:
                        await stream.send(*items)
            if options is not None and options.include_usage:
                await stream.send(fmt.usage_chunk(Usage.of(fmt.num_prompt_tokens, num_generated)))
            return await stream.finish()
        except ConnectionError:
            raise
        except asyncio.CancelledError:
            ended_by = call.work.ended_by if call.work is not None else None
            if ended_by is None or not stream.started:
                raise
            return await stream.fail(as_api_error(ended_by))
        except Exception as error:
            if not stream.started:
                raise
            return await stream.fail(as_api_error(error))


def _sequences(service: Service, call: Call, *, on_overflow: Callable[[], None]) -> Sequences:
    return Sequences(
        service, call, max_pending_events=service.limits.max_pending_events, on_overflow=on_overflow
    )


async def _submit(service: Service, call: Call, fmt: Format, sequences: Sequences, body_bytes: int) -> None:
    """Everything before the engine has the request: places in the queue, then the tokenizer, then the engine."""
    with service.admission.waiting(fmt.num_sequences):
        tokenizer = await service.tokenizer()
        if body_bytes <= INLINE_PROMPT_BYTES:
            requests = fmt.prepare(tokenizer)
        else:
            requests = await asyncio.to_thread(fmt.prepare, tokenizer)
        engine = await service.ready(service.instance.engine)
        sequences.submit(engine, requests)
    service.metrics.prompt_taken(fmt.num_prompt_tokens)
    call.limit(service.limits.request_timeout_s)


def _never() -> None:
    """Nothing slow stands between the engine and a response that is collected in memory, so its reader keeps up."""
