"""The statistics of an engine, read from its state."""

from __future__ import annotations

from ..step.backend import DeviceStatistics
from .options import EngineStatistics
from .roster import Roster


def statistics_of(
    roster: Roster, *, kv_bytes: int, max_context: int, device: DeviceStatistics | None
) -> EngineStatistics:
    """Take a snapshot under the roster's lock."""
    lending = roster.lending
    with roster.changed:
        prefixes, sessions = lending.prefixes.statistics(), lending.sessions.statistics()
        return EngineStatistics(
            running=len(roster.running),
            queued=len(roster.waiting),
            num_blocks=lending.allocator.num_blocks,
            free_blocks=lending.num_available,
            block_size=roster.options.block_size,
            kv_bytes=kv_bytes,
            max_context=max_context,
            steps_total=roster.num_steps,
            forward_s_total=roster.forward_s,
            prompt_tokens_total=roster.num_prompt_tokens,
            output_tokens_total=roster.num_output_tokens,
            computed_tokens_total=roster.num_computed_tokens,
            preemptions_total=roster.num_preemptions.total(),
            ended_total=dict(roster.num_ended),
            drafted_tokens_total=roster.num_drafted_tokens,
            accepted_proposals_total=roster.num_accepted_proposals,
            rejected_proposals_total=roster.num_rejected_proposals,
            cached_blocks=prefixes.num_cached,
            idle_blocks=prefixes.num_idle,
            prefix_hit_tokens_total=prefixes.hit_tokens_total,
            prefix_lookup_tokens_total=prefixes.lookup_tokens_total,
            prefix_evictions_total=prefixes.evictions_total,
            spill=None if lending.spill is None else lending.spill.statistics(),
            device=device,
            exhausted_total=roster.num_exhausted,
            queued_by_priority=roster.waiting.num_by_priority(),
            tenants_waiting=roster.waiting.num_tenants(),
            preemptions_by_reason_total=dict(roster.num_preemptions),
            sessions=sessions.num_sessions,
            pinned_blocks=sessions.num_pinned_blocks,
            sessions_unpinned_total=sessions.unpinned_total,
            retry_after_s=roster.retry_after_s,
        )
