"""A timeline of a cold start as it might have been, made with a real `Timeline`."""

from __future__ import annotations

from typing import Any

from teneral.loader.timeline import Timeline

PART_BYTES = {"draft": 14_000_000, "refine": 8_000_000}


def cold_start(
    *, num_layers: int = 24, layer_s: float = 0.15, num_requests: int = 1, draft_tier: bool = True
) -> dict[str, Any]:
    """The snapshot of a model that arrives a layer every `layer_s`; the first request follows it layer by
    layer.
    """
    timeline = Timeline(started_at=0.0)
    add = timeline.add
    add("process", "start interpreter", 0.0, 0.06)
    add("process", "import loader", 0.06, 0.14)
    add("process", "import server", 0.15, 0.42)
    add("process", "port open", 0.13, 0.13)
    add("manifest", "open", 0.16, 0.19)
    add("tokenizer", "import", 0.16, 0.21)
    add("tokenizer", "load", 0.21, 0.63)
    add("process", "import torch", 0.17, 1.52)
    add("model", "build", 1.53, 1.58)
    add("model", "KV pool", 1.58, 1.6)
    add("process", "engine runs", 1.61, 1.61, first_token="exact")
    tiers = ("draft", "refine") if draft_tier else ("refine",)
    part, executed_s = 0, 1.7
    stored_bytes = 0
    for index in range(-1, num_layers + 1):
        name = "embed" if index < 0 else "head" if index == num_layers else f"layers.{index}"
        arrival_s = 0.2 + (index + 1) * layer_s
        for tier_index, tier in enumerate(tiers):
            start_s = arrival_s + tier_index * layer_s * 0.6
            end_s = start_s + layer_s * 1.4
            words = {"group": name, "tier": tier, "part": part, "bytes": PART_BYTES[tier]}
            add("fetch", f"{name} {tier}", start_s, end_s, **words)
            add("verify", f"{name} {tier}", end_s, end_s + 0.004, **words)
            add("decode", f"{name} {tier}", end_s + 0.004, end_s + 0.018, **words)
            reached = "draft" if tier == "draft" else "exact"
            add("ready", f"{name} {reached}", end_s + 0.018, end_s + 0.018, group=name, tier=reached)
            part += 1
            stored_bytes += PART_BYTES[tier]
        executed_s = max(executed_s, end_s + 0.02)
        add("execute", name, executed_s, executed_s + 0.012, layer=index)
        executed_s += 0.012
    add(
        "fetch",
        "load",
        0.2,
        end_s + 0.02,
        state="exact",
        stored_bytes=stored_bytes,
        weight_bytes=stored_bytes * 3 // 2,
    )
    add("process", "all weights exact", end_s + 0.02, end_s + 0.02)
    add("execute", "step 0", 1.7, executed_s, tokens=12, sequences=1)
    for step in range(1, 8):
        add(
            "execute",
            f"step {step}",
            executed_s + step * 0.03,
            executed_s + step * 0.03 + 0.028,
            tokens=1,
            sequences=1,
        )
    for number in range(num_requests):
        word = {"request": f"req-{number}"}
        came_s = 0.5 + 0.3 * number
        add("request", "queued", came_s, 1.7, **word)
        add("request", "prefill", 1.7, executed_s, **word)
        add("request", "first token", executed_s, executed_s, **word)
        add("request", "decode", executed_s, executed_s + 0.5, **word)
        add("request", "last token", executed_s + 0.5, executed_s + 0.5, finish="stop", **word)
    return timeline.snapshot()
