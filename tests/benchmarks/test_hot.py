"""The figures that the benchmarks of the hot engine compute from measurements."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from benchmarks import hot
from benchmarks.overhead import FEW_TOKENS, MODEL, NoModel, step_s
from benchmarks.processes import RunError
from benchmarks.report import begin
from benchmarks.tasks import TaskTurns, decode_rate, run_task

from teneral.runtime.text.tokenizer import TextTokenizer

ECHO = [sys.executable, "-c", "import json, sys; print('noise'); print(json.dumps(json.load(sys.stdin)))"]
FAIL = [sys.executable, "-c", "raise SystemExit('no such model')"]


def test_tokens_count_while_all_sequences_decode() -> None:
    alone = [0.5, 1.0, 1.5, 2.0]
    assert decode_rate([alone]) == pytest.approx(2.0)
    late = [1.0, 1.5, 2.0, 2.5]  # has its prompt later, and goes on when the other has ended
    assert decode_rate([alone, late]) == pytest.approx(4.0)


def test_sequences_that_never_decode_side_by_side_have_no_rate() -> None:
    with pytest.raises(ValueError, match="side by side"):
        decode_rate([[0.0, 1.0], [2.0, 3.0]])


def test_a_program_is_given_its_task_and_its_last_line_is_the_answer() -> None:
    assert run_task(ECHO, {"threads": 2}) == {"threads": 2}


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(RunError, match="no such model"):
        run_task(FAIL, {})


def test_a_program_that_fails_is_left_out_of_later_rounds() -> None:
    turns = TaskTurns({"good": ECHO, "bad": FAIL})
    assert turns.run(2, {"good": {"a": 1}, "bad": {}}) == {"good": [{"a": 1}, {"a": 1}]}
    assert "no such model" in turns.failed["bad"]


def _answer(step_s: float, first_token: int) -> dict[str, Any]:
    times = [1.0, 1.0 + step_s, 1.0 + 2 * step_s]
    return {
        "decode": {"1": [times], "2": [times, times]},
        "prefill": {"128": [0.5, 0.25, 0.5]},
        "tokens": {"1": [[first_token, 1, 1]], "2": [[5, 1, 1], [6, 1, 1]]},
        "token_bytes": 10**9,
    }


def test_results_are_rates_shares_of_the_bandwidth_and_agreement() -> None:
    answers = {"teneral bf16": [_answer(0.1, 7)] * 3, hot.BASE: [_answer(0.2, 8)] * 3}
    result = hot.results(answers, 40.0)["teneral bf16"]
    assert result["decode"] == pytest.approx({"1": 10.0, "2": 20.0})
    assert result["prefill"] == pytest.approx({"128": 256.0})
    assert result["bandwidth_share"] == pytest.approx(0.25)
    assert result["first_tokens_agree"] == "2/3"


def test_the_table_has_ratios_to_rivals_of_the_same_precision_only() -> None:
    names = ("teneral bf16", "teneral int8", "llama.cpp BF16", hot.BASE, f"{hot.BASE}, int8")
    answers = {name: [_answer(0.1 * (number + 1), 1)] for number, name in enumerate(names)}
    report = begin("hot", model="a-shape", rounds=1, threads=2, batches=[1, 2], prompts=[128])
    report |= {"variant": "avx2", "batch_prompt_tokens": 64, "answer_tokens": 3, "bandwidth_gb_s": 40.0}
    report |= {"results": hot.results(answers, 40.0), "failed": {"x": "why"}, "left_out": ["y: why"]}
    text = hot.render(report)
    assert "| teneral bf16 / llama.cpp BF16 | 3.00x | 3.00x | 1.00x |" in text
    assert f"| teneral bf16 / {hot.BASE} | 4.00x | 4.00x | 1.00x |" in text
    assert "| teneral bf16 / the best of them | 3.00x | 3.00x | 1.00x |" in text
    assert f"| teneral int8 / {hot.BASE}, int8 | 2.50x | 2.50x | 1.00x |" in text
    assert f"teneral bf16 / {hot.BASE}, int8" not in text
    assert "teneral int8 / llama.cpp" not in text
    assert "failed: x: why" in text
    assert "left out: y: why" in text


def test_a_step_without_a_model_can_be_timed() -> None:
    tokenizer = TextTokenizer.from_files(
        lambda name: path.read_bytes() if (path := MODEL / name).exists() else None
    )
    assert step_s(NoModel(FEW_TOKENS), tokenizer, 2, 3) != 0
