"""A generation over HTTP, the same for completions and chats: admitted, prepared, submitted, and answered whole or as
a stream.

A `Format` knows the wire. The numbers of drafted tokens in a stream's chunks add up to those of its usage: a drafted
token whose text is still held back is counted with the next chunk of its choice.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from ...loader.errors import TeneralError
from ...runtime.errors import CancelledError, ModelError
from ...runtime.step.requests import (
    FinishReason,
    FirstToken,
    GenerationEvent,
    GenerationRequest,
    PromptLogprobs,
    TokenLogprob,
)
from ..function.channel import ThreadToLoopChannel
from ..http.service import CALL, HttpCall, Service, max_context_of
from ..http.sse import SSE, EventStream, Framing, complete
from .parameters import WHOLE_CONTEXT, forced_text_may_change, priority_of, queue_of
from .responses import ChunkExtras, CompletionTokensDetails, PromptTokensDetails, Usage
from .schemas import GenerationBody

if TYPE_CHECKING:
    from ...runtime.engine.engine import Engine
    from ...runtime.engine.generation import Generation
    from ...runtime.grammar.spec import GrammarSpec
    from ...runtime.text.settings import TextSettings
    from ...runtime.text.tokenizer import TextTokenizer

DRAFTED_TOKENS_HEADER = "Teneral-Drafted-Tokens"
A = TypeVar("A")


class Tally(Struct):
    """Tokens of a request, of all its sequences together, as they add up."""

    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_cached: int = 0  # of the prompts, each counted once

    def add(self, event: GenerationEvent) -> None:
        self.num_tokens += len(event.tokens)
        self.num_drafted += event.num_drafted
        self.num_accepted += event.num_accepted
        self.num_rejected += event.num_rejected

    def usage(self, num_prompt_tokens: int, first_token: FirstToken) -> Usage:
        """With the details where the request allowed drafts, so that a 0 says that there were none, and where there is
        something to tell; else as OpenAI's servers have it.
        """
        details_known = first_token.sends_drafts or self.num_drafted or self.num_accepted or self.num_rejected
        details = CompletionTokensDetails(self.num_drafted, self.num_accepted, self.num_rejected)
        return Usage(
            num_prompt_tokens,
            self.num_tokens,
            num_prompt_tokens + self.num_tokens,
            prompt_tokens_details=PromptTokensDetails(self.num_cached),
            completion_tokens_details=details if details_known else UNSET,
        )


class StreamTokens(Struct):
    """Tokens of a stream so far, and the drafted ones, by choice, that no chunk has reported yet."""

    num_tokens: int = 0
    _num_drafted: dict[int, int] = field(default_factory=dict)

    def add(self, index: int, event: GenerationEvent) -> None:
        self.num_tokens += len(event.tokens)
        if event.num_drafted:
            self._num_drafted[index] = self._num_drafted.get(index, 0) + event.num_drafted

    def usage(self, body: GenerationBody, num_prompt_tokens: int) -> Usage | UnsetType | None:
        """The `usage` of a chunk."""
        if body.includes_usage_so_far:
            return Usage(num_prompt_tokens, self.num_tokens, num_prompt_tokens + self.num_tokens)
        return None if body.includes_usage else UNSET

    def take(self, index: int) -> ChunkExtras | UnsetType:
        """The fields of this choice's next chunk."""
        num_drafted = self._num_drafted.pop(index, 0)
        return ChunkExtras(num_drafted) if num_drafted else UNSET


Step = tuple[int, GenerationEvent]  # which sequence, and how it went on


