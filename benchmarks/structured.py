"""Structured answers: a schema request's first text in a cold start, the cost of grammars, and their correctness.

    python -m benchmarks.structured [MODEL] [--rates 25,100,400] [--rounds 3] [--answers 2000] [--suite DIR] [--save]

MODEL is an artifact, a model directory or a GGUF file of a real model with a chat template (`make demo-chat`).

*cold*: exec and request → first text, of a schema request and of a free one, over links of several rates, and whether
the whole schema answer is the one of the same server when it is warm. *hot*: the time between tokens of 8 answers at
once, free and under a grammar that allows everything; and tokens/s of schema answers and free ones. *judge*: answers
to random seeds for several schemas, each that ends by itself judged by jsonschema-rs. *suite*: the share of the JSON
Schema Test Suite that compiles, and whether its valid instances are accepted and its invalid ones refused. DIR is one
draft of it, such as `json/tests/draft2020-12` in the source distribution of the package `jsonschema`. *kubernetes*: the
same share of the schemas of Kubernetes' objects in the package `kubernetes-validate`.
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
SCHEMAS: dict[str, Any] = {"person": PERSON, "order": ORDER, "tree": TREE, "email": EMAIL}
MESSAGES = [{"role": "user", "content": "Describe Ada Lovelace as JSON."}]
END = 0  # for --suite: the token that ends an answer
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


def judge(server: Server, num_answers: int) -> dict[str, Any]:
    """Eight at a time, at random temperatures, each with a seed of its own."""
    import jsonschema_rs

    rng = random.Random(0)
    counts = {"answers": 0, "ended": 0, "invalid": 0, "cut_off": 0}
    judges = {
        name: jsonschema_rs.validator_for(schema, validate_formats=True) for name, schema in SCHEMAS.items()
    }
    names = sorted(SCHEMAS)
    while counts["answers"] < num_answers:
        chosen = [rng.choice(names) for _ in range(8)]
        fields = [
            {
                "max_tokens": 96,
                "temperature": rng.choice([0.0, 0.7, 1.0, 1.5]),
                "seed": rng.randrange(1 << 31),
                "response_format": schema_format(SCHEMAS[name]),
            }
            for name in chosen
        ]
        answers: list[tuple[str, Streamed]] = []
        threads = [
            threading.Thread(target=lambda n=name, f=field, to=answers: to.append((n, chat(server, **f))))
            for name, field in zip(chosen, fields, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not answers:
            raise SystemExit("the model refuses chats; it needs a chat template")
        for name, answer in answers:
            counts["answers"] += 1
            if answer.finish_reason != "stop":
                counts["cut_off"] += 1
                continue
            counts["ended"] += 1
            try:
                judges[name].validate(json.loads(answer.text))
            except ValueError as error:
                counts["invalid"] += 1
                note(f"{name}: {answer.text!r}: {error}")
    return counts


def suite(folder: Path, tokenizer_json: Path) -> dict[str, Any]:
    """Each schema of the suite by itself. Instances are compact JSON with properties in the order of the schema where
    it names them: Teneral promises that order, and no other.
    """
    import tokenizers

    from teneral.runtime.errors import RequestError
    from teneral.runtime.grammar.compiler import GrammarCompiler
    from teneral.runtime.grammar.spec import GrammarSpec

    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    compiler = GrammarCompiler(tokenizer_json.read_bytes, [END])
    counts = dict.fromkeys(
        ("schemas", "compiled", "right", "valid", "valid_refused", "invalid", "invalid_accepted"), 0
    )
    refused: dict[str, int] = {}
    for file in sorted(folder.glob("*.json")):
        for case in json.loads(file.read_bytes()):
            counts["schemas"] += 1
            try:
                grammar = compiler.compile(GrammarSpec.json_schema(case["schema"], param="schema"))
            except RequestError:
                refused[file.stem] = refused.get(file.stem, 0) + 1
                continue
            counts["compiled"] += 1
            wrong = 0
            for test in case["tests"]:
                text = json.dumps(
                    _in_order(test["data"], case["schema"]), ensure_ascii=False, separators=(",", ":")
                )
                accepted = _accepts(grammar, tokenizer.encode(text, add_special_tokens=False).ids)
                kind = "valid" if test["valid"] else "invalid"
                counts[kind] += 1
                if accepted != test["valid"]:
                    wrong += 1
                    counts["valid_refused" if test["valid"] else "invalid_accepted"] += 1
                    note(f"{file.stem}: {case['description']}: {test['description']}: {text}")
            counts["right"] += not wrong
    return {
        "draft": folder.name,
        **counts,
        "compiled_share": round(counts["compiled"] / max(1, counts["schemas"]), 3),
        "right_share": round(counts["right"] / max(1, counts["schemas"]), 3),
        "refused": refused,
    }


def kubernetes(tokenizer_json: Path) -> dict[str, Any]:
    """The newest version's objects, each with the definitions that it refers to, without descriptions."""
    import kubernetes_validate

    from teneral.runtime.errors import RequestError
    from teneral.runtime.grammar.compiler import GrammarCompiler
    from teneral.runtime.grammar.spec import GrammarSpec

    package = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    folder = max(
        package.glob("v*-local-strict"),
        key=lambda path: [int(n) for n in path.name[1:].split("-")[0].split(".")],
    )
    definitions = json.loads((folder / "_definitions.json").read_bytes())["$defs"]
    compiler = GrammarCompiler(tokenizer_json.read_bytes, [END])
    counts = {"schemas": 0, "compiled": 0}
    for file in sorted(folder.glob("*.json")):
        if file.name in ("_definitions.json", "all.json"):
            continue
        needed: dict[str, Any] = {}
        schema = _local(json.loads(file.read_bytes()), definitions, needed)
        schema.pop("$id", None)
        counts["schemas"] += 1
        try:
            compiler.compile(GrammarSpec.json_schema({**schema, "$defs": needed}, param="schema"))
            counts["compiled"] += 1
        except RequestError as error:
            note(f"{file.name}: {error}")
    return {
        "version": folder.name,
        **counts,
        "compiled_share": round(counts["compiled"] / counts["schemas"], 3),
    }


