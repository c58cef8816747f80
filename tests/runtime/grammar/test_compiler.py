"""Grammars over a vocabulary: what they allow, what they force, and what hostile ones cost."""

from __future__ import annotations

import calendar
import json
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from tests.support.inspection import text_backend_of
from tests.support.instances import TinyParts
from tests.support.load import patience_s

from teneral.runtime.errors import GrammarError, RequestError
from teneral.runtime.grammar.compiler import GrammarCompiler
from teneral.runtime.grammar.json_schema.scalars import FORMATS
from teneral.runtime.grammar.matcher import Matcher
from teneral.runtime.grammar.spec import MAX_GRAMMAR_CHARS, MAX_SCHEMA_BYTES, GrammarSpec

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def allowed_tokens(matcher: Matcher) -> set[int]:
    words = np.zeros(matcher.num_mask_words, dtype=np.uint32)
    matcher.mask_into(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_a_schema_forces_the_beginning_as_the_tokenizer_spells_it(
    parts: TinyParts, compiler: GrammarCompiler
) -> None:
    forced = compiler.compile(GrammarSpec.json_schema(PERSON)).start().forced()
    text = parts.tokenizer.decode(forced)
    assert '{"name":"'.startswith(text)
    assert text
    whole = parts.tokenizer.encode('{"name":"x"', add_special_tokens=False)
    assert whole[: len(forced)] == forced


def test_a_choice_is_forced_where_its_texts_part(parts: TinyParts, compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(GrammarSpec.choice(["only this"])).start()
    for token in (tokens := matcher.forced()):
        matcher.accept(token)
    rest = matcher.forced() if not matcher.is_finished else []
    assert parts.tokenizer.decode([*tokens, *rest]) == "only this"


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.choice(["a <|user|> b"]),
        GrammarSpec.choice(["<|user|>", "<|user|>s"]),
        GrammarSpec.regex(r"a <\|user\|> b"),
        GrammarSpec.json_schema({"const": "a<|user|>"}),
        GrammarSpec.composed('start: marker_0 "a <|user|> b"', markers=("<|assistant|>",)),
    ],
    ids=["choice", "choices", "regex", "schema", "markers"],
)
def test_the_text_of_an_added_token_is_written_in_characters(
    parts: TinyParts, compiler: GrammarCompiler, spec: GrammarSpec
) -> None:
    (added,) = parts.tokenizer.encode("<|user|>", add_special_tokens=False)
    matcher = compiler.compile(spec).start()
    tokens: list[int] = []
    while not matcher.is_finished and parts.tokenizer.eos_token_ids.isdisjoint(allowed_tokens(matcher)):
        copy = matcher.copy()
        following = matcher.forced() or [min(allowed_tokens(matcher))]
        for token in following:
            matcher.accept(token)
            copy.accept(token)
        tokens += following
    assert "<|user|>" in parts.tokenizer.decode(tokens)
    assert added not in tokens


def test_a_mask_allows_the_end_only_where_the_answer_may_end(
    parts: TinyParts, compiler: GrammarCompiler
) -> None:
    (eos, *_) = parts.tokenizer.eos_token_ids
    matcher = compiler.compile(GrammarSpec.regex("[0-9]+")).start()
    digit = parts.tokenizer.encode("7", add_special_tokens=False)[-1]
    assert eos not in allowed_tokens(matcher)
    assert digit in allowed_tokens(matcher)
    matcher.accept(digit)
    assert eos in allowed_tokens(matcher)
    matcher.accept(eos)
    assert matcher.is_finished


