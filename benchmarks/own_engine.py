"""Tokens from Teneral's engine, without HTTP: reads a task and prints when each token came, both as JSON.

    python -m benchmarks.own_engine ADDRESS < TASK

Task and answer are those of `peers/llama.py`. The engine is that of an `Instance`, as `teneral serve` has it, except
that it keeps no prefixes, so that every prompt is computed, and looks not ahead: answers of random weights repeat
themselves, and guesses of them would count as speed. It is warmed up until its pages are huge and it gets no faster.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from benchmarks.report import plain

from teneral.loader.artifact import open_artifact
from teneral.loader.sources.open import open_source
from teneral.runtime.config import ServeConfig
from teneral.runtime.engine.engine import Engine
from teneral.runtime.engine.generation import Generation
from teneral.runtime.instance.instance import Instance
from teneral.runtime.step.requests import GenerationEvent, GenerationRequest, SamplingParams

KV_BYTES = 512 << 20
WARM_UP_TOKENS = 8
WARM_UP_S = 60.0  # at most
SETTLED_RUNS = 4  # without one that was faster than all before by more than …
SETTLED_GAIN = 0.03
PAGES_S = 30.0  # at most
TIMEOUT_S = 300.0
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"

Prompts = list[list[int]]


def main() -> None:
    address = sys.argv[1]
    task = json.load(sys.stdin)
    config = ServeConfig(
        model=address, kv_bytes=KV_BYTES, prefix_cache=False, look_ahead=0, threads=task["threads"]
    )
    with Instance(config) as instance:
        engine = instance.engine.result(TIMEOUT_S)
        if not instance.wait_exact():
            raise SystemExit(f"{address} could not be loaded: {instance.failure}")
        answer: dict[str, Any] = {
            "decode": {},
            "prefill": {},
            "tokens": {},
            "token_bytes": token_bytes(address),
        }
        wait_for_pages()
        warm_up(engine, next(iter([*task["decode"].values(), *task["prefill"].values()])))
        for name, prompts in task["prefill"].items():
            run(engine, prompts[:1], 1)
            answer["prefill"][name] = [run(engine, [prompt], 1)[0][0][0] for prompt in prompts]
        for name, prompts in task["decode"].items():
            warm_up(engine, prompts)
            answer["decode"][name], answer["tokens"][name] = run(engine, prompts, task["num_tokens"])
        answer["statistics"] = plain(engine.statistics())
    print(json.dumps(answer))


def run(engine: Engine, prompts: Prompts, num_tokens: int) -> tuple[list[list[float]], list[list[int]]]:
    """When each token of each sequence came, in seconds from the call, and the tokens."""
    times: list[list[float]] = [[] for _ in prompts]
    ended = threading.Semaphore(0)  # a result may be there before its last event was delivered

    def submit(number: int, prompt: list[int]) -> Generation:
        def on_event(event: GenerationEvent) -> None:
            times[number] += [time.monotonic() - start_s] * len(event.tokens)
            if event.finish_reason is not None:
                ended.release()

        return engine.submit(
            GenerationRequest(
                f"{number}",
                tuple(prompt),
                max_tokens=num_tokens,
                sampling=SamplingParams(temperature=0),
                ignore_eos=True,
            ),
            on_event,
        )

    start_s = time.monotonic()
    generations = [submit(number, prompt) for number, prompt in enumerate(prompts)]
    tokens = [list(generation.result(TIMEOUT_S).tokens) for generation in generations]
    for _ in prompts:
        ended.acquire(timeout=TIMEOUT_S)
    return times, tokens


def wait_for_pages() -> None:
    """A thread of the load makes huge pages of the weights' small ones, from 2 s after its end on."""
    time.sleep(0.5)
    for thread in threading.enumerate():
        if thread.name == "teneral-huge-pages":
            thread.join(PAGES_S)


def warm_up(engine: Engine, prompts: Prompts) -> None:
    deadline_s = time.monotonic() + WARM_UP_S
    best_s, num_settled = float("inf"), 0
    while num_settled < SETTLED_RUNS and time.monotonic() < deadline_s:
        times, _ = run(engine, prompts, WARM_UP_TOKENS)
        elapsed_s = times[0][-1] - times[0][0]
        num_settled = 0 if elapsed_s < (1 - SETTLED_GAIN) * best_s else num_settled + 1
        best_s = min(best_s, elapsed_s)


def token_bytes(address: str) -> int:
    """Of the weights, what one token needs: all of them, but of embeddings that are not also the head a row."""
    manifest = open_artifact(open_source(address))
    sizes = {tensor.name: tensor.size_bytes for tensor in manifest.tensors}
    is_tied = HEAD not in sizes
    return manifest.weight_bytes - (0 if is_tied else sizes[EMBEDDINGS])


if __name__ == "__main__":
    main()
