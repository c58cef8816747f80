"""Look-ahead: tokens a second of a real model's answers with proposals and without, alone and eight at once.

    python -m benchmarks.lookahead [--rounds 3] [--batches 1 8] [--only PATTERN] [--save]

The model is SmolLM2-135M-Instruct in bf16 (`real_model.py`). Its answers *repeat* their prompt (a quotation, an edit
of code, a list of facts as JSON by a schema, a call of a function), or are *free*. Two engines of the same weights in
one process, `--look-ahead auto` and `off`, take turns at each answer. Of several answers at once, each has the same
task with a name and a seed of its own. Prompts are found in the KV cache, computed by a round that is not counted.

Both must give the same tokens, or the benchmark ends with an error. Shown are tokens of answers a second, and how many
proposals were accepted. `--rounds 0` leaves answers out. Below is the time of a step by its rows, of one sequence with
300 tokens before, as a share of a step with one row: what proposals cost.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks import real_model
from benchmarks.own_engine import KV_BYTES, TIMEOUT_S, wait_for_pages
from benchmarks.report import begin, finish, new_parser, note, table, title

from teneral.runtime.config import ServeConfig
from teneral.runtime.engine.engine import Engine
from teneral.runtime.grammar.spec import GrammarSpec
from teneral.runtime.instance.instance import Instance
from teneral.runtime.step.batch import SequenceSpan, StepBatch
from teneral.runtime.step.requests import GenerationRequest, SamplingParams
from teneral.runtime.text.tokenizer import TextTokenizer

WAYS: dict[str, int | str] = {"off": 0, "auto": "auto"}
MAX_TOKENS = 160
NUM_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
NUM_STEPS = 15  # of each number of rows
CONTEXT = 300  # tokens before them
REPEATS, FREE = "repeats", "free"

NAMES = ("Verran", "Ostrand", "Kelby", "Maroun", "Tessel", "Lindow", "Farrow", "Quay")
TEXT = (
    "The lighthouse at Cape {name} was built in 1871 by the engineer Ida Holm. Its lamp burned rape oil until 1904, "
    "when an electric arc lamp replaced it. The tower is 41 metres high and has 216 steps. In the storm of January "
    "1926 the keeper, Jonas Weld, kept the lamp burning for three nights although the sea had broken the windows of "
    "the lower rooms. The light was automated in 1988, and since then the keeper's house has been a small museum that "
    "is open from May to September."
)
CODE = '''def total_price(items, discount):
    """Return the price of all items of {name} after the discount."""
    total = 0
    for item in items:
        price = item["price"]
        quantity = item["quantity"]
        total += price * quantity
    if discount > 0:
        total -= total * discount / 100
    return round(total, 2)


def print_receipt(items, discount):
    """Print one line for each item, and the total price."""
    for item in items:
        print(item["name"], item["quantity"], item["price"])
    print("Total:", total_price(items, discount))
'''
ORDER = [
    {"article": article, "seller": seller, "delivery_address": address}
    for article, seller, address in (
        ("brass ship's lantern", "{name} Marine Supplies", "14 Harbour Street, Ostrand"),
        ("oilskin coat, large", "{name} Outfitters and Sons", "3 Chapel Lane, Maroun"),
        ("tide table of 1926", "Lindow Antiquarian Books", "27 Upper Quay, {name}"),
    )
]
ORDER_SCHEMA = {
    "type": "array",
    "minItems": 3,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 60} for name in ORDER[0]},
        "required": list(ORDER[0]),
        "additionalProperties": False,
    },
}
TOOL = {
    "name": "send_message",
    "parameters": {
        "type": "object",
        "properties": {
            "to": {"type": "string", "maxLength": 60},
            "text": {"type": "string", "maxLength": 400},
        },
        "required": ["to", "text"],
        "additionalProperties": False,
    },
}
CALL_SCHEMA = {
    "type": "object",
    "properties": {"name": {"const": TOOL["name"]}, "arguments": TOOL["parameters"]},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


class Task(NamedTuple):
    """The task of an answer. `{name}` in the question differs between answers at once."""

    kind: str
    question: str
    schema: Any = None
    temperature: float = 0.0


TASKS = {
    "a quotation": Task(REPEATS, f"Repeat the following text word for word.\n\n{TEXT}"),
    "an edit of code": Task(
        REPEATS, f"Fix the indentation of this code, and answer with the whole code.\n\n```python\n{CODE}```"
    ),
    "JSON by a schema": Task(
        REPEATS, "Copy this list of orders as JSON.\n\n" + json.dumps(ORDER, indent=1), ORDER_SCHEMA
    ),
    "a call of a function": Task(
        REPEATS,
        f"Call the function {TOOL['name']} to send this text to Jonas Weld, word for word.\n\n{TEXT}\n\n"
        f"Answer with JSON only. The function is {json.dumps(TOOL)}",
        CALL_SCHEMA,
    ),
    "a story": Task(FREE, "Tell me a story about a fox from {name} who wants to learn to swim."),
    "a story, sampled": Task(
        FREE, "Tell me a story about a girl from {name} who finds a map.", temperature=0.8
    ),
    "a letter, sampled": Task(
        FREE, "Write a letter to a friend about a rainy holiday in {name}, in the mountains.", temperature=0.8
    ),
    "an explanation": Task(FREE, "Explain to {name}, who is ten, how a bicycle stays upright."),
}


def main() -> None:
    parser = new_parser(__doc__, rounds=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    model = real_model.prepare(options.work / "smollm2-135m", shuffled=False)
    tasks = {name: task for name, task in TASKS.items() if not options.only or re.search(options.only, name)}
    report = begin("lookahead", model="smollm2-135m", rounds=options.rounds, batches=options.batches)
    if options.batches != parser.get_default("batches"):
        report["variant"] = "-".join(map(str, options.batches)) + "-at-once"
    report["answers"], report["rows_ms"] = measure(model, tasks, options.batches, options.rounds)
    finish(report, render(report), save=options.save)


def measure(
    model: Path, tasks: Mapping[str, Task], batches: Sequence[int], rounds: int
) -> tuple[list[dict[str, Any]], dict[int, float]]:
    """Rows of the table, and milliseconds of a step by its rows."""
    with ExitStack() as stack:
        instances = {
            name: stack.enter_context(
                Instance(ServeConfig(model=str(model), kv_bytes=KV_BYTES, look_ahead=way, max_running=16))
            )
            for name, way in WAYS.items()
        }
        engines = {name: instance.engine.result(TIMEOUT_S) for name, instance in instances.items()}
        for name, instance in instances.items():
            if not instance.wait_exact():
                raise SystemExit(f"{name}: the model could not be loaded: {instance.failure}")
        wait_for_pages()
        tokenizer = instances["off"].tokenizer.result()
        rows_ms = cost_of_rows(engines["off"])
        results = []
        for batch in batches if rounds else ():
            for name, task in tasks.items():
                requests = [request_of(task, tokenizer, number) for number in range(batch)]
                results.append(
                    {"task": name, "kind": task.kind, "batch": batch, **compare(engines, requests, rounds)}
                )
                note(json.dumps(results[-1]))
        return results, rows_ms


def request_of(task: Task, tokenizer: TextTokenizer, number: int) -> GenerationRequest:
    question = task.question.replace("{name}", NAMES[number % len(NAMES)])
    prompt = tokenizer.encode(
        tokenizer.chat([{"role": "user", "content": question}]), add_special_tokens=False
    )
    grammar = None
    if task.schema is not None:
        grammar = tokenizer.compile_grammar(GrammarSpec.json_schema(task.schema))
    sampling = SamplingParams(temperature=task.temperature, seed=number)
    return GenerationRequest(f"{number}", tuple(prompt), MAX_TOKENS, sampling, grammar=grammar)


def compare(
    engines: Mapping[str, Engine], requests: Sequence[GenerationRequest], rounds: int
) -> dict[str, Any]:
    """Medians of the rounds, after one that is not counted."""
    took_s: dict[str, list[float]] = {name: [] for name in engines}
    tokens: dict[str, list[tuple[int, ...]]] = {}
    counts = (0, 0)
    for number in range(rounds + 1):
        for name in list(engines) if number % 2 else list(reversed(engines)):
            before = engines[name].statistics()
            start_s = time.perf_counter()
            generations = [engines[name].submit(request) for request in requests]
            tokens[name] = [generation.result(TIMEOUT_S).tokens for generation in generations]
            if number:
                took_s[name].append(time.perf_counter() - start_s)
            after = engines[name].statistics()
            if name == "auto":
                accepted = after.accepted_look_ahead_total - before.accepted_look_ahead_total
                rejected = after.rejected_look_ahead_total - before.rejected_look_ahead_total
                counts = accepted, accepted + rejected
        if tokens["off"] != tokens["auto"]:
            raise SystemExit("look-ahead changed an answer")
    num_tokens = sum(map(len, tokens["off"]))
    rates = {name: num_tokens / statistics.median(times) for name, times in took_s.items()}
    return {
        "num_tokens": num_tokens,
        "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "gain": round(rates["auto"] / rates["off"], 3),
        "num_accepted": counts[0],
        "num_proposed": counts[1],
        "all_s": {name: [round(each, 3) for each in times] for name, times in took_s.items()},
    }


def cost_of_rows(engine: Engine) -> dict[int, float]:
    """Medians of a forward pass in ms, by the number of its rows, all of one sequence. The engine must be idle."""
    took_s: dict[int, list[float]] = {num: [] for num in NUM_ROWS}
    size = engine.options.block_size
    kv = engine.model.new_kv(-(-(CONTEXT + max(NUM_ROWS)) // size), size)
    for _ in range(NUM_STEPS):
        for num, times in took_s.items():
            positions = np.arange(CONTEXT, CONTEXT + num)
            blocks = tuple(range(-(-(CONTEXT + num) // size)))
            span = SequenceSpan(0, num, CONTEXT + num, blocks)
            batch = StepBatch(positions + 1_000, positions, positions.copy(), (span,), np.arange(num))
            start_s = time.perf_counter()
            engine.model.forward(batch, kv)
            times.append(time.perf_counter() - start_s)
    return {num: round(1e3 * statistics.median(times), 2) for num, times in took_s.items()}


def render(report: dict[str, Any]) -> str:
    """The report as tables for people."""
    columns = [
        "answers",
        "at once",
        "off, tokens/s",
        "auto, tokens/s",
        "gain",
        "accepted of proposed",
        "of tokens",
    ]
    rows = [
        [
            f"{each['kind']}: {each['task']}",
            str(each["batch"]),
            *(f"{each['tokens_per_s'][name]:.1f}" for name in WAYS),
            f"{each['gain']:.2f}x",
            f"{each['num_accepted']} of {each['num_proposed']}",
            str(each["num_tokens"]),
        ]
        for each in report["answers"]
    ]
    means = [
        f"{kind}, {batch} at once: {statistics.geometric_mean(gains):.2f}x"
        for batch in report["batches"]
        for kind in (REPEATS, FREE)
        if (
            gains := [
                row["gain"] for row in report["answers"] if (row["kind"], row["batch"]) == (kind, batch)
            ]
        )
    ]
    costs = {
        int(num): value / report["rows_ms"][next(iter(report["rows_ms"]))]
        for num, value in report["rows_ms"].items()
    }
    shares = table(
        ["rows", *map(str, costs)], [["share of a step", *(f"{share:.2f}" for share in costs.values())]]
    )
    words = [report["model"], "bf16", f"medians of {report['rounds']} rounds, in turns"]
    return "\n".join(
        [title(report, *words), table(columns, rows), "", f"geometric means: {'; '.join(means)}", "", shares]
    )


if __name__ == "__main__":
    main()
