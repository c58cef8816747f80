"""The division of a device's memory: pure arithmetic over the free bytes.

Weights come first, then room for the largest step, for recorded steps and for unforeseen needs
(libraries' workspaces, the allocator's rounding); keys and values get most of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...models.spec import DecoderSpec

KV_SHARE = 0.9  # of the remaining memory
# A few hundred kernels' records for each size, and the activations that they share.
GRAPH_BYTES = 256 << 20
SPARE_BYTES = 512 << 20
MIN_KV_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """The bytes of each use of the device's memory."""

    weight_bytes: int  # weights not yet allocated
    activation_bytes: int
    graph_bytes: int
    spare_bytes: int
    kv_bytes: int


def plan_budget(
    free_bytes: int, *, missing_weight_bytes: int, activation_bytes: int, kv_bytes: int | None
) -> DeviceBudget:
    """Divide `free_bytes` of the device.

    `missing_weight_bytes` are not allocated yet. `kv_bytes` is the configured size of the pool,
    which overrides the computed one.
    """
    taken = missing_weight_bytes + activation_bytes + GRAPH_BYTES + SPARE_BYTES
    left = max(0, free_bytes - taken)
    chosen = max(MIN_KV_BYTES, int(KV_SHARE * left)) if kv_bytes is None else kv_bytes
    return DeviceBudget(missing_weight_bytes, activation_bytes, GRAPH_BYTES, SPARE_BYTES, chosen)


def pool_bytes_on(
    device: str,
    spec: DecoderSpec,
    *,
    max_rows: int,
    max_step_tokens: int = 2_048,
) -> int:
    """The pool's size in bytes on this device, whose weights are allocated already."""
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(torch.device(device))
    needed = activation_bytes(spec, max_step_tokens, max_rows)
    return plan_budget(free_bytes, missing_weight_bytes=0, activation_bytes=needed, kv_bytes=None).kv_bytes


def activation_bytes(spec: DecoderSpec, max_step_tokens: int, max_rows: int) -> int:
    """An upper bound of the largest step's memory, weights and cache excluded.

    A layer holds at the same time: the rows, their norm, queries with keys and values, the output
    of attention, the gate's two products and their product. Then logits, in the model's dtype and
    in fp32, and as much again while tokens are chosen.
    """
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    of_row = 3 * spec.hidden_size + heads + spec.num_heads * spec.head_dim + 3 * spec.intermediate_size
    of_logits = spec.vocab_size * (spec.dtype.size_bytes + 3 * 4)
    return max_step_tokens * of_row * spec.dtype.size_bytes + max_rows * of_logits
