"""Greedy tokens from vLLM, for a Python that has it; the argument is `vllm.LLM`'s as JSON. Prints `TOKENS …`."""

from __future__ import annotations

import json
import sys

PROMPTS = ([257, 10, 20, 30], [257, 99], [84, 101, 110, 101, 114, 97, 108])
NUM_TOKENS = 12


def main() -> None:
    from vllm import LLM, SamplingParams

    options = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4}
    model = LLM(**{**options, **json.loads(sys.argv[1])})
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = model.generate([{"prompt_token_ids": list(prompt)} for prompt in PROMPTS], sampling)
    print("TOKENS", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


if __name__ == "__main__":  # vLLM starts its processes anew, and they import this
    main()
