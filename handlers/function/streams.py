"""Streams of generated text, and the `Completion` that they add up to.

A stream submits its request when it is made, and frees the engine's capacity when it ends, is
closed, or its invocation ends. It never returns half a character, nor text that may still become a
stop string.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct
from msgspec.structs import asdict

from ...runtime.errors import CancelledError, HandlerError, ModelError
from ...runtime.step.requests import FinishReason, GenerationEvent, GenerationRequest, TokenLogprob
from .channel import ThreadToLoopChannel
from .lifetime import Lifetime

if TYPE_CHECKING:
    from ...runtime.engine.generation import Generation

Submit = Callable[[GenerationRequest, Callable[[GenerationEvent], None]], "Generation"]


class Usage(Struct, frozen=True):
    """The token counts of a generation."""

    prompt_tokens: int
    completion_tokens: int
    # Of the completion's tokens: chosen by weights that were not exact yet.
    drafted_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Completion(Struct, frozen=True):
    """A finished generation. `finish_reason` is STOP or LENGTH: the others are raised as errors."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each token, if requested

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready value for handlers to return. Its usage has `drafted_tokens` if there are
        any.
        """
        usage = asdict(self.usage)
        if not self.usage.drafted_tokens:
            del usage["drafted_tokens"]
        value: dict[str, Any] = {"text": self.text, "finish_reason": str(self.finish_reason), "usage": usage}
        if self.logprobs:
            value["logprobs"] = [asdict(logprob) for logprob in self.logprobs]
        return value


class _Generated:
    """The base of both kinds of streams: accumulates events, and reacts to the invocation's end."""

    def __init__(self, request: GenerationRequest, lifetime: Lifetime) -> None:
        self._lifetime = lifetime
        self._num_prompt_tokens = len(request.prompt_tokens)
        self._num_tokens = 0
        self._num_drafted = 0
        self._pieces: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._completion: Completion | None = None
        self._ended = False
        self._forget: Callable[[], None] = lambda: None
        self._generation: Generation | None = None

    @property
    def completion(self) -> Completion:
        """The whole completion, once the stream was read to its end. Raises `HandlerError` before."""
        if self._completion is None:
            raise HandlerError("the stream has not been read to its end", hint="Read it, or call `read()`.")
        return self._completion

    @property
    def drafted_tokens(self) -> int:
        """The number of tokens read so far that were chosen by weights that were not exact yet."""
        return self._num_drafted

    def _start(
        self, submit: Submit, request: GenerationRequest, on_event: Callable[[GenerationEvent], None]
    ) -> None:
        self._lifetime.check()
        self._generation = submit(request, on_event)
        self._lifetime.count_tokens(self._num_prompt_tokens, 0)
        self._forget = self._lifetime.on_cancel(self._generation.cancel)

    def _stop(self) -> None:
        """Free the engine's capacity. Harmless if the generation has ended."""
        self._ended = True
        self._forget()
        if self._generation is not None:
            self._generation.cancel()

    def _take(self, event: GenerationEvent) -> str:
        """Add an event and return its text. For the last one, keep the completion or raise its
        error.
        """
        self._num_tokens += len(event.tokens)
        self._lifetime.count_tokens(0, len(event.tokens))
        self._num_drafted += event.num_drafted
        if event.finish_reason is not None:
            self._ended = True
            self._forget()
        if event.finish_reason is FinishReason.ERROR:
            raise event.error or ModelError("the generation failed")
        if event.finish_reason is FinishReason.CANCELLED:
            if self._lifetime.cancelled:
                raise self._lifetime.ending()
            raise CancelledError("the generation was cancelled")
        self._pieces.append(event.text)
        self._logprobs += event.logprobs
        if event.finish_reason is not None:
            usage = Usage(self._num_prompt_tokens, self._num_tokens, self._num_drafted)
            self._completion = Completion(
                "".join(self._pieces), event.finish_reason, usage, tuple(self._logprobs)
            )
        return event.text


class TextStream(_Generated):
    """An iterator over pieces of text, never empty ones. Leaving it as a context manager, or
    `close`, cancels the rest.
    """

    def __init__(self, submit: Submit, request: GenerationRequest, lifetime: Lifetime) -> None:
        super().__init__(request, lifetime)
        self._events: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
        self._start(submit, request, self._events.put)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        """Blocks until there is text. Raises `StopIteration` when the generation has finished."""
        self._lifetime.refuse_to_block_a_loop()
        while not self._ended:
            if text := self._take(self._next_event()):
                return text
        raise StopIteration

    def read(self) -> Completion:
        """Read the rest, blocking, and return the whole, including earlier pieces."""
        with self:
            for _ in self:
                pass
        return self.completion

    def close(self) -> None:
        """Cancel the rest of the generation. Idempotent."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_event(self) -> GenerationEvent:
        try:
            return self._events.get(timeout=min(self._lifetime.remaining_s(), threading.TIMEOUT_MAX))
        except queue.Empty:
            self._stop()
            raise self._lifetime.ending() from None


class AsyncTextStream(_Generated):
    """The async form of `TextStream`. Belongs to the event loop that it was made on."""

    def __init__(self, submit: Submit, request: GenerationRequest, lifetime: Lifetime) -> None:
        super().__init__(request, lifetime)
        self._events: ThreadToLoopChannel[GenerationEvent] = ThreadToLoopChannel()
        self._start(submit, request, self._events.post)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        """Waits until there is text. Raises `StopAsyncIteration` when the generation has finished."""
        while not self._ended:
            if text := self._take(await self._next_event()):
                return text
        raise StopAsyncIteration

    async def read(self) -> Completion:
        """Read the rest and return the whole, including earlier pieces."""
        async with self:
            async for _ in self:
                pass
        return self.completion

    async def aclose(self) -> None:
        """Cancel the rest of the generation. Idempotent."""
        self._stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _next_event(self) -> GenerationEvent:
        try:
            async with asyncio.timeout(self._lifetime.remaining_s()):
                return await anext(self._events)
        except TimeoutError:
            self._stop()
            raise self._lifetime.ending() from None
        except asyncio.CancelledError:
            self._stop()
            raise
