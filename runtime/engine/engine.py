"""The engine: takes requests, runs the model over all sequences together, and delivers their
tokens.

One thread does all the work (`step_loop`), a step at a time: decide (`scheduler`), reserve blocks, one
forward pass over the tokens of every participating sequence, choose the next tokens (`sampling`), deliver
(on a device once the next step has begun). Sequences join and leave between steps.
Requests can be submitted and cancelled from any thread, also while a pass waits for weights.

Invariants: blocks are reserved and released, and sequences moved between queue and running, only
under the lock. A sequence's blocks are free before its last event is visible; if it is cancelled or
shut down during a step, at the end of that step. Events are delivered with no lock held. After any
error, the thread survives and each sequence gets its last event. This module knows nothing of HTTP,
and of text only detokenisation.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from ...loader.errors import TeneralError
from ...loader.timeline import Timeline
from ..errors import DeviceLostError, shutting_down
from ..step.backend import MakeBackend
from ..step.requests import FinishReason, GenerationEvent, GenerationRequest, Priority
from ..text.detokenizer import DetokenizerSource
from .adapters import AdapterSource, HeldAdapter, RequestAdapters
from .arrival import Arrival, DecoderLike
from .early import EarlyPhase, TieredDecoder
from .generation import Generation, OnEvent
from .look_ahead import LookAhead
from .options import EngineOptions, EngineStatistics, check_request, fit_pool
from .sequence import Sequence as TokenSequence
from .sequence import error_event
from .state import SchedulerState, statistics_of
from .step_loop import StepLoop
from .trace import EngineTimeline

if TYPE_CHECKING:
    from ..kv.prefix_pool import PrefixPool
    from ..kv.view import PoolView
    from .image_encoder import ImageEncoder

__all__ = ["DecoderLike", "Engine", "EngineOptions", "EngineStatistics"]


class Engine:
    """The engine. `start` it once and `stop` it at the end. Requests submitted before `start` wait
    for it.
    """

    def __init__(
        self,
        model: DecoderLike,
        tokenizer: DetokenizerSource,
        *,
        options: EngineOptions,
        timeline: Timeline | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        arrival: Arrival | None = None,
        prefix_seed: bytes | None = None,
        make_backend: MakeBackend,
        on_device_lost: Callable[[DeviceLostError], None] | None = None,
        adapters: AdapterSource | None = None,
        drafter: TieredDecoder | None = None,
    ) -> None:
        """Reserve the KV pool. Raises UsageError if `kv_bytes` does not hold one sequence of two
        tokens.

        `on_device_lost` is called, on the engine's thread, when the device cannot compute any more.
        With `arrival`, the model must be a `TieredDecoder`: a draft that comes first is used
        (`early.py`). `prefix_seed` identifies the model of the pool's keys and values; by default
        they are private to this engine. `adapters` are those that requests may name. `drafter` drafts in
        place of the model, with weights of its own (`EarlyPhase`).
        """
        pool = fit_pool(options, model)
        if pool.num_states:
            # Each runs in a place of its own, and may begin with a copy that has another. Sessions pin blocks,
            # which are of no use without states.
            max_running = min(options.max_running, pool.num_states // 2)
            options = replace(options, max_running=max_running, max_sessions=0)
        self.options = options
        self._model = model
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._timeline = EngineTimeline(timeline)
        block_size = options.block_size
        self.max_context = pool.max_context  # tokens of prompt and answer together
        self._kv_bytes = pool.num_blocks * pool.bytes_per_block + pool.num_states * pool.state_bytes
        self._kv = model.new_kv(pool.num_blocks, block_size, **pool.storage)
        self._thread: threading.Thread | None = None
        prefix_seed = prefix_seed or secrets.token_bytes(32)
        self._state = SchedulerState(
            pool.num_blocks,
            options,
            prefix_seed=prefix_seed,
            max_pinned_blocks=options.max_pinned_blocks(pool.num_blocks, pool.bytes_per_block),
            copy_tokens=self._kv.copy_tokens,
            num_states=pool.num_states,
            copy_state=self._kv.copy_state if pool.num_states else None,
        )
        self._adapters = RequestAdapters(adapters, self._state.changed)
        self._images: ImageEncoder | None = None
        if (tower := getattr(model, "vision", None)) is not None:
            from .image_encoder import ImageEncoder  # of few models

            self._images = ImageEncoder(tower, self._state.changed, timeline)
        self._prefix_seed = prefix_seed
        self._state.blocks.open_spill(self._kv, pool.bytes_per_block, self._state.num_promised_blocks)
        self._backend = make_backend(
            model,
            self._kv,
            options.backend_options(self.max_context),
            timeline,
        )
        # Recurrent states cannot be taken back: nothing is proposed that may be rejected.
        has_states = pool.num_states > 0
        self._loop = StepLoop(
            model,
            self._kv,
            self._state,
            self._backend,
            limits=options.scheduler_limits(),
            timeline=self._timeline,
            look_ahead=LookAhead(self._state, model, 0 if has_states else options.look_ahead),
            early=None if arrival is None or has_states else self._early_phase(arrival, drafter),
            has_states=has_states,
            on_device_lost=on_device_lost,
        )

    def _early_phase(self, arrival: Arrival, drafter: TieredDecoder | None) -> EarlyPhase:
        return EarlyPhase(
            cast("TieredDecoder", self._model),
            self._kv,
            self._state,
            arrival,
            timeline=self._timeline,
            backend=self._backend,
            drafter=drafter,
        )

    # -- for any thread --------------------------------------------------------------------------------------

    @property
    def model(self) -> DecoderLike:
        return self._model

    @cached_property
    def prefix_pool(self) -> PrefixPool:
        """Imports and exports computed blocks."""
        from ..kv.prefix_pool import PrefixPool  # lazy: few servers keep snapshots

        return PrefixPool(self._state.blocks, self._kv, seed=self._prefix_seed)

    def start(self) -> None:
        """Start the thread, which sleeps while idle."""
        with self._state.changed:
            if self._thread is not None or self._state.is_stopping:
                raise RuntimeError("an engine can be started once, before it is stopped")
            # Daemon: a pass that waits for weights cannot be interrupted, and must not keep the process.
            self._thread = threading.Thread(target=self._loop.run, name="teneral-engine", daemon=True)
            self._thread.start()
            if self._state.blocks.spill is not None:
                self._state.blocks.spill.start()

    def submit(
        self, request: GenerationRequest, on_event: OnEvent | None = None, *, joins: bool = False
    ) -> Generation:
        """Queue the request and return at once. With `joins`, it belongs to the previous request:
        it is not refused for its expected wait (`max_wait_s`).

        `on_event` gets the events in order, usually on the engine's thread, which it must not
        block; on the caller's thread when it cancels, stops the engine or requests no computation,
        and for the tokens that the request's grammar forces at the beginning. If it raises, its
        sequence is cancelled.

        `max_tokens` beyond the end of the context is not an error: the sequence ends there with
        LENGTH. Raises ContextLengthError, RequestError (a token that the model does not have),
        GrammarError, CapacityError, DrainingError, or the error that cost the engine its weights.
        Nothing was started then.
        """
        check_request(request, self._model.config, self.max_context, takes_images=self._images is not None)
        if self._images is not None:
            self._images.check(request)
        max_new_tokens = self.max_context - len(request.prompt_tokens)
        if request.max_tokens is not None:
            max_new_tokens = min(max_new_tokens, request.max_tokens)
        adapter = self._adapters.acquire(request.adapter)
        try:
            return self._submit(request, on_event, max_new_tokens, adapter, joins=joins)
        except BaseException:
            self._adapters.release(adapter)
            raise

    def _submit(
        self,
        request: GenerationRequest,
        on_event: OnEvent | None,
        max_new_tokens: int,
        adapter: HeldAdapter | None,
        *,
        joins: bool,
    ) -> Generation:
        """The body of `submit`. After the last possible error, the end of the generation releases
        the adapter.
        """
        generation = Generation(request, on_event, on_end=partial(self._on_end, adapter))
        sequence = TokenSequence(
            generation,
            self._tokenizer,
            eos_token_ids=self._eos_token_ids,
            max_new_tokens=max_new_tokens,
            adapter=adapter,
        )
        # Tokens that the grammar forces at the beginning are sent at once, independent of the
        # weights.
        first = sequence.begin() if max_new_tokens > 0 or sequence.scores is not None else _no_tokens()
        last = first if first is not None and first.finish_reason is not None else None
        if first is not None and last is None:
            generation.begin(first)
        with self._state.changed:
            if last is None:
                self._state.enqueue(sequence, joins=joins)
                self._state.note_events([] if first is None else [(sequence, first)])
            else:
                self._state.require_open()
                self._state.num_output_tokens += len(last.tokens)
        if last is not None:
            generation.emit(last)
        else:
            generation.deliver()
        if first is not None and first.tokens:
            self._timeline.add_forced(generation, len(first.tokens))
        self._adapters.follow(adapter, sequence)
        if self._images is not None:
            self._images.follow(generation)
        return generation

    def require_room(self, queue_name: str, priority: Priority, num_sequences: int = 1) -> None:
        """Raise CapacityError if that many requests of this tenant
        (`GenerationRequest.queue_name`), the others joining the first one, would be refused now; or
        the reason why all are.
        """
        with self._state.changed:
            self._state.require_open()
            self._state.require_room(queue_name, priority, num_sequences)

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, wait for the others, then stop.

        Returns True if all ended by themselves; the rest gets its last event (ERROR,
        DrainingError). Does not wait for the thread: `stop` does.
        """
        state = self._state
        with state.changed:
            state.refuse(shutting_down())
            finished = state.changed.wait_for(state.all_ended, timeout_s)
        self._shut_down(shutting_down())
        return finished

    def stop(self, timeout_s: float = 1.0) -> bool:
        """End every sequence now (ERROR, DrainingError), and the thread after its step.

        Returns False if the thread is still running after `timeout_s`, as while its pass waits for
        weights: cancel their load first.
        """
        self._shut_down(shutting_down())
        if self._thread is None:
            self._state.blocks.stop_spill()
            return True
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        has_ended = not self._thread.is_alive()
        return has_ended and (self._images is None or self._images.join(timeout_s))

    def abort(self, failure: TeneralError) -> None:
        """End every sequence now with this error, which later requests get, too. Does not wait."""
        self._shut_down(failure)

    def statistics(self) -> EngineStatistics:
        return statistics_of(
            self._state,
            kv_bytes=self._kv_bytes,
            max_context=self.max_context,
            device=self._backend.statistics(),
        )

    def kv_view(self) -> PoolView:
        """The content of the KV pool, without anything that identifies its tenants."""
        from ..kv.view import view_pool  # of few servers

        blocks = self._state.blocks
        with blocks.changed:
            return view_pool(
                blocks.allocator,
                blocks.prefixes,
                blocks.ledger,
                blocks.sessions.statistics(),
                block_size=self.options.block_size,
                now_s=time.monotonic(),
            )

    @property
    def owes_first_token(self) -> bool:
        """True if a sequence waits for its first token."""
        with self._state.changed:
            return self._state.owes_first_token

    def check_integrity(self) -> None:
        """Raise AssertionError if sequences and block pool disagree. For tests; waits for no step."""
        with self._state.changed:
            self._state.check_integrity(self.max_context)

    def _on_end(self, adapter: HeldAdapter | None, generation: Generation, reason: FinishReason) -> None:
        self._state.note_end(generation, reason)
        self._adapters.release(adapter)
        self._timeline.add_request(generation, reason)

    def _shut_down(self, reason: TeneralError) -> None:
        state = self._state
        with state.changed:
            state.refuse(reason)
            state.is_stopping = True
            sequences = state.everybody()
            state.changed.notify_all()
        if self._images is not None:
            self._images.stop()
        for sequence in sequences:
            sequence.generation.emit(error_event(reason))


def _no_tokens() -> GenerationEvent:
    """The only event of a sequence with max_tokens 0."""
    return GenerationEvent("", (), finish_reason=FinishReason.LENGTH)
