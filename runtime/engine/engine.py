"""The step loop: takes requests, runs the model over all that go on together, hands out their tokens.

One thread does all the work, a step at a time: decide (`scheduler`), reserve blocks, one forward pass over
the tokens of every sequence that takes part, choose the next tokens (`sampling`), tell (`generation`).
Sequences join and leave between steps. Submitting and cancelling work from any thread, also while a pass
waits for weights.

Invariants: blocks are reserved and released, and sequences moved between queue and running, only under the
lock. A sequence's blocks are free before its last event can be seen; if it is cancelled or shut down in the
middle of a step, as soon as that step is over. Events are handed out with no lock held. Whatever fails, the
thread lives and each sequence gets its last event. Nothing is known here of HTTP, and of text only how to
detokenise.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from ...loader.errors import TeneralError, UsageError
from ...loader.timeline import Timeline
from ..errors import (
    WEIGHTS_LOST,
    CapacityError,
    ContextLengthError,
    DeviceLostError,
    DrainingError,
    RequestError,
)
from ..kv.kinds import KVKind
from ..kv.prefix_pool import PrefixPool
from ..kv.view import PoolView, view_pool
from ..step.backend import BackendOptions, MakeBackend
from ..step.requests import FinishReason, GenerationEvent, GenerationRequest, Priority
from ..step.rows import Rows
from ..step.state import Chosen, SamplingState
from ..text.detokenizer import DetokenizerSource
from .accept import accept, as_teneral_error, error_event
from .adapters import AdapterSource, HeldAdapter, OvertakenError, RequestAdapters, followed
from .arrival import Arrival
from .decoder_like import DecoderLike
from .early import EarlyPhase, TieredDecoder
from .exhaustion import is_exhaustion, largest_first
from .generation import Generation, OnEvent
from .options import EngineOptions, EngineStatistics
from .roster import Roster
from .scheduler import Preempted, Share, StepPlan, make_way, plan_step
from .sequence import Sequence as TokenSequence
from .statistics import statistics_of
from .trace import EngineTimeline

__all__ = ["DecoderLike", "Engine", "EngineOptions", "EngineStatistics"]

logger = logging.getLogger(__name__)

IDLE_S = 0.1  # without anybody, before the time is taken for something else


class Engine:
    """`start` it once and `stop` it at the end. Requests submitted before `start` wait for it."""

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
    ) -> None:
        """Reserves the KV pool. UsageError when `kv_bytes` does not hold one sequence of two tokens.

        `on_device_lost` is told, on the engine's thread, that no step can be computed any more.

        With `arrival`, the model must be a `TieredDecoder`: a draft that comes first is made use of (`early.py`).
        `prefix_seed` says which model's keys and values the pool holds; by default they are this engine's own.
        `adapters` are those that requests may name.
        """
        self.options = options
        self._model = model
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._on_device_lost = on_device_lost
        self._timeline = EngineTimeline(timeline)
        self._limits = options.scheduler_limits()
        block_size = options.block_size
        # Who knows only one kind of storage, as stand-ins for models do, need not hear of others.
        kind = {} if options.kv_dtype is KVKind.MODEL else {"kind": options.kv_dtype}
        bytes_per_block = model.kv_block_bytes(block_size, **kind)
        num_blocks = options.kv_bytes // bytes_per_block
        wanted_context = min(model.config.max_context, options.max_context or model.config.max_context)
        # Tokens of prompt and answer together; fewer than wanted when the pool holds fewer.
        self.max_context = min(wanted_context, num_blocks * block_size)
        if self.max_context < 2:
            num_wanted_blocks = -(-wanted_context // block_size)
            raise UsageError(
                f"a KV pool of {options.kv_bytes} bytes is too small: {block_size} tokens need "
                f"{bytes_per_block}",
                key="kv_bytes",
                hint=f"A context of {wanted_context} tokens takes {num_wanted_blocks * bytes_per_block}.",
            )
        self._kv_bytes = num_blocks * bytes_per_block
        self._kv = model.new_kv(num_blocks, block_size, **kind)
        self._thread: threading.Thread | None = None
        prefix_seed = prefix_seed or secrets.token_bytes(32)
        self._roster = Roster(
            num_blocks,
            options,
            prefix_seed=prefix_seed,
            max_pinned_blocks=options.max_pinned_blocks(num_blocks, bytes_per_block),
            copy_tokens=self._kv.copy_tokens,
        )
        self._adapters = RequestAdapters(adapters, self._roster.changed)
        lending = self._roster.lending
        # Computed blocks come in and go out this way, in any thread.
        self.prefix_pool = PrefixPool(lending, self._kv, seed=prefix_seed)
        lending.open_spill(self._kv, bytes_per_block, self._roster.num_promised_blocks)
        self._backend = make_backend(
            model,
            self._kv,
            BackendOptions(
                block_size=block_size,
                max_running=options.max_running,
                max_step_tokens=options.max_step_tokens,
                max_context=self.max_context,
                kernels_dir=options.kernels_dir,
            ),
            timeline,
        )
        self._early: EarlyPhase | None = None
        if arrival is not None:
            tiered = cast("TieredDecoder", model)
            self._early = EarlyPhase(
                tiered, self._kv, self._roster, arrival, timeline=self._timeline, backend=self._backend
            )

    # -- for any thread --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread, which sleeps while there is nothing to do."""
        with self._roster.changed:
            if self._thread is not None or self._roster.is_stopping:
                raise RuntimeError("an engine can be started once, before it is stopped")
            # Daemon: a pass that waits for weights cannot be interrupted, and must not keep the process.
            self._thread = threading.Thread(target=self._run, name="teneral-engine", daemon=True)
            self._thread.start()
            if self._roster.lending.spill is not None:
                self._roster.lending.spill.start()

    def submit(
        self, request: GenerationRequest, on_event: OnEvent | None = None, *, joins: bool = False
    ) -> Generation:
        """Queues the request and returns at once. With `joins`, it belongs to what was submitted just before: it is not
        refused for how long it will have to wait (`max_wait_s`).

        `on_event` gets the events in order, as a rule from the engine's thread, which it must not hold up;
        from the caller's when it cancels, stops the engine or asks for nothing to be computed, and for the tokens
        that the request's grammar forces from the beginning, which nothing is computed for. If it raises, its sequence
        is cancelled.

        `max_tokens` beyond the end of the context is no error: the sequence ends there with LENGTH. Raises
        ContextLengthError, RequestError (a token that the model does not have), GrammarError, CapacityError,
        DrainingError, or the error that cost the engine its weights. Then nothing was begun.
        """
        self._check(request)
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
        """As `submit`. Once nothing can be raised any more, the adapter is released when the generation ends."""
        generation = Generation(request, on_event, on_end=partial(self._on_end, adapter))
        sequence = TokenSequence(
            generation,
            self._tokenizer,
            eos_token_ids=self._eos_token_ids,
            max_new_tokens=max_new_tokens,
            adapter=adapter,
        )
        # What the grammar forces from the beginning is sent at once, whatever the weights are.
        first = sequence.begin() if max_new_tokens > 0 or sequence.scores is not None else _no_tokens()
        last = first if first is not None and first.finish_reason is not None else None
        if first is not None and last is None:
            generation.begin(first)
        with self._roster.changed:
            if last is None:
                self._roster.enqueue(sequence, joins=joins)
                self._roster.note_events([] if first is None else [(sequence, first)])
            else:
                self._roster.require_open()
                self._roster.num_output_tokens += len(last.tokens)
        if last is not None:
            generation.emit(last)
        else:
            generation.deliver()
        if first is not None and first.tokens:
            self._timeline.add_forced(generation, len(first.tokens))
        self._adapters.follow(adapter, generation)
        return generation

    def require_room(self, queue_name: str, priority: Priority, num_sequences: int = 1) -> None:
        """Raises CapacityError when so many requests of this tenant (`GenerationRequest.queue_name`) would be refused
        now, the others joining the first one; or the reason for which everything is.
        """
        with self._roster.changed:
            self._roster.require_open()
            self._roster.require_room(queue_name, priority, num_sequences)

    def drain(self, timeout_s: float) -> bool:
        """Takes nothing new, waits for what was taken, then stops. True when all of it ended by itself; what
        has not ended in time gets its last event (ERROR, DrainingError). Does not wait for the thread: `stop`
        does.
        """
        roster = self._roster
        with roster.changed:
            roster.refuse(_shutting_down())
            finished = roster.changed.wait_for(roster.all_ended, timeout_s)
        self._shut_down(_shutting_down())
        return finished

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Ends every sequence now (ERROR, DrainingError), and the thread after its step. False when the
        thread goes on after `timeout_s`, as it does while its pass waits for weights: cancel their load
        first.
        """
        self._shut_down(_shutting_down())
        if self._thread is None:
            self._stop_spill()
            return True
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def abort(self, failure: TeneralError) -> None:
        """Ends every sequence now, with this error, which is also what whoever asks later gets. Waits for nothing."""
        self._shut_down(failure)

    def statistics(self) -> EngineStatistics:
        return statistics_of(
            self._roster,
            kv_bytes=self._kv_bytes,
            max_context=self.max_context,
            device=self._backend.statistics(),
        )

    def kv_view(self) -> PoolView:
        """What the KV pool holds, without anything by which who asks could tell whose it is."""
        lending = self._roster.lending
        with lending.changed:
            return view_pool(
                lending.allocator,
                lending.prefixes,
                lending.ledger,
                lending.sessions.statistics(),
                block_size=self.options.block_size,
                now_s=time.monotonic(),
            )

    @property
    def owes_first_token(self) -> bool:
        """Whether somebody waits for the first token of an answer."""
        with self._roster.changed:
            return self._roster.owes_first_token

    def check_integrity(self) -> None:
        """Raises AssertionError unless sequences and block pool agree. For tests; waits for no step."""
        with self._roster.changed:
            self._roster.check_integrity(self.max_context)

    # -- the engine's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                if self._early is not None:
                    self._run_early(self._early)
                    continue
                if self._use_idle_time():
                    continue
                plan = self._next_plan()
                if plan is None:
                    self._stop_spill()
                    return
                self._execute(plan.shares)
            except Exception as error:  # a bug of ours: nobody may be left waiting for ever
                logger.exception("the engine failed")
                self._fail_all(as_teneral_error(error))

    def _run_early(self, early: EarlyPhase) -> None:
        """All that goes on before the weights are exact, where there is a draft of them."""
        try:
            early.run()
            self._early = None
            return
        except Exception as error:  # noqa: BLE001 - of the model's code, its weights, or memory
            if not is_exhaustion(error):
                members = early.members
                early.reset()
                self._fail_step(as_teneral_error(error), members)
                return
            exhausted = str(error)  # without its traceback, which holds what the step had made
        members = early.members
        early.reset()
        # Whoever is left begins again: of passes that were under way nothing is known any more.
        victims = largest_first([(each, each.num_tokens) for each in members])
        self._run_out(exhausted, victims[:1], victims[1:])

    def _use_idle_time(self) -> bool:
        """One piece of what makes later steps faster, if nobody waits for a first token. Whether to look again."""
        roster, backend = self._roster, self._backend
        if not backend.wants_idle_time(has_running=bool(roster.running)):  # on a CPU, never
            return False
        with roster.changed:
            if roster.some_ended_early:
                roster.forget_ended()
            has_running = bool(roster.running)
            if (
                roster.owes_first_token
                or roster.is_stopping
                or not backend.wants_idle_time(has_running=has_running)
            ):
                return False
            if not has_running and roster.changed.wait(IDLE_S):
                return True
        self._backend.work_when_idle()
        return True

    def _next_plan(self) -> StepPlan[TokenSequence] | None:
        """Sleeps until there is work, decides, and reserves the blocks for it. None: the engine stops."""
        roster, lending = self._roster, self._roster.lending
        with roster.changed:
            while True:
                if roster.some_ended_early:
                    roster.forget_ended()
                if roster.is_stopping:
                    # Whoever stops the engine gives these their last events, maybe after this thread has gone.
                    roster.forget_all()
                    return None
                if not roster.running and not roster.waiting:
                    roster.changed.wait()
                    continue
                self._take_turns()
                roster.attach_prefixes()
                plan = plan_step(
                    roster.running,
                    roster.ready() or roster.followers(),
                    lending.num_available,
                    self._limits,
                    freed_by=lending.num_freed_by,
                )
                roster.apply(plan)
                roster.detach_prefixes()
                if plan.shares:
                    return plan
                wait_s = None if lending.spill is None else lending.spill.wait_s()
                waits_for_adapters = any(each.waits_for_adapter for each in roster.waiting)
                assert wait_s is not None or waits_for_adapters, "the oldest sequence can always go on"
                roster.changed.wait(wait_s)

    def _take_turns(self) -> None:
        """Those that wait in the order of their turns; batch work makes way for what is interactive. Under the lock."""
        roster, lending = self._roster, self._roster.lending
        lending.sessions.expire(time.monotonic())
        has_batch = any(sequence.is_batch for sequence in roster.running)
        if not roster.waiting or (len(roster.running) == self.options.max_running and not has_batch):
            return
        roster.waiting.arrange()
        if has_batch:
            victims = make_way(
                roster.running,
                roster.prospects(),
                lending.num_available,
                self._limits,
                lending.num_freed_by,
            )
            roster.preempt(victims, Preempted.PRIORITY)

    def _execute(self, shares: Sequence[Share[TokenSequence]]) -> None:
        choosing = [share.sequence for share in shares if share.is_last]
        exhausted: str | None = None
        try:
            choices = self._compute(shares, [sequence.sampling for sequence in choosing])
        except OvertakenError:
            with self._roster.changed:
                self._roster.preempt([share.sequence for share in reversed(shares)], Preempted.ADAPTER)
            return
        except Exception as error:  # noqa: BLE001 - of the model's code, its weights, or memory
            if not is_exhaustion(error):
                self._fail_step(as_teneral_error(error), [share.sequence for share in shares])
                return
            exhausted = str(error)  # without its traceback, which holds what the step had made
        if exhausted is not None:
            victims = largest_first([(share.sequence, share.num_tokens) for share in shares])
            self._run_out(exhausted, victims[:1], [])
            return
        for share in shares:
            share.sequence.exact.num_computed += share.num_tokens
        events = [
            (sequence, accept(sequence, choice))
            for sequence, choice in zip(choosing, choices, strict=True)
            if not sequence.generation.ended
        ]
        roster, lending = self._roster, self._roster.lending
        with roster.changed:
            if len(events) < len(choosing):
                # Those got no token, so they may not be planned again: whoever ends them may not be here yet.
                roster.some_ended_early = True
            for share in shares:
                lending.remember(share.sequence)
            roster.note_events(events)
            if lending.spill is not None:
                lending.spill.poke()
        for sequence, event in events:
            sequence.generation.emit(event)

    def _compute(
        self, shares: Sequence[Share[TokenSequence]], states: Sequence[SamplingState]
    ) -> list[Chosen]:
        """One step, and the tokens after it."""
        backend, step, spill = self._backend, self._roster.num_steps, self._roster.lending.spill
        batch = backend.build([_rows_of(share) for share in shares])
        start_s = time.monotonic()
        end_s: float | None = None
        try:
            on_layer = self._timeline.on_layer(step)
            if any(share.sequence.waits_for_adapter for share in shares):
                model = cast("TieredDecoder", self._model)
                logits = followed(model.begin(batch, self._kv, on_layer=on_layer), self._is_overtaken)
            else:
                logits = backend.forward(batch, on_layer=on_layer)
            end_s = None if backend.returns_early else time.monotonic()
            return backend.choose(logits, states)
        finally:
            end_s = end_s or time.monotonic()
            with self._roster.changed:
                self._roster.note_step(len(batch.tokens), end_s - start_s)
                if spill is not None:
                    spill.note_step(len(batch.tokens), end_s - start_s)
            self._timeline.add_step(step, batch, start_s, end_s)

    def _is_overtaken(self) -> bool:
        """Whether there is something to do that need not wait for an adapter."""
        roster = self._roster
        with roster.changed:
            return bool(roster.ready()) or roster.some_ended_early or roster.is_stopping

    def _run_out(self, why: str, victims: Sequence[TokenSequence], others: Sequence[TokenSequence]) -> None:
        """Memory did not suffice for a step. These end, these begin again, and all others go on."""
        self._backend.make_room()
        logger.error("out of memory: %s", why)
        roster = self._roster
        with roster.changed:
            roster.num_exhausted += 1
            for sequence in victims:
                roster.forget(sequence)
            roster.preempt([each for each in others if each in roster.running], Preempted.MEMORY)
            for sequence in roster.running:  # what the step would have filled
                roster.lending.shrink(sequence.exact, sequence.num_computed)
            failure = CapacityError(
                "there was not enough memory to compute this request beside the others",
                retry_after_s=roster.retry_after_s,
                hint="Try again later, or with a shorter prompt; --kv-bytes and --max-running leave more room.",
            )
        for sequence in victims:
            sequence.generation.emit(error_event(failure))

    def _fail_step(self, failure: TeneralError, sequences: Sequence[TokenSequence]) -> None:
        """Ends the sequences of a step that failed; all sequences, now and later, if weights are lost."""
        if isinstance(failure, (*WEIGHTS_LOST, DeviceLostError)):
            self._fail_all(failure)
            return
        logger.error("a step failed: %s", failure.message, exc_info=failure)
        with self._roster.changed:
            for sequence in sequences:
                self._roster.forget(sequence)
        for sequence in sequences:
            sequence.generation.emit(error_event(failure))

    def _fail_all(self, failure: TeneralError) -> None:
        if isinstance(failure, DeviceLostError) and self._on_device_lost is not None:
            self._on_device_lost(failure)
        with self._roster.changed:
            self._roster.refuse(failure)
            sequences = self._roster.forget_all()
        for sequence in sequences:
            sequence.generation.emit(error_event(failure))

    # -- whatever the thread ---------------------------------------------------------------------------------

    def _stop_spill(self) -> None:
        if self._roster.lending.spill is not None:
            self._roster.lending.spill.stop()

    def _check(self, request: GenerationRequest) -> None:
        limits = self._model.config
        num_prompt = len(request.prompt_tokens)
        is_computed = request.max_tokens != 0 or request.num_prompt_logprobs is not None
        num_at_least = num_prompt + 1 if is_computed else num_prompt
        if num_at_least > self.max_context:
            hint = "Shorten the prompt."
            if self.max_context < limits.max_context:
                hint += f" The model itself allows {limits.max_context}; the server gives it less room."
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens, but with its answer it may have {self.max_context}",
                param="prompt",
                hint=hint,
            )
        for param, tokens in {"prompt": request.prompt_tokens, **request.sampling.named_tokens}.items():
            if tokens and not 0 <= min(tokens) <= max(tokens) < limits.vocab_size:
                raise RequestError(
                    f"{param} has a token that is not one of the model's, 0 to {limits.vocab_size - 1}",
                    param=param,
                )

    def _on_end(self, adapter: HeldAdapter | None, generation: Generation, reason: FinishReason) -> None:
        self._roster.note_end(generation, reason)
        self._adapters.release(adapter)
        self._timeline.add_request(generation, reason)

    def _shut_down(self, reason: TeneralError) -> None:
        roster = self._roster
        with roster.changed:
            roster.refuse(reason)
            roster.is_stopping = True
            sequences = roster.everybody()
            roster.changed.notify_all()
        for sequence in sequences:
            sequence.generation.emit(error_event(reason))


def _rows_of(share: Share[TokenSequence]) -> Rows:
    """What the scheduler gave to a sequence."""
    lane = share.sequence.exact
    end = lane.num_computed + share.num_tokens
    return Rows(lane, lane.tokens, lane.num_computed, end, int(share.is_last), share.sequence.scores)


def _no_tokens() -> GenerationEvent:
    """The only event of a sequence that may have no tokens."""
    return GenerationEvent("", (), finish_reason=FinishReason.LENGTH)


def _shutting_down() -> DrainingError:
    return DrainingError("the instance is shutting down", hint="Ask another instance.")