class SequenceOutcome(Struct):
    """All of one sequence, as it adds up."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None = None
    stopped_by: str | int | None = None
    tokens: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def as_event(self) -> GenerationEvent:
        """The text and its end as one event, without tokens."""
        return GenerationEvent(self.text, (), finish_reason=self.finish_reason, stopped_by=self.stopped_by)

    def add(self, event: GenerationEvent) -> None:
        self.texts.append(event.text)
        self.tokens += event.tokens
        self.logprobs.extend(event.logprobs)
        self.finish_reason = event.finish_reason
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        self.stopped_by = event.stopped_by


class RequestSequences:
    """A context manager: whatever happens inside, what has not ended on leaving is cancelled."""

    def __init__(
        self,
        service: Service,
        call: HttpCall,
        *,
        max_pending_events: int | None = None,
        on_overflow: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_overflow` is called once when the reader is that many events behind; the sequences are cancelled
        then.
        """
        self.tally = Tally()  # of what `next_steps` has given
        self._metrics = service.metrics
        self._call = call
        self._generations: list[Generation] = []
        self._is_first_choice: list[bool] = []  # of its prompt
        self._last_token_s: list[float | None] = []
        self._num_tokens: list[int] = []
        self._num_open = 0
        self._failure: TeneralError | None = None
        self._on_overflow = on_overflow
        self._events: ThreadToLoopChannel[Step] = ThreadToLoopChannel(
            service.loop_calls, max_items=max_pending_events, on_overflow=self._overflow
        )

    def submit(self, engine: Engine, requests: Sequence[GenerationRequest]) -> None:
        """All, or none: raises the engine's `CapacityError`, `ContextLengthError` or `DrainingError`."""
        for index, request in enumerate(requests):
            # The choices of one prompt follow one another, and have the same tuple.
            is_first = index == 0 or request.prompt_tokens is not requests[index - 1].prompt_tokens
            self._is_first_choice.append(is_first)
            self._generations.append(engine.submit(request, partial(self._on_event, index), joins=index > 0))
        self._last_token_s = [None] * len(requests)
        self._num_tokens = [0] * len(requests)
        self._num_open = len(requests)

    async def next_steps(self) -> list[Step]:
        """All that came since the last time, in order, at least one; [] once all sequences have ended. Raises the
        first failure of any, after what came before it.
        """
        if self._failure is None and not self._num_open:
            return []
        steps: list[Step] = []
        while self._failure is None and not steps:
            for index, event in await self._events.take():
                if event.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
                    self._failure = _failure(event)
                    break
                self._count(index, event)
                steps.append((index, event))
        if self._failure is not None and not steps:
            raise self._failure
        return steps

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()

    def _cancel(self) -> None:
        for generation in self._generations:
            generation.cancel()

    def _overflow(self) -> None:
        self._cancel()
        self._on_overflow()

    def _on_event(self, index: int, event: GenerationEvent) -> None:
        self._events.post((index, event))  # in the engine's thread

    def _count(self, index: int, event: GenerationEvent) -> None:
        self.tally.add(event)
        if event.finish_reason is not None:
            self._num_open -= 1
            if self._is_first_choice[index]:
                self.tally.num_cached += self._generations[index].num_cached_tokens
                self._call.cached_tokens = self.tally.num_cached
        if event.tokens:
            now_s, last_s = time.monotonic(), self._last_token_s[index]
            self._call.generated_tokens += len(event.tokens)
            if last_s is None:
                since_s = now_s - self._call.arrived_s
                self._metrics.first_token(since_s)
                if self._call.first_token_s is None:
                    self._call.first_token_s = since_s
            self._metrics.tokens_generated(len(event.tokens), None if last_s is None else now_s - last_s)
            self._last_token_s[index] = now_s
            self._num_tokens[index] += len(event.tokens)
        if event.finish_reason is not None:
            self._sequence_ended(index)

    def _sequence_ended(self, index: int) -> None:
        generation = self._generations[index]
        timings = generation.timings
        if timings.started_s is None or timings.first_token_s is None or timings.finished_s is None:
            return  # it ended without a token
        if self._call.first_step_s is None:
            self._call.first_step_s = timings.started_s
        self._metrics.sequence_ended(
            queued_s=timings.started_s - timings.queued_s,
            generated_s=max(0.0, timings.finished_s - timings.first_token_s),
            prompt_tokens=len(generation.request.prompt_tokens),
            generated_tokens=self._num_tokens[index],
        )


def _failure(event: GenerationEvent) -> TeneralError:
    if event.error is not None:
        return event.error
    if event.finish_reason is FinishReason.CANCELLED:
        return CancelledError("the generation was cancelled")
    return ModelError("the generation failed")


LOGPROB_BYTES = 128  # of one token's, while it is held and as JSON


class RequestGeneration(Protocol):
    """A request's generation. Does no I/O."""

    num_sequences: int
    first_token: FirstToken  # what its sequences ask for

    grammar: GrammarSpec | None  # the form that its answers must have
    max_tokens: int | None  # of an answer; None: until the context is full
    needs_context: bool  # whether `prepare` needs to know how many tokens there is room for

    @property
    def body(self) -> GenerationBody: ...

    def prepare(self, tokenizer: TextTokenizer, max_tokens: int | None) -> list[GenerationRequest]:
        """The request to the engine. Called once, in a thread, before all that follows. A prompt has room for
        `max_tokens`; None: not known yet. Raises `RequestError`.
        """

    @property
    def num_prompt_tokens(self) -> int: ...


