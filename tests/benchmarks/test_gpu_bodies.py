"""GPU benchmarks run to their end on the CPU and keep what they measure: no minute of a device is lost on a wrong
name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.load import patience_s

CASES = {
    "attention": {
        "DECODE": [[1, 100], [2, 70]],
        "PROMPTS": [[0, 50], [30, 20]],
        "MAX_CONTEXT": 256,
        "HEADS": 4,
        "KV_HEADS": 1,
        "HEAD_DIM": 64,
    },
    "decode": {"BATCHES": [1, 2], "NUM_TOKENS": 8, "PROMPT_TOKENS": 70, "PEER_TOKENS": 4},
    "decode --bits 8 --no-peers": {"BATCHES": [1], "NUM_TOKENS": 4, "PROMPT_TOKENS": 20},
    "decode --bits 4 --no-peers": {"BATCHES": [1], "NUM_TOKENS": 4, "PROMPT_TOKENS": 20},
    "first_tokens": {"MAX_LENGTH": 100, "NUM_LENGTHS": 3},
    "prefix": {"PREFIX_TOKENS": 128, "ROUNDS": 2},
    "products": {"QWEN_05B": [[20, 256]], "LLAMA_8B": [[64, 128]], "CACHE_BYTES": 10_000},
    "decode_threads": {"MIN_S": 0.1, "ELEMENTS": 1 << 18, "THREADS": [1, 2]},
}


@pytest.mark.slow
def test_benchmarks_run_to_their_end(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.cuda_on_cpu", json.dumps(CASES), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=patience_s(180),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for number, case in enumerate(CASES):
        report = json.loads((tmp_path / f"{number}.json").read_text())
        assert report["benchmark"] == f"gpu_{case.split()[0]}"
    assert done.stdout.count("\n| --- |") == len(CASES) + 1, done.stdout  # two tables of attention
