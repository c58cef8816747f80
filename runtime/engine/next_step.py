"""The engine's next step: the wait for work, its plan, and the use of idle time. Called by the
engine's thread alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..step.backend import Backend
from .scheduler import Preempted, SchedulerLimits, StepPlan, make_way, plan_step
from .sequence import Sequence
from .state import SchedulerState

# Idle time before other work may use it.
IDLE_S = 0.1


def next_plan(
    state: SchedulerState, limits: SchedulerLimits, *, waits: bool = True
) -> StepPlan[Sequence] | None:
    """Wait for work, decide, and reserve the blocks for it. None: the engine stops.

    Without `waits`, the plan has no shares where there is nothing to compute now.
    """
    blocks = state.blocks
    with state.changed:
        while True:
            if state.some_ended_early:
                state.forget_ended()
            if state.is_stopping:
                # The stopping thread gives these their last events, maybe after this thread has
                # ended.
                state.forget_all()
                return None
            if not state.running and not state.waiting:
                if not waits:
                    return StepPlan((), (), ())
                state.changed.wait()
                continue
            _take_turns(state, limits)
            state.attach_prefixes()
            plan = plan_step(
                state.running,
                state.ready() or state.followers(),
                blocks.num_available,
                limits,
                freed_by=blocks.num_freed_by,
            )
            state.apply(plan)
            state.detach_prefixes()
            if plan.shares or not waits:
                return plan
            wait_s = None if blocks.spill is None else blocks.spill.wait_s()
            waits_for_others = any(each.waits_for_adapter or each.waits_for_images for each in state.waiting)
            assert wait_s is not None or waits_for_others, "the oldest sequence can always go on"
            state.changed.wait(wait_s)


def _take_turns(state: SchedulerState, limits: SchedulerLimits) -> None:
    """Arrange the waiting sequences in the order of their turns; preempt batch work for
    interactive work. Under the lock.
    """
    blocks = state.blocks
    blocks.sessions.expire(time.monotonic())
    has_batch = any(sequence.is_batch for sequence in state.running)
    if not state.waiting or (len(state.running) == limits.max_running and not has_batch):
        return
    state.waiting.arrange()
    if has_batch:
        victims = make_way(
            state.running,
            state.prospects(),
            blocks.num_available,
            limits,
            blocks.num_freed_by,
        )
        state.preempt(victims, Preempted.PRIORITY)


def use_idle_time(state: SchedulerState, backend: Backend, deliver: Callable[[], None]) -> bool:
    """Do one piece of work that makes later steps faster, unless a sequence waits for its first
    token. Returns whether to check again. Before any wait, `deliver` delivers the last step's events.
    """
    if not backend.wants_idle_time(has_running=bool(state.running)):  # on a CPU, never
        return False
    deliver()
    with state.changed:
        if state.some_ended_early:
            state.forget_ended()
        has_running = bool(state.running)
        if (
            state.owes_first_token
            or state.is_stopping
            or not backend.wants_idle_time(has_running=has_running)
        ):
            return False
        if not has_running and state.changed.wait(IDLE_S):
            return True
    backend.work_when_idle()
    return True
