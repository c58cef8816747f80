"""Structured answers: a schema request's first text in a cold start, the cost of grammars, and their correctness.

    python -m benchmarks.structured [MODEL] [--rates 25,100,400] [--rounds 3] [--answers 2000] [--resume] [--suite DIR]
                                   [--only PART] [--save]

MODEL is an artifact, a model directory or a GGUF file of a real model with a chat template (`make demo-chat`).

*cold*: exec and request → first text, of a schema request and of a free one, over links of several rates, and whether
the whole schema answer is the one of the same server when it is warm. *hot*: the time between tokens of 8 answers at
once, free and under a grammar that allows everything; and tokens/s of schema answers and free ones. *judge*: answers
to random seeds for several schemas, each that ends by itself judged by jsonschema-rs; `--resume` goes on with a run
that was cut off. *suite*: the share of the JSON Schema Test Suite that compiles, and whether its valid instances are
accepted and its invalid ones refused. DIR is one draft of it, such as `json/tests/draft2020-12` in the source
distribution of the package `jsonschema`. *kubernetes*: the same share of the schemas of Kubernetes' objects in the
package `kubernetes-validate`; *folder*: of the schemas in the files of `--schemas DIR`, such as those of AWS's
resources in the package `cfn-lint`.
"""

from __future__ import annotations

import argparse
import http
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import begin, finish, note, title
from benchmarks.schema_sets import folder, kubernetes, suite
from benchmarks.server import Server
from benchmarks.store import StoreProcess, prepare_own

WORK = Path(".bench")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "occupation": {"enum": ["engineer", "mathematician", "writer", "physician"]},
        "born_in_the_year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "is_known_for_the_first_program": {"type": "boolean"},
    },
    "required": ["name", "occupation", "born_in_the_year", "is_known_for_the_first_program"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
                    "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["sku", "quantity"],
                "additionalProperties": False,
            },
        },
        "date": {"type": "string", "format": "date"},
        "note": {"anyOf": [{"type": "string", "maxLength": 12}, {"type": "null"}]},
    },
    "required": ["items", "date", "note"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number", "minimum": 0, "maximum": 10},
                "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
            },
            "required": ["value", "left"],
            "additionalProperties": False,
        },
        "leaf": {"type": "object", "properties": {"value": {"const": 1}}, "required": ["value"],
                 "additionalProperties": False},
    },
    "$ref": "#/$defs/node",
}  # fmt: skip
EMAIL = {
    "type": "array",
    "minItems": 1,
    "maxItems": 2,
    "items": {"type": "string", "format": "email", "maxLength": 24},
}
# Keywords that are rewritten for the grammar library.
SHIPMENT = {
    "type": "object",
    "properties": {
        "by": {"enum": ["ship", "air"]},
        "port": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["cold", "heavy", "fragile"]}, "uniqueItems": True},
        "weight": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    },
    "required": ["by", "tags", "weight"],
    "if": {"properties": {"by": {"const": "ship"}}},
    "then": {"required": ["port"]},
    "else": {"properties": {"port": False}},
    "additionalProperties": False,
}
SHAPE = {
    "type": "object",
    "properties": {"kind": {"enum": ["circle", "square"]}},
    "required": ["kind"],
    "oneOf": [
        {
            "properties": {
                "kind": {"const": "circle"},
                "radius": {"type": "integer", "minimum": 1, "maximum": 9},
            }
        },
        {
            "properties": {
                "kind": {"const": "square"},
                "side": {"type": "integer", "minimum": 1, "maximum": 9},
            }
        },
    ],
    "minProperties": 1,
    "unevaluatedProperties": False,
}
MIXED = {
    "type": "array",
    "items": {"type": ["integer", "string", "null"], "maxLength": 8, "minimum": 0, "maximum": 99},
    "contains": {"type": "string", "not": {"enum": ["", "a"]}},
    "maxItems": 4,
}
LABELS = {
    "type": "array",
    "items": {"type": "string", "maxLength": 6},
    "uniqueItems": True,
    "minItems": 2,
    "maxItems": 4,
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON, "order": ORDER, "tree": TREE, "email": EMAIL,
    "shipment": SHIPMENT, "shape": SHAPE, "mixed": MIXED, "labels": LABELS,
}  # fmt: skip
AT_ONCE = 8  # answers
MESSAGES = [{"role": "user", "content": "Describe Ada Lovelace as JSON."}]
ANYTHING = "(.|\\n)*"