def _local(schema: Any, definitions: dict[str, Any], needed: dict[str, Any]) -> Any:
    """The schema with references into itself; `needed` gets the definitions that they lead to."""
    if isinstance(schema, list):
        return [_local(each, definitions, needed) for each in schema]
    if not isinstance(schema, dict):
        return schema
    local = {}
    for key, value in schema.items():
        if key == "description" and isinstance(value, str):
            continue
        if key == "$ref" and isinstance(value, str):
            name = value.rpartition("/")[2]
            local[key] = f"#/$defs/{name}"
            if name not in needed:
                needed[name] = None
                needed[name] = _local(definitions[name], definitions, needed)
        else:
            local[key] = _local(value, definitions, needed)
    return local


def _in_order(data: Any, schema: Any) -> Any:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(data, dict) or not isinstance(properties, dict):
        return data
    return {name: data[name] for name in (*(n for n in properties if n in data), *data)}


def _accepts(grammar: Any, tokens: Sequence[int]) -> bool:
    """Every token follows, and the end of the answer is allowed then."""
    import numpy as np

    from teneral.runtime.errors import GrammarError

    matcher = grammar.start()
    try:
        for token in tokens:
            matcher.accept(token)
    except GrammarError:
        return False
    if matcher.is_finished:
        return True
    words = np.zeros(matcher.num_mask_words, np.uint32)
    matcher.mask_into(words)
    return bool(words[END // 32] >> (END % 32) & 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", default=Path("demo/model"))
    parser.add_argument("--rates", default="25,100,400", help="MB/s (10**6 bytes), comma-separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--only", choices=("cold", "hot", "judge", "suite", "kubernetes"))
    parser.add_argument(
        "--suite", type=Path, metavar="DIR", help="a draft's folder of the JSON Schema Test Suite"
    )
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
                results["judge"] = judge(server, options.answers)
                note(json.dumps(results["judge"]))
    if options.suite is not None and options.only in (None, "suite"):
        results["suite"] = suite(options.suite, options.tokenizer)
    if options.only in (None, "kubernetes"):
        results["kubernetes"] = kubernetes(options.tokenizer)
    rendered = [
        f"{name}: {json.dumps(results[name])}"
        for name in ("hot", "judge", "suite", "kubernetes")
        if name in results
    ]
    rendered += [f"cold: {json.dumps(row)}" for row in results.get("cold", ())]
    finish(results, "\n".join([title(results, "structured answers"), *rendered]), save=options.save)


if __name__ == "__main__":
    main()
