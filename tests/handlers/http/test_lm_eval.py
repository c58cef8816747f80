"""lm-eval, which we did not write, over a task of our own: its log-likelihoods are those of transformers.

It has an environment of its own, which scripts/conformance-lm-eval makes; TENERAL_LM_EVAL names its Python.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.decoding import oracle_logits
from tests.support.http_server import running_server
from tests.support.tiny_models import save_tiny, tiny_model

from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.instance import Instance

LM_EVAL = os.environ.get("TENERAL_LM_EVAL", "")
TASK = """\
task: teneral_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""
QUESTIONS = [
    {
        "question": f"{number} and {number} make",
        "choices": [str(number), str(2 * number), "many more"],
        "answer": 1,
    }
    for number in range(3, 9)
]

pytestmark = [
    pytest.mark.skipif(not LM_EVAL, reason="needs lm-eval: run scripts/conformance-lm-eval"),
    pytest.mark.slow,
]


def expected(model: Any, tokenizer: Any, question: dict[str, Any]) -> list[float]:
    """The log-likelihood of each choice behind the question."""
    context = tokenizer.encode(question["question"])
    likelihoods = []
    for choice in question["choices"]:
        tokens = tokenizer.encode(f"{question['question']} {choice}")
        rows = oracle_logits(model, tokens).log_softmax(-1)
        likelihoods.append(
            sum(rows[place - 1, tokens[place]].item() for place in range(len(context), len(tokens)))
        )
    return likelihoods


async def test_loglikelihoods_are_those_of_transformers(tmp_path: Path, one_thread: None) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tmp_path / "task.yaml").write_text(TASK.format(data=data))
    config = ServeConfig(model=str(folder), name="tiny", kv_bytes=4 << 20, threads=1)
    async with running_server(Instance(config)) as server:
        arguments = ",".join(
            (
                "model=tiny",
                f"base_url={server.url}/v1/completions",
                f"tokenizer={folder}",
                "tokenized_requests=True",
                "num_concurrent=2",
                "max_length=512",
            )
        )
        process = await asyncio.create_subprocess_exec(
            *(LM_EVAL, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments),
            *("--include_path", str(tmp_path), "--tasks", "teneral_choice", "--batch_size", "4"),
            *("--log_samples", "--output_path", str(tmp_path / "results")),
            env={**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        print(output.decode()[-3000:])
        assert process.returncode == 0, output.decode()[-3000:]
        tokenizer = server.instance.tokenizer.result()
        with torch.no_grad():
            model = tiny_model("llama")
            wanted = [expected(model, tokenizer, question) for question in QUESTIONS]
    (file,) = (tmp_path / "results").rglob("samples_*.jsonl")
    samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    found = [[float(response[0][0]) for response in sample["resps"]] for sample in samples]
    assert [each == pytest.approx(other, abs=1e-3) for each, other in zip(found, wanted, strict=True)] == [
        True
    ] * len(QUESTIONS)
