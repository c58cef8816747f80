"""Tokens from transformers: `generate.py WAY DIRECTORY [KIND]` reads a task and prints when each token came, as JSON.

Task and answer are those of `llama.py`. It runs in the peers' environment and knows nothing of Teneral.

    static        `generate` over a batch that is there from the beginning
    continuous    `ContinuousBatchingManager`, with a small KV pool

Weights are bf16 as they are stored, or of a KIND of `torch_linear.py`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch_linear import converted
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer

WARM_UPS = 2
TIMEOUT_S = 300.0
KV_SHARE = 0.1  # of the free memory: by default the pool takes nearly all of it, and touches it

Sequences = tuple[list[list[float]], list[list[int]]]  # of each: when each token came, and the tokens
Run = Callable[[list[list[int]], int], Sequences]  # takes prompts, and how many tokens each is to get


def main() -> None:
    way, directory, *kinds = sys.argv[1:]
    task = json.load(sys.stdin)
    torch.set_num_threads(task["threads"])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    num_bytes = token_bytes(model)
    for kind in kinds:
        model, num_bytes = converted(model, kind)
    with {"static": static, "continuous": continuous}[way](model) as run:
        answer: dict[str, Any] = {
            "decode": {},
            "prefill": {},
            "tokens": {},
            "token_bytes": num_bytes,
        }
        for name, prompts in task["prefill"].items():
            run(prompts[:1], 1)
            answer["prefill"][name] = [run([prompt], 1)[0][0][0] for prompt in prompts]
        for name, prompts in task["decode"].items():
            for _ in range(WARM_UPS):
                run(prompts, 4)
            answer["decode"][name], answer["tokens"][name] = run(prompts, task["num_tokens"])
    print(json.dumps(answer))


@contextmanager
def static(model: Any) -> Iterator[Run]:
    class Clock(BaseStreamer):
        """Is given the prompts first, then a token of each sequence at a time."""

        def __init__(self) -> None:
            self.start_s = time.monotonic()
            self.times_s: list[float] = []

        def put(self, value: Any) -> None:
            self.times_s.append(time.monotonic() - self.start_s)

        def end(self) -> None:
            pass

    def run(prompts: list[list[int]], num_tokens: int) -> Sequences:
        inputs = torch.tensor(prompts)
        length = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        clock = Clock()
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, streamer=clock, **length
        )
        return [clock.times_s[1:]] * len(prompts), output[:, inputs.shape[1] :].tolist()

    yield run


@contextmanager
def continuous(model: Any) -> Iterator[Run]:
    settings = GenerationConfig(do_sample=False, eos_token_id=-1)
    pool = ContinuousBatchingConfig(max_memory_percent=KV_SHARE)
    with model.continuous_batching_context_manager(settings, continuous_batching_config=pool) as manager:

        def run(prompts: list[list[int]], num_tokens: int) -> Sequences:
            start_s = time.perf_counter()
            names = manager.add_requests(prompts, max_new_tokens=num_tokens, record_timestamps=True)
            done: dict[str, Any] = {}
            while len(done) < len(prompts):
                result = manager.get_result(timeout=TIMEOUT_S)
                if result is None:
                    raise SystemExit("continuous batching gave no more results")
                if result.is_finished():
                    done[result.request_id] = result
            results = [done[name] for name in names]
            times = [[stamp - start_s for stamp in result.timestamps] for result in results]
            return times, [list(map(int, result.generated_tokens)) for result in results]

        yield run


def token_bytes(model: Any) -> int:
    """Of the weights, what one token needs: all of them, but of embeddings that are not also the head a row."""
    weights = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    if not model.config.tie_word_embeddings:
        del weights[model.get_input_embeddings().weight.data_ptr()]
    return sum(parameter.nbytes for parameter in weights.values())


if __name__ == "__main__":
    main()
