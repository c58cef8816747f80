"""The bounds of an engine, of its KV pool and of a request in it, and its statistics, as values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct, field

from ...loader.errors import UsageError
from ..errors import ContextLengthError, RequestError
from ..kv.storage import KVKind
from ..step.backend import BackendOptions
from ..step.requests import FinishReason, GenerationRequest, Priority
from .scheduler import Preempted, SchedulerLimits

if TYPE_CHECKING:
    from ..kv.sessions import Unpinned
    from ..kv.spill.spill import SpillStatistics
    from ..step.backend import BackendDeviceStatistics
    from .arrival import DecoderLike, DecoderLimits


class EngineOptions(Struct, frozen=True, kw_only=True):
    """Bounds of an engine. The whole KV pool is reserved; its memory is touched as tokens are
    stored.
    """

    kv_bytes: int
    block_size: int = 16  # tokens
    max_running: int = 32  # sequences that share a step
    max_queued: int = 256  # sequences that may wait in addition
    max_step_tokens: int = 2_048  # of all sequences in a step: bounds the memory for activations
    # Of prompts, in a step in which others wait for their next token.
    max_prefill_tokens: int = 512
    max_context: int | None = None  # None: the minimum of the model's limit and the pool's size
    kv_dtype: KVKind = KVKind.MODEL  # how keys and values are stored
    # Blocks of past sequences are kept for requests with the same prefix.
    prefix_cache: bool = True
    # For a place: requests that would wait longer are refused; None: unlimited.
    max_wait_s: float | None = None
    max_queued_per_tenant: int | None = None  # of named tenants; None: half of max_queued
    session_kv_bytes: int | None = None  # the maximum of pinned bytes; None: half of the pool
    # Idle time after which a session loses its pins.
    session_idle_s: float = 900.0
    max_sessions: int = 1_024
    # Host memory for evicted blocks, in addition to the pool.
    kv_host_bytes: int = 0
    # The same on a disk: in an unnamed file, in this folder.
    kv_disk_bytes: int = 0
    kv_disk_dir: str | None = None
    # Proposals of a sequence in a step, where it repeats itself; None: as many as pay, 0: none.
    look_ahead: int | None = None
    # Folder of kernels compiled ahead of time, for a CUDA device.
    kernel_dir: str | None = None

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
        _require_at_least("look_ahead", self.look_ahead or 0, 0)
        _require_at_least("kv_host_bytes", self.kv_host_bytes, 0)
        _require_at_least("kv_disk_bytes", self.kv_disk_bytes, 0)
        if (self.kv_host_bytes or self.kv_disk_bytes) and not self.prefix_cache:
            raise UsageError(
                "kv_host_bytes and kv_disk_bytes need the prefix cache, which is turned off",
                key="prefix_cache",
                hint="Leave them out, or turn the prefix cache on.",
            )

    @property
    def max_queued_batch(self) -> int:
        """The maximum of waiting batch work of all tenants."""
        return -(-self.max_queued // 2)

    @property
    def max_queued_of_tenant(self) -> int:
        return -(-self.max_queued // 2) if self.max_queued_per_tenant is None else self.max_queued_per_tenant

    def max_pinned_blocks(self, num_blocks: int, bytes_per_block: int) -> int:
        """The maximum of the pool's blocks that sessions may pin."""
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

    @property
    def spills(self) -> bool:
        """True if evicted blocks are kept outside of the pool."""
        return bool(self.kv_host_bytes or self.kv_disk_bytes) or self.kv_disk_dir is not None

    def backend_options(self, max_context: int) -> BackendOptions:
        return BackendOptions(
            block_size=self.block_size,
            max_running=self.max_running,
            max_step_tokens=self.max_step_tokens,
            max_context=max_context,
            kernel_dir=self.kernel_dir,
        )


class EngineStatistics(Struct, frozen=True):
    """A snapshot of the counts; totals count from the engine's start."""

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
    computed_tokens_total: int  # through the model: those of preempted sequences twice
    preemptions_total: int
    ended_total: Mapping[FinishReason, int]
    drafted_tokens_total: int = 0  # of the output tokens: chosen by weights that were not exact yet
    accepted_proposals_total: int = 0  # of the draft, confirmed by the exact weights
    rejected_proposals_total: int = 0
    accepted_look_ahead_total: int = 0  # the same of look-ahead's proposals
    rejected_look_ahead_total: int = 0
    cached_blocks: int = 0  # can be found by their prefix
    # Of these: not in use, and evicted when blocks are needed.
    idle_blocks: int = 0
    prefix_hit_tokens_total: int = 0
    prefix_lookup_tokens_total: int = 0
    prefix_evictions_total: int = 0
    spill: SpillStatistics | None = None
    device: BackendDeviceStatistics | None = None  # of a device other than the CPU
    exhausted_total: int = 0  # steps that ran out of memory
    queued_by_priority: Mapping[Priority, int] = field(default_factory=dict)
    tenants_waiting: int = 0
    preemptions_by_reason_total: Mapping[Preempted, int] = field(default_factory=dict)
    sessions: int = 0
    pinned_blocks: int = 0  # by sessions: idle or in use
    sessions_unpinned_total: Mapping[Unpinned, int] = field(default_factory=dict)
    retry_after_s: float = 1.0  # until a place becomes free, as an estimate


