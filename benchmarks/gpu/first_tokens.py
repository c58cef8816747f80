"""Time to the first token of prompts of 20 different lengths, none of which was seen before.

    python -m benchmarks.gpu.first_tokens [--json FILE] [--layers N]

A library that makes a plan for each new length shows as a first time that is much longer than the second.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

from benchmarks.gpu import model_8b
from benchmarks.gpu.check import claim
from benchmarks.report import table

NUM_LENGTHS = 20
MAX_LENGTH = 4096
GOAL = 1.25  # of the same length's second time, in the median: nothing is made for a length


def main() -> int:
    options = model_8b.parse(__doc__)
    if not model_8b.require_device():
        return 2
    lengths = sorted(random.Random(0).sample(range(33, MAX_LENGTH), NUM_LENGTHS))
    model = model_8b.decoder(options.layers)
    own = model_8b.engine(model, max_running=4, max_context=8192, records=False)
    model_8b.generate(own, model_8b.prompts(1, 64), 4)  # what is made once
    measured: dict[str, Any] = {"layers": options.layers, "first_ms": {}}
    for place, length in enumerate(lengths):
        times = [
            model_8b.generate(own, model_8b.prompts(1, length, seed=2 * place + again), 2)["first_token_s"][0]
            * 1e3
            for again in range(2)
        ]
        measured["first_ms"][length] = times
        model_8b.keep(options.json, "first_tokens", measured, [])
    own.stop(10.0)
    ratio = statistics.median(first / second for first, second in measured["first_ms"].values())
    claims = [claim("a new prompt length, of its second time", ratio, GOAL, unit="x", at_most=True)]
    model_8b.keep(options.json, "first_tokens", measured, claims)
    rows = [
        [str(length), *(f"{each:.1f}" for each in times)] for length, times in measured["first_ms"].items()
    ]
    print(table(["tokens", "first time, ms", "second, ms"], rows))
    return 0


if __name__ == "__main__":
    model_8b.leave(main())
