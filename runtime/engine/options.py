"""An engine's bounds, and what it tells about itself, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...loader.errors import UsageError
from .requests import FinishReason
from .scheduler import SchedulerLimits


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
    prefix_cache: bool = True  # blocks of past sequences are kept, for who begins in the same way

    def __post_init__(self) -> None:
        _require_at_least("kv_bytes", self.kv_bytes, 1)
        _require_at_least("block_size", self.block_size, 1)
        _require_at_least("max_running", self.max_running, 1)
        _require_at_least("max_queued", self.max_queued, 0)
        # Every running sequence must be able to take its one token.
        _require_at_least("max_step_tokens", self.max_step_tokens, self.max_running)
        _require_at_least("max_prefill_tokens", self.max_prefill_tokens, 1)
        if self.max_context is not None:
            _require_at_least("max_context", self.max_context, 2)

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


def _require_at_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{key} is {value}, but must be at least {least}", key=key)