@dataclass
class Streamed:
    """One streamed chat: moments are seconds from the request."""

    text: str
    times_s: list[float]  # of the chunks that had text
    num_tokens: int
    finish_reason: str

    @property
    def seconds(self) -> float:
        return self.times_s[-1]


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def chat(server: Server, **fields: Any) -> Streamed:
    """One streamed answer over a connection of its own."""
    body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, **fields}
    connection = server.connect()
    start_s = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != http.HTTPStatus.OK:
        raise SystemExit(f"{response.status} {response.read(500)!r}")
    text, times_s, num_tokens, reason = "", [], 0, ""
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if chunk.get("usage"):
            num_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            reason = choice["finish_reason"] or reason
            if piece := choice["delta"].get("content"):
                text += piece
                times_s.append(time.monotonic() - start_s)
    connection.close()
    return Streamed(text, times_s or [time.monotonic() - start_s], num_tokens, reason)


def cold(model: Path, rates: Sequence[float], rounds: int) -> list[dict[str, Any]]:
    rows = []
    prepare_own(model, WORK / "structured")
    for rate in rates:
        with StoreProcess(WORK / "structured", rate_mb_s=rate) as store:
            for kind in ("schema", "free"):
                samples = [_cold_start(store, kind) for _ in range(rounds)]
                row = {
                    "rate_mb_s": rate,
                    "kind": kind,
                    "request_to_first_text_s": statistics.median(each[0] for each in samples),
                    "exec_to_first_text_s": statistics.median(each[1] for each in samples),
                    "request_to_last_text_s": statistics.median(each[2] for each in samples),
                    "as_warm": all(each[3] for each in samples),
                }
                rows.append(row)
                note(f"{rate:6.0f} MB/s {kind:7} " + json.dumps(row))
    return rows


def _cold_start(store: StoreProcess, kind: str) -> tuple[float, float, float, bool]:
    fields: dict[str, Any] = {"max_tokens": 100, "temperature": 0}
    if kind == "schema":
        fields["response_format"] = schema_format(PERSON)
    with Server("s3://models/packed", variables=store.environment()) as server:
        server.connect().close()
        asked_s = time.monotonic() - server.started_s
        first = chat(server, **fields)
        server.wait_ready()
        warm = chat(server, **fields)
        return first.times_s[0], asked_s + first.times_s[0], first.seconds, first.text == warm.text


def together(server: Server, num: int, make: Callable[[int], dict[str, Any]]) -> tuple[list[Streamed], float]:
    """`num_answers` answers at once, and how long all of them took."""
    results: list[Streamed] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(chat(server, **make(n)))) for n in range(num)
    ]
    start_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, time.monotonic() - start_s


def hot(server: Server, rounds: int) -> dict[str, Any]:
    """In turns, after one of each."""
    free = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
    ways: dict[str, Callable[[int], dict[str, Any]]] = {
        "free": lambda n: {**free, "seed": n},
        "masked": lambda n: {**free, "seed": n, "regex": ANYTHING},
    }
    gaps: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, make in ways.items():
            answers, _ = together(server, 8, make)
            if number:
                gaps[name] += [
                    after - before
                    for answer in answers
                    for before, after in zip(answer.times_s[8:-8], answer.times_s[9:-7], strict=True)
                ]
    speeds: dict[str, list[float]] = {"schema": [], "free": []}
    for number in range(rounds + 1):
        for name, values in speeds.items():
            fields = {"max_tokens": 60, "temperature": 0}
            fields |= {"response_format": schema_format(PERSON)} if name == "schema" else {"ignore_eos": True}
            answer = chat(server, **fields)
            if number:
                values.append(answer.num_tokens / answer.seconds)
    step = {name: statistics.median(values) for name, values in gaps.items()}
    rate = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "step_ms_at_8": {name: round(1e3 * value, 3) for name, value in step.items()},
        "masked_over_free": round(step["masked"] / step["free"], 4),
        "tokens_per_s": {name: round(value, 1) for name, value in rate.items()},
        "schema_over_free": round(rate["schema"] / rate["free"], 3),
    }


