"""The memory that a load needs: a check before anything is taken, and the size of its staging buffer."""

from __future__ import annotations

import os

from ..memory.limits import MIB, Available, available, check_fits, taken_bytes
from ..memory.staging import DEFAULT_BYTES, staging_bytes
from .link import ReadLimits
from .options import LoadOptions
from .plan import Plan
from .targets.base import Target


def check_room(
    target: Target, plan: Plan, options: LoadOptions, *, num_decoders: int, source_url: str
) -> ReadLimits:
    """The bounds of a load's reads, its staging among them. Raises `InsufficientMemoryError` when not even the smallest
    staging would fit, given what the weights and the processes that use them take.
    """
    left = _room_left(target, options)
    sizes = [step.part.size_bytes for step in plan.steps if step.slab_offset_bytes is None]
    serving_bytes = _serving_bytes(target, options)
    # Keys and values of what computes with the weights. Where it does so elsewhere, there is memory for speed.
    reserved_bytes = options.reserved_bytes if target.is_used_here else 0
    fixed_bytes = target.weight_bytes + reserved_bytes + serving_bytes
    room_bytes = None if left is None else left.size_bytes - fixed_bytes
    size_bytes = staging_bytes(
        sizes, options.staging_bytes, room_bytes, num_decoders=0 if target.is_used_here else num_decoders
    )
    least_bytes = staging_bytes(sizes, 0, 0)
    if target.staging is not None:
        size_bytes = least_bytes = len(target.staging)
    check_fits(
        fixed_bytes + least_bytes,
        left,
        what=f"loading the model from {source_url}",
        made_of=f"{target.what} {target.weight_bytes / MIB:,.0f}, "
        f"bytes on their way at least {least_bytes / MIB:,.0f}, "
        f"keys and values at least {reserved_bytes / MIB:,.0f}, "
        f"the server's processes another {serving_bytes / MIB:,.0f}",
    )
    staged_bytes = sum(sizes)
    # What has room for all that goes through it, much or little, limits nothing.
    is_bound = size_bytes < staged_bytes
    return ReadLimits(
        options.range_bytes,
        options.connections,
        size_bytes if is_bound else max(staged_bytes, DEFAULT_BYTES),
        size_bytes,
    )


def _room_left(target: Target, options: LoadOptions) -> Available | None:
    """Memory that the load may take; None where the system does not limit it."""
    if options.available_bytes is not None:
        return Available(options.available_bytes, "as the options say")
    left = available()
    return None if left is None else left._replace(size_bytes=left.size_bytes + target.held_bytes)


def _serving_bytes(target: Target, options: LoadOptions) -> int:
    """Memory that the server's processes will take beyond what they have."""
    pids = (os.getpid(), os.getppid()) if target.is_helper else (os.getpid(),)
    own_bytes = max(0, taken_bytes(*pids) - target.held_bytes)
    return max(0, options.serving_bytes - own_bytes)
