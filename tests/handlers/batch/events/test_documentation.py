"""The events that docs/batch.md shows do as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

from teneral.cli_report import exit_code
from teneral.handlers.batch.command import EXIT_INCOMPLETE, EXIT_TERMINATED
from teneral.handlers.batch.events import parse
from teneral.handlers.batch.events.outputs import Outputs
from teneral.handlers.batch.events.parse import (
    _JOB_KEYS,
    AwaitedCall,
    Job,
    JobFailedError,
    JobRetryError,
    parse_event,
)

PAGE = (Path(__file__).parents[4] / "docs" / "batch.md").read_text(encoding="utf-8")
JSON_BLOCKS = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]


def test_every_template_is_one_that_is_taken() -> None:
    shown = re.findall(r"s3://[\w{}/.-]*\{\w+\}[\w{}/.-]*", PAGE)
    assert len(shown) >= 4
    for template in shown:
        assert Outputs.of(template, None) if "{key}" in template else Outputs.of(None, template)


def test_the_state_machine_names_the_errors_and_sends_a_job() -> None:
    (machine,) = [block for block in JSON_BLOCKS if "Answer" in block]
    state = machine["Answer"]
    named = {name for rule in (*state["Retry"], *state["Catch"]) for name in rule["ErrorEquals"]}
    assert {name for name in vars(parse) if re.fullmatch(r"(Job|Event)\w*Error", name)} <= named
    payload = {key.removesuffix(".$"): "s3://bucket/a.jsonl" for key in state["Parameters"]["Payload"]}
    found = parse_event(payload)
    assert isinstance(found, AwaitedCall)
    assert isinstance(found.asked, Job)


def test_the_job_definition_retries_the_codes_that_are_worth_it() -> None:
    (definition,) = [block for block in JSON_BLOCKS if "retryStrategy" in block]
    rules = definition["retryStrategy"]["evaluateOnExit"]
    assert len(rules) <= 5  # more are not taken
    retried = {
        int(rule["onExitCode"]) for rule in rules if rule["action"] == "RETRY" and "onExitCode" in rule
    }
    assert {EXIT_INCOMPLETE, EXIT_TERMINATED, exit_code(JobRetryError("x"))} <= retried
    assert exit_code(JobFailedError("x")) not in retried
    assert rules[-1] == {"onReason": "*", "action": "EXIT"}


def test_all_fields_of_a_job_by_name_are_there() -> None:
    assert all(f"`{name}`" in PAGE or f'"{name}"' in PAGE for name in _JOB_KEYS)