def judge(server: Server, num_answers: int, answers_file: Path) -> dict[str, Any]:
    """`AT_ONCE` at a time, at random temperatures, each with a seed of its own. Answers that `answers_file` has from a
    run before count, and are not made again.
    """
    import jsonschema_rs

    rng = random.Random(0)
    names = sorted(SCHEMAS)
    asked = [
        {
            "schema": rng.choice(names),
            "temperature": rng.choice([0.0, 0.7, 1.0, 1.5]),
            "seed": rng.randrange(1 << 31),
        }
        for _ in range(num_answers)
    ]
    done: dict[int, dict[str, Any]] = {}
    if answers_file.exists():
        rows = map(json.loads, answers_file.read_text().splitlines())
        done = {
            row["number"]: row for row in rows if asked[row["number"] : row["number"] + 1] == [row["asked"]]
        }
    numbers = iter([number for number in range(num_answers) if number not in done])
    failures: list[BaseException] = []
    lock = threading.Lock()
    with answers_file.open("a") as file:

        def work() -> None:
            while not failures:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                what = asked[number]
                fields = {key: what[key] for key in ("temperature", "seed")}
                form = schema_format(SCHEMAS[what["schema"]])
                try:
                    answer = chat(server, max_tokens=96, response_format=form, **fields)
                except BaseException as error:
                    failures.append(error)
                    return
                row = {"number": number, "asked": what, "text": answer.text, "reason": answer.finish_reason}
                with lock:
                    done[number] = row
                    file.write(json.dumps(row) + "\n")
                    file.flush()

        threads = [threading.Thread(target=work) for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    counts = {"answers": 0, "ended": 0, "invalid": 0, "cut_off": 0}
    judges = {
        name: jsonschema_rs.validator_for(schema, validate_formats=True) for name, schema in SCHEMAS.items()
    }
    for row in done.values():
        counts["answers"] += 1
        if row["reason"] != "stop":
            counts["cut_off"] += 1
            continue
        counts["ended"] += 1
        try:
            judges[row["asked"]["schema"]].validate(json.loads(row["text"]))
        except ValueError as error:
            counts["invalid"] += 1
            note(f"{row['asked']['schema']}: {row['text']!r}: {error}")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", default=Path("demo/model"))
    parser.add_argument("--rates", default="25,100,400", help="MB/s (10**6 bytes), comma-separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument(
        "--resume", action="store_true", help="go on with the answers of a run that was cut off"
    )
    parser.add_argument("--only", choices=("cold", "hot", "judge", "suite", "kubernetes", "folder"))
    parser.add_argument(
        "--suite", type=Path, metavar="DIR", help="a draft's folder of the JSON Schema Test Suite"
    )
    parser.add_argument("--schemas", type=Path, metavar="DIR", help="a folder of JSON schemas")
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("demo/model/tokenizer.json"), help="for --suite"
    )
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = begin("structured", model=options.model.stem)
    if options.only in (None, "cold"):
        results["cold"] = cold(
            options.model, [float(rate) for rate in options.rates.split(",")], options.rounds
        )
    if options.only in (None, "hot", "judge"):
        with Server(str(options.model)) as server:
            server.wait_ready()
            if options.only in (None, "hot"):
                results["hot"] = hot(server, options.rounds)
                note(json.dumps(results["hot"]))
            if options.only in (None, "judge"):
                answers_file = WORK / f"structured-answers-{options.model.stem}.jsonl"
                if not options.resume:
                    answers_file.unlink(missing_ok=True)
                results["judge"] = judge(server, options.answers, answers_file)
                note(json.dumps(results["judge"]))
    if options.suite is not None and options.only in (None, "suite"):
        results["suite"] = suite(options.suite, options.tokenizer)
    if options.only in (None, "kubernetes"):
        results["kubernetes"] = kubernetes(options.tokenizer)
    if options.schemas is not None and options.only in (None, "folder"):
        results["folder"] = folder(options.schemas, options.tokenizer)
    rendered = [
        f"{name}: {json.dumps(results[name])}"
        for name in ("hot", "judge", "suite", "kubernetes", "folder")
        if name in results
    ]
    rendered += [f"cold: {json.dumps(row)}" for row in results.get("cold", ())]
    finish(results, "\n".join([title(results, "structured answers"), *rendered]), save=options.save)


if __name__ == "__main__":
    main()