class PoolSize(NamedTuple):
    """The size of a KV pool, and the longest context in it."""

    num_blocks: int
    bytes_per_block: int
    max_context: int  # fewer tokens than requested if the pool holds fewer
    storage: dict[str, Any]  # arguments of the model's `new_kv`; none for its own kind without states
    num_states: int = 0  # places of recurrent states, for models that have some
    state_bytes: int = 0  # of each


STATE_SHARE = 0.5  # of a pool's bytes, at most, where a model has recurrent states
COPIES_OF_STATES = 3  # for each sequence that may run


def fit_pool(options: EngineOptions, model: DecoderLike) -> PoolSize:
    """The pool of `kv_bytes` for a model. Raises UsageError if it does not hold one sequence of two
    tokens.
    """
    state_bytes = getattr(model, "state_bytes", 0)  # test doubles have none
    num_states = _num_states(options, state_bytes) if state_bytes else 0
    left_bytes = options.kv_bytes - num_states * state_bytes
    block_size = options.block_size
    # Models with only one kind of storage, such as test doubles, have no `kind` argument.
    kind: dict[str, KVKind] = {} if options.kv_dtype is KVKind.MODEL else {"kind": options.kv_dtype}
    bytes_per_block = model.kv_block_bytes(block_size, **kind)
    num_blocks = left_bytes // bytes_per_block
    wanted_context = min(model.config.max_context, options.max_context or model.config.max_context)
    max_context = min(wanted_context, num_blocks * block_size)
    if max_context < 2:
        num_wanted_blocks = -(-wanted_context // block_size)
        raise UsageError(
            f"a KV pool of {left_bytes} bytes is too small: {block_size} tokens need {bytes_per_block}",
            key="kv_bytes",
            hint=f"A context of {wanted_context} tokens takes {num_wanted_blocks * bytes_per_block}.",
        )
    storage = {**kind, "num_states": num_states} if num_states else kind
    return PoolSize(num_blocks, bytes_per_block, max_context, storage, num_states, state_bytes)


def _num_states(options: EngineOptions, state_bytes: int) -> int:
    """The places of recurrent states: at least two, of which one sequence can run."""
    num_fitting = int(STATE_SHARE * options.kv_bytes) // state_bytes
    if num_fitting < 2:
        raise UsageError(
            f"a KV pool of {options.kv_bytes} bytes is too small: this model has states of {state_bytes} bytes "
            "in addition to keys and values, and needs two of them in half of the pool",
            key="kv_bytes",
            hint=f"It takes at least {4 * state_bytes}.",
        )
    if options.kv_host_bytes or options.kv_disk_bytes:
        raise UsageError(
            "this model has recurrent states in addition to keys and values, which are not spilled",
            key="kv_host_bytes" if options.kv_host_bytes else "kv_disk_bytes",
            hint="Leave it out, and give the memory to --kv-bytes.",
        )
    return min(num_fitting, (1 + COPIES_OF_STATES) * options.max_running)


def check_request(
    request: GenerationRequest, limits: DecoderLimits, max_context: int, *, takes_images: bool
) -> None:
    """Raise ContextLengthError for a prompt beyond `max_context`, and RequestError for a token or an image that the
    model does not take.
    """
    num_prompt = len(request.prompt_tokens)
    is_computed = request.max_tokens != 0 or request.num_prompt_logprobs is not None
    num_at_least = num_prompt + 1 if is_computed else num_prompt
    if num_at_least > max_context:
        hint = "Shorten the prompt."
        if max_context < limits.max_context:
            hint += f" The model itself allows {limits.max_context}; the server's limit is lower."
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens, but prompt and answer together may have {max_context}",
            param="prompt",
            hint=hint,
        )
    for param, tokens in {"prompt": request.prompt_tokens, **request.sampling.named_tokens}.items():
        if tokens and not 0 <= min(tokens) <= max(tokens) < limits.vocab_size:
            raise RequestError(
                f"{param} has a token that is not one of the model's, 0 to {limits.vocab_size - 1}",
                param=param,
            )
    if request.images and not takes_images:
        raise RequestError("this model takes text only, and no images", param="messages")


def _require_at_least(key: str, value: float, least: int) -> None:
    if value < least:
        raise UsageError(f"{key} is {value}, but must be at least {least}", key=key)
