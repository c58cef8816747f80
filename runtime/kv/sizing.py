"""How large a KV pool is unless somebody says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..tensors import CPU

if TYPE_CHECKING:
    from ..models.decoder import Decoder

# Of the memory that is left beside the weights, what the pool takes on a CPU: the rest is for activations, staging, and
# the container's other processes.
KV_SHARE = 0.4
DEFAULT_KV_BYTES = 4 << 30


def pool_bytes(model: Decoder, weight_bytes: int, max_running: int) -> int:
    """Where the model is. The memory of its weights exists by now; on a CPU, much of it is not touched yet."""
    if model.device == CPU:
        from ...loader.memory import available_bytes

        return default_kv_bytes(weight_bytes, available_bytes())
    from ..cuda.budget import pool_bytes_on  # nobody else has a device

    return pool_bytes_on(model.device, model.spec, max_rows=max_running)


def default_kv_bytes(weight_bytes: int, free_bytes: int | None) -> int:
    """On a CPU: a share of what the weights leave (None: unknown), within reason."""
    if free_bytes is None:
        return DEFAULT_KV_BYTES
    return max(1 << 20, min(DEFAULT_KV_BYTES, int(KV_SHARE * (free_bytes - weight_bytes))))
