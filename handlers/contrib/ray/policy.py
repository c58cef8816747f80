"""Ray's autoscaling by the pool's own policy: requests over the target, and the buffer while anything is busy."""

from __future__ import annotations

import math
from typing import Any


def desired(context: Any, buffer: int = 0, **_: Any) -> tuple[int, dict[str, Any]]:
    """(replicas, state) for Ray's `autoscaling_config.policy`; `context` is Ray's AutoscalingContext.

    Delays are Ray's own: it applies them to what this returns.
    """
    target = context.config.get_target_ongoing_requests()
    requests = float(context.total_num_requests)
    wanted = math.ceil(requests / target) + (buffer if requests > 0 else 0)
    low, high = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(low, min(high, wanted)), dict(context.policy_state or {})
