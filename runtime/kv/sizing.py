"""The default size of a KV pool."""

from __future__ import annotations

# The pool's share of the memory left by the weights on a CPU: the rest is for activations, staging,
# and the container's other processes.
KV_SHARE = 0.4
DEFAULT_KV_BYTES = 4 << 30


def default_kv_bytes(weight_bytes: int, free_bytes: int | None) -> int:
    """The default size of the pool on a CPU: a bounded share of the memory left by the weights
    (None: unknown).
    """
    if free_bytes is None:
        return DEFAULT_KV_BYTES
    return max(1 << 20, min(DEFAULT_KV_BYTES, int(KV_SHARE * (free_bytes - weight_bytes))))