def test_copies_go_their_own_ways(parts: TinyParts, compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(GrammarSpec.regex("ab|cd")).start()
    first = next(iter(allowed_tokens(matcher)))
    other = matcher.copy()
    before = allowed_tokens(other)
    matcher.accept(first)
    assert allowed_tokens(other) == before


def test_a_token_that_does_not_follow_is_an_error(parts: TinyParts, compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(GrammarSpec.regex("[0-9]+")).start()
    (letter, *_) = parts.tokenizer.encode("x", add_special_tokens=False)
    with pytest.raises(GrammarError):
        matcher.accept(letter)


def test_equal_grammars_are_compiled_once(compiler: GrammarCompiler) -> None:
    assert compiler.compile(GrammarSpec.regex("a+b")) is compiler.compile(GrammarSpec.regex("a+b"))
    assert compiler.compile(GrammarSpec.regex("a+b")) is not compiler.compile(GrammarSpec.regex("a+c"))


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= "yes" | "no"', "no"),
        ('start: "yes" | "no"', "yes"),
    ],
)
def test_both_notations_of_grammars_are_read(
    parts: TinyParts, compiler: GrammarCompiler, grammar: str, text: str
) -> None:
    matcher = compiler.compile(GrammarSpec.grammar(grammar)).start()
    for token in parts.tokenizer.encode(text, add_special_tokens=False):
        assert token in allowed_tokens(matcher)
        matcher.accept(token)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GrammarSpec.json_schema({"type": "strnig"}, param="p"),
        lambda: GrammarSpec.json_schema({"type": "string", "not": {"pattern": "x"}}, param="p"),
        lambda: GrammarSpec.json_schema({"$ref": "#/missing"}, param="p"),
        lambda: GrammarSpec.regex("(", param="p"),
        lambda: GrammarSpec.grammar("start: missing_rule", param="p"),
        lambda: GrammarSpec.grammar("root ::= (", param="p"),
        lambda: GrammarSpec.grammar("root ::= missing", param="p"),
        lambda: GrammarSpec.grammar('other ::= "a"', param="p"),
        lambda: GrammarSpec.grammar('root ::= "a" ::= {.\\', param="p"),
        lambda: GrammarSpec.json_schema("{", param="p"),
        lambda: GrammarSpec.json_schema('"text"', param="p"),
        lambda: GrammarSpec.choice([], param="p"),
        lambda: GrammarSpec.choice([""], param="p"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(compiler: GrammarCompiler, make: Any) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(make())
    assert caught.value.param == "p"
    assert caught.value.message.startswith("p ")


def test_the_reason_why_a_regular_expression_is_refused_is_in_the_message(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="unclosed group"):
        compiler.compile(GrammarSpec.regex("a(b"))
    with pytest.raises(GrammarError, match="'missing' not found"):
        compiler.compile(GrammarSpec.grammar("root ::= missing"))


NESTED: Any = {"type": "string"}
for _ in range(400):
    NESTED = {"type": "array", "items": NESTED}


@pytest.mark.parametrize(
    "make",
    [
        lambda: GrammarSpec.regex("(a{1000}){1000}"),
        lambda: GrammarSpec.regex("((a|b|[c-f]{9}){90}){90}"),
        lambda: GrammarSpec.regex("a" * 100_000),
        lambda: GrammarSpec.json_schema({"type": "string", "pattern": "(a{999}b){999}"}),
        lambda: GrammarSpec.json_schema({"patternProperties": {"(a{999}b){999}": True}}),
        lambda: GrammarSpec.json_schema({"enum": ["x" * MAX_SCHEMA_BYTES]}),
        lambda: GrammarSpec.grammar("start: A{500}\nA: B{500}\nB: /x/"),
        lambda: GrammarSpec.grammar('start: "a"' + " " * MAX_GRAMMAR_CHARS),
        lambda: GrammarSpec.choice(["a" * 100] * 2_000),
        lambda: GrammarSpec.regex("\ud800"),
    ],
)
def test_too_large_grammars_are_refused_before_any_work(make: Any) -> None:
    with pytest.raises(RequestError):
        make()


def test_hostile_grammars_neither_end_the_process_nor_take_its_memory(
    tmp_path: Any, parts: TinyParts
) -> None:
    """In a process of its own, whose address space is bounded: the worst that the bounds let through."""
    (tmp_path / "tokenizer.json").write_bytes(text_backend_of(parts.tokenizer).tokenizer_json())
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, str(tmp_path / "tokenizer.json")],
        check=False, capture_output=True, text=True, timeout=patience_s(100),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tried"] == 11
    assert report["grown_mb"] < 400


