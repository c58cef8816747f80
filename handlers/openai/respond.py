"""The way of a generation through HTTP, the same for completions and chats: let in, prepared, submitted, and
given back whole or bit by bit. What it looks like on the wire, a `Format` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from aiohttp import web
from msgspec import UNSET

from ...runtime.step.requests import FirstToken, GenerationRequest
from ..http.service import CALL, Call, Service
from ..http.sse import SSE, EventStream, Framing, complete
from .drafts import DRAFTED_TOKENS_HEADER
from .parameters import priority_of, queue_of
from .responses import Usage
from .schemas import GenerationBody
from .sequences import Outcome, Sequences, Step

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer


LOGPROB_BYTES = 128  # of one token's, while it is held and as JSON


class Asked(Protocol):
    """What a request wants to have generated. Does no I/O."""

    num_sequences: int
    first_token: FirstToken  # what its sequences ask for

    @property
    def body(self) -> GenerationBody: ...

    def prepare(self, tokenizer: TextTokenizer, max_tokens: int | None) -> list[GenerationRequest]:
        """What the engine is asked. Called once, in a thread, before all that follows. A prompt has room for
        `max_tokens`; None: not known yet. Raises `RequestError`.
        """

    @property
    def num_prompt_tokens(self) -> int: ...


class Format(Asked, Protocol):
    """One request's side of the wire, too: `completions.CompletionFormat` or `chat.ChatFormat`."""

    @property
    def looks_up_tokens(self) -> bool:
        """Whether `chunks` and `whole` ask the tokenizer, which blocks: then they are called in a thread."""

    def chunks(self, step: Step) -> list[bytes]:
        """What a stream says of a step: any number of JSON items."""

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes: ...


async def respond(
    service: Service, request: web.Request, fmt: Format, *, body_bytes: int, framing: Framing = SSE
) -> web.StreamResponse:
    """The response to a request whose body, of `body_bytes`, was decoded and checked into `fmt`. `framing` is that of
    streams.
    """
    if not fmt.body.stream:
        return await _whole(service, CALL.get(), fmt, body_bytes)
    call = CALL.get()
    async with EventStream(request, framing, service.limits, comment=service.load_comment) as stream:
        return await complete(stream, call, _send_steps(stream, service, call, fmt, body_bytes))


async def generate(
    service: Service,
    call: Call,
    asked: Asked,
    body_bytes: int,
    *,
    charge: Callable[[int], None] = lambda _: None,
) -> tuple[list[Outcome], Usage]:
    """All of it, once it is there. `charge` is called with the memory that is held of it, and may raise."""
    outcomes = [Outcome() for _ in range(asked.num_sequences)]
    with Sequences(service, call) as sequences:
        await _submit(service, call, asked, sequences, body_bytes)
        while steps := await sequences.next_steps():
            for index, event in steps:
                if event.logprobs:
                    charge(LOGPROB_BYTES * sum(1 + len(entry.top) for entry in event.logprobs))
                outcomes[index].add(event)
    return outcomes, sequences.tally.usage(asked.num_prompt_tokens, asked.first_token)


async def _whole(service: Service, call: Call, fmt: Format, body_bytes: int) -> web.Response:
    with service.admission.answer() as charge:
        outcomes, usage = await generate(service, call, fmt, body_bytes, charge=charge)
        if fmt.looks_up_tokens:
            answer = await service.text_threads.run(body_bytes, fmt.whole, outcomes, usage)
        else:
            answer = fmt.whole(outcomes, usage)
    details = usage.completion_tokens_details
    return web.Response(
        body=answer,
        content_type="application/json",
        headers={} if details is UNSET else {DRAFTED_TOKENS_HEADER: str(details.drafted_tokens)},
    )


async def _send_steps(
    stream: EventStream, service: Service, call: Call, fmt: Format, body_bytes: int
) -> None:
    bound = service.limits.max_pending_events
    with Sequences(service, call, max_pending_events=bound, on_overflow=stream.abort) as sequences:
        await _submit(service, call, fmt, sequences, body_bytes)
        while steps := await sequences.next_steps():
            if fmt.looks_up_tokens:
                items = await service.text_threads.run(body_bytes, _chunks, fmt, steps)
            else:
                items = _chunks(fmt, steps)
            if items:
                await stream.send(*items)
    if fmt.body.includes_usage:
        await stream.send(fmt.usage_chunk(sequences.tally.usage(fmt.num_prompt_tokens, fmt.first_token)))


def _chunks(fmt: Format, steps: Sequence[Step]) -> list[bytes]:
    return [item for step in steps for item in fmt.chunks(step)]


async def _submit(service: Service, call: Call, fmt: Asked, sequences: Sequences, body_bytes: int) -> None:
    """All that comes before the engine has the request; its sequences count as waiting meanwhile."""
    with service.admission.waiting(fmt.num_sequences):
        service.require_room(queue_of(fmt.body), priority_of(fmt.body), fmt.num_sequences)
        tokenizer = await service.tokenizer()
        requests = await service.text_threads.run(body_bytes, fmt.prepare, tokenizer, service.max_context)
        engine = await service.ready(service.instance.engine)
        sequences.submit(engine, requests)
    service.metrics.prompt_taken(fmt.num_prompt_tokens)
    call.limit(service.limits.request_timeout_s)
