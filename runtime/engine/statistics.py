"""The statistics of an engine, read from its state."""

from __future__ import annotations

from ..step.backend import DeviceStatistics
from .options import EngineStatistics
from .state import SchedulerState


def statistics_of(
    state: SchedulerState, *, kv_bytes: int, max_context: int, device: DeviceStatistics | None
) -> EngineStatistics:
    """Take a snapshot under the scheduler state's lock."""
    blocks = state.blocks
    with state.changed:
        prefixes, sessions = blocks.prefixes.statistics(), blocks.sessions.statistics()
        return EngineStatistics(
            running=len(state.running),
            queued=len(state.waiting),
            num_blocks=blocks.allocator.num_blocks,
            free_blocks=blocks.num_available,
            block_size=state.options.block_size,
            kv_bytes=kv_bytes,
            max_context=max_context,
            steps_total=state.num_steps,
            forward_s_total=state.forward_s,
            prompt_tokens_total=state.num_prompt_tokens,
            output_tokens_total=state.num_output_tokens,
            computed_tokens_total=state.num_computed_tokens,
            preemptions_total=state.num_preemptions.total(),
            ended_total=dict(state.num_ended),
            drafted_tokens_total=state.num_drafted_tokens,
            accepted_proposals_total=state.num_accepted_proposals,
            rejected_proposals_total=state.num_rejected_proposals,
            cached_blocks=prefixes.num_cached,
            idle_blocks=prefixes.num_idle,
            prefix_hit_tokens_total=prefixes.hit_tokens_total,
            prefix_lookup_tokens_total=prefixes.lookup_tokens_total,
            prefix_evictions_total=prefixes.evictions_total,
            spill=None if blocks.spill is None else blocks.spill.statistics(),
            device=device,
            exhausted_total=state.num_exhausted,
            queued_by_priority=state.waiting.num_by_priority(),
            tenants_waiting=state.waiting.num_tenants(),
            preemptions_by_reason_total=dict(state.num_preemptions),
            sessions=sessions.num_sessions,
            pinned_blocks=sessions.num_pinned_blocks,
            sessions_unpinned_total=sessions.unpinned_total,
            retry_after_s=state.retry_after_s,
        )