class Format(RequestGeneration, Protocol):
    """One request's side of the wire, too: `completions.CompletionFormat` or `chat.ChatFormat`."""

    @property
    def looks_up_tokens(self) -> bool:
        """True if `chunks` and `whole` ask the tokenizer, which blocks: then they are called in a thread."""

    @property
    def counts_reasoning(self) -> bool:
        """True if `usage_chunk` and `whole` ask the tokenizer."""

    @property
    def begins_with_grammar(self) -> Callable[[TextSettings], bool] | None:
        """Reads from the model's settings if the grammar covers the whole answer; None: it always does."""

    def chunks(self, step: Step) -> list[bytes]:
        """A stream's report of a step: any number of JSON items."""

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def whole(self, outcomes: Sequence[SequenceOutcome], usage: Usage) -> bytes: ...


async def make_format(service: Service, body_bytes: int, make: Callable[[], A], *, has_schema: bool) -> A:
    """The request's generation as `make` returns it. One with schemas is made in a thread for texts:
    the event loop stays free while they are rewritten. Raises `RequestError`.
    """
    return await service.text_threads.run(body_bytes, make) if has_schema else make()


async def _as_it_is(last: bytes) -> bytes:
    return last


async def respond(
    service: Service,
    request: web.Request,
    fmt: Format,
    *,
    body_bytes: int,
    framing: Framing = SSE,
    keep: Callable[[bytes], Awaitable[bytes]] = _as_it_is,
) -> web.StreamResponse:
    """The response to a request whose body, of `body_bytes`, was decoded and checked into `fmt`. `framing` is that of
    streams. `keep` is awaited with the whole answer, or a stream's end, and gives what is sent of it.
    """
    call = CALL.get()
    if not fmt.body.stream:
        return await _whole(service, call, fmt, body_bytes, keep)
    async with EventStream(request, framing, service.limits, comment=service.load_comment) as stream:
        return await complete(stream, call, send_steps(stream, service, call, fmt, body_bytes, keep))


async def generate(
    service: Service,
    call: HttpCall,
    asked: RequestGeneration,
    body_bytes: int,
    *,
    charge: Callable[[int], None] = lambda _: None,
) -> tuple[list[SequenceOutcome], Usage]:
    """All of it, once it is there. `charge` is called with the memory that is held of it, and may raise."""
    outcomes = [SequenceOutcome() for _ in range(asked.num_sequences)]
    with RequestSequences(service, call) as sequences:
        await _submit(service, call, asked, sequences, body_bytes)
        while steps := await sequences.next_steps():
            for index, event in steps:
                if event.prompt_logprobs is not None:
                    charge(
                        LOGPROB_BYTES * (len(event.prompt_logprobs) + event.prompt_logprobs.top_tokens.size)
                    )
                if event.logprobs:
                    charge(LOGPROB_BYTES * sum(1 + len(entry.top) for entry in event.logprobs))
                outcomes[index].add(event)
    return outcomes, sequences.tally.usage(asked.num_prompt_tokens, asked.first_token)


async def _whole(
    service: Service, call: HttpCall, fmt: Format, body_bytes: int, keep: Callable[[bytes], Awaitable[bytes]]
) -> web.Response:
    with service.admission.answer() as charge:
        outcomes, usage = await generate(service, call, fmt, body_bytes, charge=charge)
        if fmt.looks_up_tokens or fmt.counts_reasoning:
            answer = await service.text_threads.run(body_bytes, fmt.whole, outcomes, usage)
        else:
            answer = fmt.whole(outcomes, usage)
        answer = await keep(answer)
    details = usage.completion_tokens_details
    return web.Response(
        body=answer,
        content_type="application/json",
        headers={} if details is UNSET else {DRAFTED_TOKENS_HEADER: str(details.drafted_tokens)},
    )


class Receiver(Protocol):
    """The receiver of a stream's items: an `EventStream`, or a response that is made in the background."""

    async def send(self, *items: bytes) -> None: ...

    def abort(self) -> None:
        """Called where the receiver is too many events behind."""


