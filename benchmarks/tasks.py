"""Programs that read a task and print an answer, both as JSON, each run in a process of its own; and runs of them in
turns.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.processes import RunError, environment
from benchmarks.report import note

RUN_TIMEOUT_S = 600.0
# Below may be special tokens; above, no shape that `teneral synth` knows has any but for a vocabulary of text.
TEXT_TOKENS = range(1_000, 30_000)


def run_task(
    command: Sequence[str], task: Mapping[str, Any], *, timeout_s: float = RUN_TIMEOUT_S
) -> dict[str, Any]:
    """The answer: the last line of what the program prints. Raises `RunError`."""
    try:
        done = subprocess.run(
            command,
            input=json.dumps(task),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"not done after {timeout_s:g} s") from error
    if done.returncode:
        raise RunError(f"ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@dataclass
class TaskTurns:
    """Programs by name, which take turns. One that fails is left out from then on, with its reason."""

    commands: Mapping[str, Sequence[str]]
    failed: dict[str, str] = field(default_factory=dict)

    def run(self, rounds: int, tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """The answers of each; `tasks` are by the names of the programs."""
        answers: dict[str, list[dict[str, Any]]] = {name: [] for name in self.commands}
        for number in range(rounds):
            for name, command in self.commands.items():
                if name in self.failed:
                    continue
                try:
                    answers[name].append(run_task(command, tasks[name]))
                    note(f"round {number + 1}: {name}")
                except RunError as error:
                    self.failed[name] = str(error)
                    note(f"{name} failed, and is left out: {error}")
        return {name: rows for name, rows in answers.items() if rows and name not in self.failed}


def random_prompt(chance: random.Random, num_tokens: int) -> list[int]:
    """Tokens that no cache holds, and that need no tokenizer."""
    return chance.choices(TEXT_TOKENS, k=num_tokens)


def decode_rate(times_s: Sequence[Sequence[float]]) -> float:
    """Tokens a second of all sequences together, while all of them decode: from when the last has its first token until
    the first has its last. `times_s` says when each token of each sequence came. Raises ValueError if they never do.
    """
    start_s = max(times[0] for times in times_s)
    end_s = min(times[-1] for times in times_s)
    num_tokens = sum(start_s < time_s <= end_s for times in times_s for time_s in times)
    if end_s <= start_s or not num_tokens:
        raise ValueError("the sequences never decoded side by side")
    return num_tokens / (end_s - start_s)


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}
