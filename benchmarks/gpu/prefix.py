"""Time to the first token on a GPU: of a prompt that is new, and of one whose first 1,024 tokens are in the pool.

    python -m benchmarks.gpu.prefix [--json FILE] [--layers N]

An 8B-shaped bf16 model, one request at a time, from `submit` to the event with its first token.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.gpu import model_8b
from benchmarks.gpu.check import claim
from benchmarks.report import table

PREFIX_TOKENS = 1024
REST_TOKENS = 32
ROUNDS = 12
GOAL_MS = 10.0


def main() -> int:
    options = model_8b.parse(__doc__)
    if not model_8b.require_device():
        return 2
    model = model_8b.decoder(options.layers)
    own = model_8b.engine(model, max_running=4, max_context=2048, records=True)
    (prefix,) = model_8b.prompts(1, PREFIX_TOKENS)
    model_8b.generate(
        own, model_8b.prompts(2, PREFIX_TOKENS + REST_TOKENS, seed=1), 4
    )  # whatever is made once
    model_8b.wait_for_graphs(own)
    first_ms: dict[str, list[float]] = {"new": [], "pooled": []}
    model_8b.generate(own, [prefix], 2)
    for number in range(ROUNDS):
        (rest,) = model_8b.prompts(1, REST_TOKENS, seed=100 + number)
        (new,) = model_8b.prompts(1, PREFIX_TOKENS + REST_TOKENS, seed=200 + number)
        for name, prompt in (("new", new), ("pooled", prefix + rest)):
            first_ms[name].append(model_8b.generate(own, [prompt], 2)["first_token_s"][0] * 1e3)
    hits = own.statistics().prefix_hit_tokens_total
    own.stop(10.0)
    assert hits >= ROUNDS * (PREFIX_TOKENS - 16), f"only {hits} tokens were found in the pool"
    medians = {name: statistics.median(each) for name, each in first_ms.items()}
    claims = [
        claim(
            "first token behind a pooled prefix of 1,024",
            medians["pooled"],
            GOAL_MS,
            unit=" ms",
            at_most=True,
        )
    ]
    measured: dict[str, Any] = {"first_ms": first_ms, "layers": options.layers}
    model_8b.keep(options.json, "prefix", measured, claims)
    rows = [[name, f"{medians[name]:.1f}", f"{min(each):.1f}"] for name, each in first_ms.items()]
    print(table([f"{PREFIX_TOKENS} + {REST_TOKENS} tokens", "first token, ms (median)", "least"], rows))
    return 0


if __name__ == "__main__":
    model_8b.leave(main())