HOSTILE = r"""
import json, resource, sys, threading
import jsonschema_rs
import numpy as np
from teneral.runtime.errors import RequestError
from teneral.runtime.grammar.compiler import GrammarCompiler
from teneral.runtime.grammar.spec import GrammarSpec

data = open(sys.argv[1], "rb").read()
compiler = GrammarCompiler(lambda: data, {0})
compiler.compile(GrammarSpec.regex("a"))
begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
nested = {"type": "string"}
for _ in range(60):
    nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
refs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1800)} | {"d1800": {"type": "string"}}
hostile = [
    lambda: GrammarSpec.regex(".*a.{40}"),
    lambda: GrammarSpec.regex(r"(.*a.{20}b|.*c.{19}d).*"),
    lambda: GrammarSpec.regex(r"(\p{L}{1,40}\d){1,40}"),
    lambda: GrammarSpec.regex("(" * 240 + "a" + ")" * 240),
    lambda: GrammarSpec.regex("|".join("a" * i + "b" for i in range(80))),
    lambda: GrammarSpec.grammar("start: r0\n" + "\n".join(f'r{i}: r{i + 1} "a"' for i in range(900)) + '\nr900: "b"'),
    lambda: GrammarSpec.grammar('start: a\na: a a | "x" | "xx" | a a a'),
    lambda: GrammarSpec.json_schema({"$ref": "#/$defs/d0", "$defs": refs}),
    lambda: GrammarSpec.json_schema(nested),
    lambda: GrammarSpec.json_schema({"properties": {f"p{i}": {"type": "string"} for i in range(1500)}}),
    lambda: GrammarSpec.json_schema({"allOf": [{"anyOf": [{"properties": {f"a{i}_{j}": True}} for j in range(6)]}
                                              for i in range(6)]}),
]
tried = 0
def work():
    global tried
    for make in hostile:
        tried += 1
        try:
            matcher = compiler.compile(make()).start()
            words = np.zeros(matcher.num_mask_words, dtype=np.uint32)
            for step in range(40):
                matcher.mask_into(words)
                tokens = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
                if matcher.is_finished or not len(tokens):
                    break
                matcher.accept(int(tokens[step % len(tokens)]))
        except RequestError:
            pass
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(json.dumps({"tried": tried, "grown_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun) / 1024}))
"""


def accepts(parts: TinyParts, compiler: GrammarCompiler, schema: Any, text: str) -> bool:
    """True if the whole text is an answer of this schema."""
    (eos, *_) = parts.tokenizer.eos_token_ids
    matcher = compiler.compile(GrammarSpec.json_schema(schema)).start()
    try:
        for token in parts.tokenizer.encode(text, add_special_tokens=False):
            matcher.accept(token)
    except GrammarError:
        return False
    return matcher.is_finished or eos in allowed_tokens(matcher)


@pytest.mark.parametrize(("text", "fulfils"), [('"a"', True), ("7", True), ("null", False), ("true", False)])
def test_one_of_overlapping_types_allows_what_is_of_one_alone(
    parts: TinyParts, compiler: GrammarCompiler, text: str, fulfils: bool
) -> None:
    schema = {
        "oneOf": [{"type": ["string", "null"]}, {"type": ["integer", "null"], "description": "a number"}]
    }
    assert accepts(parts, compiler, schema, text) is fulfils


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "null"}, {"type": ["null"]}]},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string"}]},
    ],
)
def test_alternatives_that_cannot_be_kept_apart_are_refused(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(GrammarSpec.json_schema(schema))


def test_a_schema_within_data_is_data(parts: TinyParts, compiler: GrammarCompiler) -> None:
    data = {"oneOf": [{"type": ["string", "null"]}, {"type": ["integer", "null"]}], "format": "byte"}
    assert accepts(parts, compiler, {"const": data}, json.dumps(data, separators=(",", ":")))


@pytest.mark.parametrize(
    ("text", "fulfils"), [('"QUI="', True), ('""', True), ('"QUI"', False), ('"a b="', False)]
)
def test_the_format_byte_is_base64(
    parts: TinyParts, compiler: GrammarCompiler, text: str, fulfils: bool
) -> None:
    assert accepts(parts, compiler, {"type": "string", "format": "byte"}, text) is fulfils


@pytest.mark.parametrize(
    ("kind", "text", "fulfils"),
    [
        ("date", "2024-02-29", True),
        ("date", "2000-02-29", True),
        ("date", "2801-02-29", False),
        ("date", "1900-02-29", False),
        ("date", "2024-04-31", False),
        ("date", "2024-13-01", False),
        ("date-time", "2024-02-29T23:59:59Z", True),
        ("date-time", "2024-12-31T00:00:00.125+05:30", True),
        ("date-time", "2023-02-29T00:00:00Z", False),
        ("date-time", "2024-01-01T24:00:00Z", False),
    ],
)
def test_dates_are_those_of_the_calendar(
    parts: TinyParts, compiler: GrammarCompiler, kind: str, text: str, fulfils: bool
) -> None:
    assert accepts(parts, compiler, {"type": "string", "format": kind}, f'"{text}"') is fulfils


def test_a_day_is_a_date_where_the_calendar_has_it() -> None:
    pattern = re.compile(FORMATS["date"])
    for year in (1600, 1700, 1896, 1900, 1999, 2000, 2023, 2024, 2100):
        for month in range(1, 13):
            for day in range(1, 32):
                is_date = day <= calendar.monthrange(year, month)[1]
                assert bool(pattern.match(f"{year}-{month:02}-{day:02}")) is is_date
