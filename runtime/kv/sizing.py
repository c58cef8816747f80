"""How large a KV pool is unless somebody says it."""

from __future__ import annotations

# Of the memory that is left beside the weights, what the pool takes on a CPU: the rest is for activations, staging, and
# the container's other processes.
KV_SHARE = 0.4
DEFAULT_KV_BYTES = 4 << 30


def default_kv_bytes(weight_bytes: int, free_bytes: int | None) -> int:
    """On a CPU: a share of what the weights leave (None: unknown), within reason."""
    if free_bytes is None:
        return DEFAULT_KV_BYTES
    return max(1 << 20, min(DEFAULT_KV_BYTES, int(KV_SHARE * (free_bytes - weight_bytes))))
