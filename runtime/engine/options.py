"""An engine's bounds, and what it tells about itself, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...loader.errors import UsageError
from ..kv.kinds import KVKind
from ..step.requests import FinishReason, Priority
from .scheduler import Preempted, SchedulerLimits

if TYPE_CHECKING:
    from ..kv.sessions import Unpinned
    from ..kv.spill.spill import SpillStatistics
    from ..step.backend import DeviceStatistics


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Bounds of an engine. The KV pool is reserved as a whole; its memory is touched as tokens come."""

    kv_bytes: int
    block_size: int = 16  # tokens
    max_running: int = 32  # sequences that share a step
    max_queued: int = 256  # sequences that may wait beside those
    max_step_tokens: int = 2_048  # of all sequences in a step: bounds the memory for activations
    max_prefill_tokens: int = 512  # of prompts, in a step in which others wait for their next token
    max_context: int | None = None  # None: what the model allows and the pool can hold
    kv_dtype: KVKind = KVKind.MODEL  # how keys and values are stored
    prefix_cache: bool = True  # blocks of past sequences are kept, for who begins in the same way
    max_wait_s: float | None = None  # for a place: who would have to wait longer is refused; None: nobody is
    max_queued_per_tenant: int | None = None  # of those who name themselves; None: half of max_queued
    session_kv_bytes: int | None = None  # that sessions may pin; None: half of the pool
    session_idle_s: float = 900.0  # after which one that nobody has come back to loses its pins
    max_sessions: int = 1_024
    kv_host_bytes: int = 0  # memory beside the pool, for what it gives up
    kv_disk_bytes: int = 0  # the same on a disk: in a file without a name, in this folder
    kv_disk_dir: str | None = None
    kernels_dir: str | None = None  # of binaries for a CUDA device, compiled ahead of time

    def __post_init__(self) -> None:
        _require_at_least("kv_bytes", self.kv_bytes, 1)
        _require_at_least("block_size", self.block_size, 1)
        _require_at_least("max_running", self.max_running, 1)
        _require_at_least("max_queued", self.max_queued, 0)
        _require_at_least("max_wait_s", self.max_wait_s or 0, 0)
        # Every running sequence must be able to take its one token.
        _require_at_least("max_step_tokens", self.max_step_tokens, self.max_running)
        _require_at_least("max_prefill_tokens", self.max_prefill_tokens, 1)
        if self.max_context is not None:
            _require_at_least("max_context", self.max_context, 2)
        _require_at_least("max_queued_per_tenant", self.max_queued_of_tenant, 0)
        _require_at_least("session_kv_bytes", self.session_kv_bytes or 0, 0)
        _require_at_least("session_idle_s", self.session_idle_s, 0)
        _require_at_least("max_sessions", self.max_sessions, 0)
        _require_at_least("kv_host_bytes", self.kv_host_bytes, 0)
        _require_at_least("kv_disk_bytes", self.kv_disk_bytes, 0)
        if (self.kv_host_bytes or self.kv_disk_bytes) and not self.prefix_cache:
            raise UsageError(
                "kv_host_bytes and kv_disk_bytes are for what the prefix cache gives up, and that is turned off",
                key="prefix_cache",
                hint="Leave them out, or turn the prefix cache on.",
            )

    @property
    def max_queued_batch(self) -> int:
        """Of batch work of all tenants."""
        return -(-self.max_queued // 2)

    @property
    def max_queued_of_tenant(self) -> int:
        return -(-self.max_queued // 2) if self.max_queued_per_tenant is None else self.max_queued_per_tenant

    def max_pinned_blocks(self, num_blocks: int, bytes_per_block: int) -> int:
        """How many of the pool's blocks sessions may pin."""
        if self.session_kv_bytes is None:
            return num_blocks // 2
        return min(num_blocks, self.session_kv_bytes // bytes_per_block)

    def scheduler_limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            max_running=self.max_running,
            max_step_tokens=self.max_step_tokens,
            max_prefill_tokens=self.max_prefill_tokens,
            block_size=self.block_size,
        )


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """A moment's view; totals count from the engine's start."""

    running: int
    queued: int
    num_blocks: int
    free_blocks: int
    block_size: int
    kv_bytes: int
    max_context: int
    steps_total: int
    forward_s_total: float
    prompt_tokens_total: int  # of the sequences that were admitted
    output_tokens_total: int
    computed_tokens_total: int  # that went through the model: preempted sequences' twice
    preemptions_total: int
    ended_total: Mapping[FinishReason, int]
    drafted_tokens_total: int = 0  # of the output tokens: chosen by weights that were not exact yet
    accepted_proposals_total: int = 0  # of the draft, which the exact weights confirmed
    rejected_proposals_total: int = 0
    cached_blocks: int = 0  # that can be found by their prefix
    idle_blocks: int = 0  # of these: not in use, and given up when blocks are needed
    prefix_hit_tokens_total: int = 0
    prefix_lookup_tokens_total: int = 0
    prefix_evictions_total: int = 0
    spill: SpillStatistics | None = None
    device: DeviceStatistics | None = None  # where there is one beside the CPU
    exhausted_total: int = 0  # steps for which memory did not suffice
    queued_by_priority: Mapping[Priority, int] = field(default_factory=dict)
    tenants_waiting: int = 0
    preemptions_by_reason_total: Mapping[Preempted, int] = field(default_factory=dict)
    sessions: int = 0
    pinned_blocks: int = 0  # by sessions: idle or in use
    sessions_unpinned_total: Mapping[Unpinned, int] = field(default_factory=dict)
    retry_after_s: float = 1.0  # when a place becomes free, as far as that is known


def _require_at_least(key: str, value: float, least: int) -> None:
    if value < least:
        raise UsageError(f"{key} is {value}, but must be at least {least}", key=key)
