"""Grammars of answers with calls: what they allow, over a vocabulary with and without the families' special tokens."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema_rs
import pytest
from tests.support.grammar_vocabulary import Vocabulary

from teneral.handlers.openai.deltas import FAMILIES, Answer, Finish
from teneral.handlers.openai.tools.dsml import DSML_V4, DSML_V32
from teneral.handlers.openai.tools.format import ToolFormat
from teneral.handlers.openai.tools.functions import tool_plan
from teneral.handlers.openai.tools.gemma import FUNCTION_GEMMA, GEMMA
from teneral.handlers.openai.tools.glm import GLM
from teneral.handlers.openai.tools.grammar import calls_grammar, reasoning_grammar
from teneral.handlers.openai.tools.json_objects import GENERIC_JSON, GRANITE, HERMES, LLAMA3
from teneral.handlers.openai.tools.mistral import LIST, NAMED
from teneral.handlers.openai.tools.pythonic import PYTHONIC
from teneral.handlers.openai.tools.qwen3_coder import QWEN3_CODER
from teneral.handlers.openai.tools.reader import CallReader
from teneral.handlers.openai.tools.sections import DEEPSEEK, DEEPSEEK_FENCED, KIMI
from teneral.runtime.errors import RequestError
from teneral.runtime.grammar.spec import GrammarSpec

MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>")
FORMATS = {
    "hermes": HERMES, "llama3": LLAMA3, "mistral": LIST, "mistral-named": NAMED, "json": GENERIC_JSON,
    "qwen3_coder": QWEN3_CODER, "pythonic": PYTHONIC, "glm": GLM, "gemma": GEMMA, "function-gemma": FUNCTION_GEMMA,
    "deepseek": DEEPSEEK, "deepseek-fenced": DEEPSEEK_FENCED, "kimi": KIMI, "granite": GRANITE,
    "dsml": DSML_V32, "dsml-v4": DSML_V4,
}  # fmt: skip
# A place's arguments, where they are not one JSON object.
ARGUMENTS = {
    "qwen3_coder": "<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n",
    "pythonic": 'city="Oslo", days=3',
    "glm": "<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n",
    **dict.fromkeys(
        ("dsml", "dsml-v4"),
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n',
    ),
    "gemma": 'city:<|"|>Oslo<|"|>,days:3',
    "function-gemma": "city:<escape>Oslo<escape>,days:3",
}
PLACE = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {}, "additionalProperties": False}


def tools(*, strict: bool = False) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in (("weather", PLACE), ("time", TIME))
    ]


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(MARKERS if request.param else ())


def answer_of(fmt: ToolFormat, text: str) -> Answer:
    reader = CallReader(fmt, {"weather": PLACE, "time": TIME}, is_guided=True, max_calls=None)
    return Answer.of([*reader.push(text), *reader.finish(), Finish("stop")])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_calls_are_always_valid(vocabulary: Vocabulary, name: str, choice: Any) -> None:
    plan = tool_plan(tools(), choice, None)
    spec = calls_grammar(FORMATS[name], plan, None, None, is_open=False)
    schemas = {"weather": PLACE, "time": TIME}
    for seed in range(8):
        text = vocabulary.sample(spec, seed)
        assert text is not None
        answer = answer_of(FORMATS[name], text)
        assert answer.text == ""
        assert answer.calls
        assert len(answer.calls) == 1 or choice == "required"
        for call in answer.calls:
            assert call.name in plan.names
            jsonschema_rs.validate(schemas[call.name], json.loads(call.arguments))


@pytest.mark.parametrize("name", FORMATS)
def test_strict_functions_are_guided_once_a_call_begins(vocabulary: Vocabulary, name: str) -> None:
    fmt = FORMATS[name]
    spec = calls_grammar(fmt, tool_plan(tools(strict=True), None, None), None, None, is_open=False)
    shape = fmt.shape
    arguments = ARGUMENTS.get(name, '{"city":"Oslo","days":3}')
    good = f"{shape.before_name}weather{shape.before_arguments}{arguments}{shape.after_arguments}"
    bad = good.replace("Oslo", "Bonn")
    assert vocabulary.accepts(spec, "Just text, {with} <tags>.")
    assert vocabulary.accepts(spec, shape.first + good + shape.last)
    assert vocabulary.accepts(spec, shape.first + good + shape.separator + good + shape.last)
    assert not vocabulary.accepts(spec, shape.first + bad + shape.last)
    if not fmt.is_bare:
        text = f"Let me see.\n{shape.first}{good}{shape.last}"
        assert vocabulary.accepts(spec, text)
        assert vocabulary.accepts(spec, f"{text}\nand\n{text} done")
        assert not vocabulary.accepts(spec, f"Let me see.\n{shape.first}{bad}{shape.last}")


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_of_guided_calls_are_finite_and_text_is_free(vocabulary: Vocabulary, name: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema, "strict": True}}
    fmt = FORMATS[name]
    spec = calls_grammar(fmt, tool_plan([tool], "required", False), None, None, is_open=False)
    for seed in range(20):
        text = vocabulary.sample(spec, seed)
        assert text is not None
        [call] = answer_of(fmt, text).calls
        assert math.isfinite(float(json.loads(call.arguments)["x"]))
    free = calls_grammar(fmt, tool_plan([tool], None, None), None, None, is_open=False)
    assert vocabulary.accepts(free, "About 1e99999, or " + "1" * 100)


def test_one_call_ends_the_answer_where_no_more_are_allowed(vocabulary: Vocabulary) -> None:
    spec = calls_grammar(HERMES, tool_plan(tools(strict=True), None, False), None, None, is_open=False)
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    for text in ("", "Text.", call, f"Yes. {call}"):
        assert vocabulary.accepts(spec, text)
    assert not vocabulary.accepts(spec, f"{call}\n{call}")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_open", [True, False])
def test_guidance_begins_behind_the_reasoning(vocabulary: Vocabulary, name: str, is_open: bool) -> None:
    fmt = FORMATS[name]
    spec = calls_grammar(fmt, tool_plan(tools(), "required", None), None, FAMILIES[0], is_open=is_open)
    shape = fmt.shape
    arguments = "" if name in ARGUMENTS else "{}"
    call = f"{shape.first}{shape.before_name}time{shape.before_arguments}{arguments}{shape.after_arguments}{shape.last}"
    before = "" if is_open else "<think>"
    assert vocabulary.accepts(spec, f'{before}Hm, {{"free": text}}\n</think>\n\n{call}')
    assert vocabulary.accepts(spec, call) is not is_open
    assert not vocabulary.accepts(spec, f"{before}Hm.\n</think>\n\nText.")


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (GrammarSpec.json_schema(PLACE), '{"city":"Rome","days":1}', '{"city":"Rome"}'),
        (GrammarSpec.regex("a+b"), "aab", "b"),
        (GrammarSpec.choice(["yes", "no"]), "no", "nope"),
        (GrammarSpec.grammar('root ::= "x" "y"'), "xy", "x"),
    ],
)
def test_any_form_may_follow_reasoning_or_replace_calls(
    vocabulary: Vocabulary, answer: GrammarSpec, good: str, bad: str
) -> None:
    spec = reasoning_grammar(answer, FAMILIES[0], is_open=True)
    assert vocabulary.accepts(spec, f"Why not?</think>{good}")
    assert vocabulary.accepts(spec, f"</think>\n\n{good}")
    assert not vocabulary.accepts(spec, good)
    assert not vocabulary.accepts(spec, f"Why not?</think>{bad}")
    spec = calls_grammar(HERMES, tool_plan(tools(), None, None), answer, None, is_open=False)
    assert vocabulary.accepts(spec, good)
    assert not vocabulary.accepts(spec, bad)
    assert vocabulary.accepts(spec, '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>')


@pytest.mark.parametrize(("fmt", "key"), [(LLAMA3, "parameters"), (GENERIC_JSON, "arguments")])
def test_bare_calls_and_answers_in_json(vocabulary: Vocabulary, fmt: ToolFormat, key: str) -> None:
    answer = GrammarSpec.json_schema(
        {**PLACE, "properties": {**PLACE["properties"], "name": {"type": "string"}}}
    )
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/place"}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {"place": PLACE},
    }
    function = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    spec = calls_grammar(fmt, tool_plan([function], None, None), answer, None, is_open=False)
    place = '{"city":"Oslo","days":3}'
    call = f'{{"name":"weather","{key}":{{"at":{place}}}}}'
    for text in (place, call, call + fmt.shape.separator + call):
        assert vocabulary.accepts(spec, text)
    for text in ("Text.", f'{{"name":"other","{key}":{{}}}}', f'{{"name":"weather","{key}":{{}}}}'):
        assert not vocabulary.accepts(spec, text)
    reader = CallReader(fmt, {"weather": parameters}, is_guided=True, max_calls=None)
    read = Answer.of([*reader.push(call), *reader.finish(), Finish("stop")])
    assert [(each.name, each.arguments) for each in read.calls] == [("weather", f'{{"at":{place}}}')]


def test_a_form_that_is_no_schema_and_bare_calls_together_are_refused() -> None:
    with pytest.raises(RequestError, match="bare JSON"):
        calls_grammar(LLAMA3, tool_plan(tools(), None, None), GrammarSpec.regex("a"), None, is_open=False)


@pytest.mark.parametrize(
    ("given", "choice", "param"),
    [
        ([{"type": "custom", "custom": {"name": "x"}}], None, "tools[0].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([{"function": {"name": "a b"}}], None, "tools[0].function.name"),
        ([{"function": {"name": "a"}}, {"function": {"name": "a"}}], None, "tools[1].function.name"),
        ([{"function": {"name": "a", "parameters": []}}], None, "tools[0].function.parameters"),
        ([{"function": {"name": "a", "strict": 1}}], None, "tools[0].function.strict"),
        ([{"function": {"name": "a"}}] * 300, None, "tools"),
        (tools(), "always", "tool_choice"),
        ([], "required", "tool_choice"),
        (tools(), {"type": "function", "function": {"name": "x"}}, "tool_choice"),
        (tools(), {"type": "custom"}, "tool_choice"),
        (tools(), {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, "tool_choice"),
    ],
)
def test_tools_that_cannot_be_honoured_are_refused_by_name(
    given: list[dict[str, Any]], choice: Any, param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        tool_plan(given, choice, None)
    assert caught.value.param == param


@pytest.mark.parametrize("items", [{}, {"type": "string"}])
def test_a_schema_without_a_grammar_is_refused_only_where_calls_are_guided(items: Any) -> None:
    parameters = {"properties": {"tags": {"type": "array", "items": items, "uniqueItems": True}}}
    function = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert tool_plan([function], None, None).names == {"f"}
    strict = {"type": "function", "function": {**function["function"], "strict": True}}  # type: ignore[dict-item]
    for tool, choice in ((function, "required"), (strict, None)):
        with pytest.raises(RequestError, match="uniqueItems") as caught:
            tool_plan([tool], choice, None)
        assert caught.value.param == "tools[0].function.parameters"


def test_allowed_tools_are_the_only_ones_that_may_be_called() -> None:
    named = {"type": "function", "function": {"name": "time"}}
    plan = tool_plan(
        tools(), {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}, None
    )
    assert plan.names == {"time"}
    assert plan.tools is not None
    assert len(plan.tools) == 2


MANY = {
    "type": "object",
    "properties": {
        "path": {"enum": ["a b", "<c>"], "description": "a file"},
        "mode": {"enum": ["read", "write"], "type": "string"},
        "code": {"type": "string", "pattern": "^[a-z]{2}$"},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["path", "code"],
    "$defs": {"place": PLACE},
}


@pytest.mark.parametrize("fmt", [QWEN3_CODER, PYTHONIC])
def test_arguments_one_by_one_are_of_their_schemas(vocabulary: Vocabulary, fmt: ToolFormat) -> None:
    function = {"type": "function", "function": {"name": "f", "parameters": MANY, "strict": True}}
    plan = tool_plan([function], "required", False)
    spec = calls_grammar(fmt, plan, None, None, is_open=False)
    keys: set[str] = set()
    for seed in range(30):
        text = vocabulary.sample(spec, seed)
        if text is not None:
            for is_eager in (False, True):
                reader = CallReader(fmt, {"f": MANY}, is_guided=True, max_calls=1, is_eager=is_eager)
                answer = Answer.of([*reader.push(text), *reader.finish(), Finish("stop")])
                assert answer.text == ""
                [call] = answer.calls
                arguments = json.loads(call.arguments)
                jsonschema_rs.validate({**MANY, "additionalProperties": False}, arguments)
                keys |= arguments.keys()
    assert keys == MANY["properties"].keys()


def test_text_in_xml_goes_up_to_its_end(vocabulary: Vocabulary) -> None:
    parameters = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    function = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    spec = calls_grammar(QWEN3_CODER, tool_plan([function], "required", False), None, None, is_open=False)
    for code in ("", "x = 1\nif x < 2:\n    print('</p>')", '"é"', "\n"):
        text = f"<parameter=code>\n{code}\n</parameter>\n"
        text = f"<tool_call>\n<function=f>\n{text}</function>\n</tool_call>"
        assert vocabulary.accepts(spec, text)
        reader = CallReader(QWEN3_CODER, {"f": parameters}, is_guided=True, max_calls=1)
        [call] = Answer.of([*reader.push(text), *reader.finish(), Finish("stop")]).calls
        assert json.loads(call.arguments) == {"code": code}
    assert not vocabulary.accepts(spec, "<tool_call>\n<function=f>\n</function>\n</tool_call>")


@pytest.mark.parametrize("fmt", [QWEN3_CODER, PYTHONIC])
def test_functions_without_a_list_of_parameters(vocabulary: Vocabulary, fmt: ToolFormat) -> None:
    anything = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    spec = calls_grammar(fmt, tool_plan([anything], "required", False), None, None, is_open=False)
    for seed in range(10):
        if (text := vocabulary.sample(spec, seed)) is not None:
            reader = CallReader(fmt, {"f": {}}, is_guided=True, max_calls=1)
            [call] = Answer.of([*reader.push(text), *reader.finish(), Finish("stop")]).calls
            json.loads(call.arguments)
    either = {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    function = {"type": "function", "function": {"name": "f", "parameters": either}}
    with pytest.raises(RequestError, match="anyOf"):
        calls_grammar(fmt, tool_plan([function], "required", None), None, None, is_open=False)


def test_calls_in_python_or_an_answer_in_json(vocabulary: Vocabulary) -> None:
    spec = calls_grammar(
        PYTHONIC, tool_plan(tools(), None, None), GrammarSpec.json_schema(PLACE), None, is_open=False
    )
    assert vocabulary.accepts(spec, '[weather(city="Oslo", days=3), time()]')
    assert vocabulary.accepts(spec, '{"city":"Oslo","days":3}')
    assert not vocabulary.accepts(spec, '{"city":"Oslo"}')