async def send_steps(
    stream: Receiver,
    service: Service,
    call: HttpCall,
    fmt: Format,
    body_bytes: int,
    keep: Callable[[bytes], Awaitable[bytes]],
) -> None:
    bound = service.limits.max_pending_events
    with RequestSequences(service, call, max_pending_events=bound, on_overflow=stream.abort) as sequences:
        beginning = await _beginning(service, call, fmt, body_bytes)
        if beginning is not None:
            await stream.send(*_chunks(fmt, beginning.steps(fmt.num_sequences)))
        await _submit(service, call, fmt, sequences, body_bytes)
        while steps := await sequences.next_steps():
            if beginning is not None:
                steps = [beginning.without(step) for step in steps]
            if fmt.looks_up_tokens:
                items = await service.text_threads.run(body_bytes, _chunks, fmt, steps)
            else:
                items = _chunks(fmt, steps)
            if items:
                await stream.send(*items)
    if fmt.body.includes_usage:
        usage = sequences.tally.usage(fmt.num_prompt_tokens, fmt.first_token)
        if fmt.counts_reasoning:
            last = await service.text_threads.run(body_bytes, fmt.usage_chunk, usage)
        else:
            last = fmt.usage_chunk(usage)
        await stream.send(await keep(last))


class Beginning:
    """The text that a grammar forces at the beginning, sent before the engine has the request; taken out of what the
    engine says then, which is the same.
    """

    def __init__(self, text: str, num_sequences: int) -> None:
        self._text = text
        self._num_owed = [len(text)] * num_sequences  # characters sent before the engine produced them

    def steps(self, num_sequences: int) -> list[Step]:
        return [(index, GenerationEvent(self._text, ())) for index in range(num_sequences)]

    def without(self, step: Step) -> Step:
        """The step without what was sent of it."""
        index, event = step
        num_sent = min(len(event.text), self._num_owed[index])
        self._num_owed[index] -= num_sent
        return (index, replace(event, text=event.text[num_sent:])) if num_sent else step


async def _beginning(service: Service, call: HttpCall, fmt: Format, body_bytes: int) -> Beginning | None:
    """Text that can be sent while there is no engine yet, or no vocabulary for its grammar. None where both are there,
    where nothing is forced, and where stop strings, logprobs or a limit might take some of it back. Raises
    `GrammarError`.
    """
    if fmt.grammar is None or fmt.looks_up_tokens or not _is_cold(service, call):
        return None
    if forced_text_may_change(fmt.body):
        return None
    is_first = fmt.begins_with_grammar
    if is_first is not None and not is_first(await service.ready(service.instance.text_settings)):
        return None
    from ...runtime.grammar.compiler import forced_text  # of few requests

    text = await service.text_threads.run(body_bytes, forced_text, fmt.grammar)
    if not text or (fmt.max_tokens is not None and fmt.max_tokens < len(text.encode())):
        return None
    service.instance.timeline.mark("request", "forced text", characters=len(text))
    return Beginning(text, fmt.num_sequences)


def _is_cold(service: Service, call: HttpCall) -> bool:
    """True where the first token is some time off: the model loads, or did when the request came and its vocabulary is
    yet to be prepared for grammars, which takes tenths of a second.
    """
    if not service.instance.engine.done():
        return True
    tokenizer = service.instance.tokenizer
    if call.load is None or not tokenizer.done() or tokenizer.exception() is not None:
        return False
    return not tokenizer.result().is_ready_for_grammars


def _chunks(fmt: Format, steps: Sequence[Step]) -> list[bytes]:
    return [item for step in steps for item in fmt.chunks(step)]


async def _submit(
    service: Service, call: HttpCall, fmt: RequestGeneration, sequences: RequestSequences, body_bytes: int
) -> None:
    """All that comes before the engine has the request; its sequences count as waiting meanwhile."""
    adapter = service.adapter_of(fmt.body.model, fmt.body.lora)
    instance = service.instance  # one for tokenizer and engine, even if another takes its place
    with service.admission.waiting(fmt.num_sequences):
        service.require_room(queue_of(fmt.body), priority_of(fmt.body), fmt.num_sequences)
        if fmt.needs_context or fmt.body.truncate_prompt_tokens == WHOLE_CONTEXT:
            await service.ready(instance.engine, instance)  # which knows how many tokens there is room for
        tokenizer = await service.ready(instance.tokenizer, instance)
        remote = getattr(fmt, "remote_images", ())  # of chats alone
        if remote and tokenizer.images is not None:
            from .remote_images import ImageFetcher  # of the few servers that fetch some

            give_images = fmt.give_images  # type: ignore[attr-defined]
            give_images(await service.shared(ImageFetcher.of).fetch(remote))
        max_context = max_context_of(instance)
        requests = await service.text_threads.run(body_bytes, fmt.prepare, tokenizer, max_context)
        engine = await service.ready(instance.engine, instance)
        if adapter:
            requests = [replace(each, adapter=adapter) for each in requests]
        sequences.submit(engine, requests)
    service.metrics.prompt_taken(fmt.num_prompt_tokens)
    call.prompt_tokens = fmt.num_prompt_tokens
    call.limit(service.limits.request_timeout_s)
