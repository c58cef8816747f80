"""The sequences of one request while the engine works on them: submitted together, read together, ended
together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ...loader.errors import TeneralError
from ...runtime.errors import CancelledError, ModelError
from ...runtime.step.requests import FinishReason, GenerationEvent, GenerationRequest, TokenLogprob
from ..http.mailbox import Mailbox
from ..http.service import Call, Service
from .drafts import Tally

if TYPE_CHECKING:
    from ...runtime.engine.engine import Engine
    from ...runtime.engine.generation import Generation

Step = tuple[int, GenerationEvent]  # which sequence, and how it went on


@dataclass(slots=True)
class Outcome:
    """All of one sequence, as it adds up."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, event: GenerationEvent) -> None:
        self.texts.append(event.text)
        self.logprobs.extend(event.logprobs)
        self.finish_reason = event.finish_reason


class Sequences:
    """A context manager: whatever happens inside, what has not ended on leaving is cancelled."""

    def __init__(
        self,
        service: Service,
        call: Call,
        *,
        max_pending_events: int | None = None,
        on_overflow: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_overflow` is called once when the reader is so many events behind; the sequences are cancelled
        then.
        """
        self.tally = Tally()  # of what `next_steps` has given
        self._metrics = service.metrics
        self._call = call
        self._generations: list[Generation] = []
        self._is_first_choice: list[bool] = []  # of its prompt
        self._last_token_s: list[float | None] = []
        self._num_open = 0
        self._failure: TeneralError | None = None
        self._on_overflow = on_overflow
        self._mailbox: Mailbox[Step]
        self._post: Callable[[Step], None]
        self._mailbox, self._post = service.bridge.open(max_pending_events, self._overflow)

    def submit(self, engine: Engine, requests: Sequence[GenerationRequest]) -> None:
        """All, or none: raises the engine's `CapacityError`, `ContextLengthError` or `DrainingError`."""
        for index, request in enumerate(requests):
            # The choices of one prompt follow one another, and have the same tuple.
            is_first = index == 0 or request.prompt_tokens is not requests[index - 1].prompt_tokens
            self._is_first_choice.append(is_first)
            self._generations.append(engine.submit(request, partial(self._on_event, index), joins=index > 0))
        self._last_token_s = [None] * len(requests)
        self._num_open = len(requests)

    async def next_steps(self) -> list[Step]:
        """What came since the last time, in order, at least one; [] once all sequences have ended. Raises the
        first failure of any, after what came before it.
        """
        if self._failure is None and not self._num_open:
            return []
        steps: list[Step] = []
        while self._failure is None and not steps:
            for index, event in await self._mailbox.take():
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
        self._post((index, event))  # in the engine's thread

    def _count(self, index: int, event: GenerationEvent) -> None:
        self.tally.add(event)
        if event.finish_reason is not None:
            self._num_open -= 1
            if self._is_first_choice[index]:
                self.tally.num_cached += self._generations[index].num_cached_tokens
        if event.tokens:
            now_s, last_s = time.monotonic(), self._last_token_s[index]
            if last_s is None:
                self._metrics.first_token(now_s - self._call.arrived_s)
            self._metrics.tokens_generated(len(event.tokens), None if last_s is None else now_s - last_s)
            self._last_token_s[index] = now_s


def _failure(event: GenerationEvent) -> TeneralError:
    if event.error is not None:
        return event.error
    if event.finish_reason is FinishReason.CANCELLED:
        return CancelledError("the generation was cancelled")
    return ModelError("the generation failed")
