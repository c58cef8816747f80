"""Calls in a model's text: each family's formats, any split into pieces, and text that is no call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from teneral.handlers.openai.deltas import Answer, Delta, Finish, TextDelta, ToolCallDelta
from teneral.handlers.openai.tools.dsml import DSML_V4, DSML_V32
from teneral.handlers.openai.tools.format import ToolFormat
from teneral.handlers.openai.tools.gemma import FUNCTION_GEMMA, GEMMA
from teneral.handlers.openai.tools.glm import GLM
from teneral.handlers.openai.tools.json_objects import GENERIC_JSON, GRANITE, HERMES, LLAMA3
from teneral.handlers.openai.tools.mistral import LIST, NAMED
from teneral.handlers.openai.tools.pythonic import PYTHONIC
from teneral.handlers.openai.tools.qwen3_coder import QWEN3_CODER
from teneral.handlers.openai.tools.reader import CallReader
from teneral.handlers.openai.tools.sections import DEEPSEEK, DEEPSEEK_FENCED, KIMI

CUTS = st.lists(st.integers(0, 200), max_size=8)
PATIENT = settings(suppress_health_check=[HealthCheck.too_slow])
FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_time": {},
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "text": {"type": "string"}}},
    "get": {"type": "object", "properties": {"url": {"type": "string"}, "n": {"type": ["string", "null"]}}},
}
NAMES = tuple(FUNCTIONS)
JSON_FORMATS = {
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": LIST,
    "mistral-named": NAMED,
    "json": GENERIC_JSON,
}
SECTIONS = {"deepseek": DEEPSEEK, "deepseek-fenced": DEEPSEEK_FENCED, "kimi": KIMI, "granite": GRANITE}
JSON_FORMATS |= SECTIONS
FORMATS = {
    **JSON_FORMATS,
    "qwen3_coder": QWEN3_CODER,
    "pythonic": PYTHONIC,
    "glm": GLM,
    "dsml": DSML_V32,
    "dsml-v4": DSML_V4,
    "gemma": GEMMA,
    "function-gemma": FUNCTION_GEMMA,
}
CALL = {"name": "add", "arguments": {"a": 1, "b": [2, {"c": '}"]\\'}]}}


def read(
    fmt: ToolFormat,
    pieces: Sequence[str],
    *,
    is_guided: bool = False,
    max_calls: int | None = None,
    is_eager: bool = False,
) -> tuple[str, list[tuple[str, Any]]]:
    """The text and the calls, by name with the text of their arguments."""
    reader = CallReader(fmt, FUNCTIONS, is_guided=is_guided, max_calls=max_calls, is_eager=is_eager)
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += reader.push(piece)
    answer = Answer.of([*deltas, *reader.finish(), Finish("stop")])
    return answer.text, [(call.name, call.arguments) for call in answer.calls]


def written(fmt: ToolFormat, calls: Sequence[dict[str, Any]]) -> str:
    """The calls in the exact shape that a grammar gives them."""
    shape = fmt.shape
    each = [
        f"{shape.before_name}{call['name']}{shape.before_arguments}"
        f"{json.dumps(call['arguments'])}{shape.after_arguments}"
        for call in calls
    ]
    return shape.first + shape.separator.join(each) + shape.last


CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", [("add", {"a": 1})]),
    (
        "hermes",
        'Let me see.\n<tool_call>{"arguments": {}, "name": "get_time"}</tool_call>\n<tool_call>\n'
        '{"name": "add", "arguments": "{\\"a\\": 1}"}\n</tool_call>\n',
        "Let me see.\n",
        [("get_time", {}), ("add", {"a": 1})],
    ),
    ("hermes", '<tool_call>{"name": "get_time"}', "", [("get_time", {})]),
    ("hermes", '<tool_call>{"name": "get"}\n<tool_call>{"name": "add"}', "", [("get", {}), ("add", {})]),
    ("hermes", '<tool_call>[{"name": "get"}, {"name": "add"}]</tool_call>', "", [("get", {}), ("add", {})]),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    (
        "llama3",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": "1"}}; '
        '{"name": "get", "parameters": {}}',
        "",
        [("add", {"a": "1"}), ("get", {})],
    ),
    ("llama3", 'I look.<|python_end|>{"name": "get", "parameters": {}}', "I look.", [("get", {})]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "get"}]',
        "",
        [("add", {"a": 1}), ("get", {})],
    ),
    (
        "mistral",
        'Yes.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get[ARGS]{}',
        "Yes.",
        [("add", {"a": 1}), ("get", {})],
    ),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', "", [("add", {"a": 1})]),
    ("mistral", '[TOOL_CALLS]add{"a": 1}', "", [("add", {"a": 1})]),
    (
        "json",
        '\n{"name": "add", "arguments": {"a": 1}}\n{"name": "get", "arguments": {}}\n',
        "",
        [("add", {"a": 1}), ("get", {})],
    ),
    ("json", '{"function": {"name": "add", "arguments": "{}"}, "type": "function"}', "", [("add", {})]),
    (
        "qwen3_coder",
        'I add.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=text>\n12\n"é"</p>\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call><function=get_time></function></tool_call>",
        "I add.\n",
        [("add", {"a": 1, "text": '12\n"é"</p>'}), ("get_time", {})],
    ),
    (
        "qwen3_coder",
        "<function=get>\n<parameter=url>\n\n</parameter>\n<parameter=n>null</parameter>\n</function>\n</tool_call>",
        "",
        [("get", {"url": "", "n": None})],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=b>\n[1, {}]\n</parameter>\n<parameter=other>x y</parameter>\n"
        "<parameter=b>\n2\n</parameter></function><function=get></function>",
        "",
        [("add", {"b": [1, {}], "other": "x y"}), ("get", {})],
    ),
    ("qwen3_coder", '<tool_call>{"name": "get"}</tool_call>', "", [("get", {})]),
    (
        "glm",
        "I add.<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>text</arg_key>\n"
        "<arg_value>12\n<b></arg_value>\n</tool_call>\n<tool_call>get_time</tool_call>",
        "I add.",
        [("add", {"a": 1, "text": "12\n<b>"}), ("get_time", {})],
    ),
    (
        "glm",
        "<tool_call>get<arg_key>url</arg_key><arg_value>x</arg_value><arg_key>n</arg_key><arg_value>null</arg_value>"
        "</tool_call>",
        "",
        [("get", {"url": "x", "n": None})],
    ),
    (
        "dsml",
        'Yes.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="text" string="true">1\n<b></｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="get">\n<｜DSML｜parameter name="n">null</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "Yes.\n\n",
        [("add", {"a": 1, "text": "1\n<b>"}), ("get", {"n": None})],
    ),
    (
        "dsml-v4",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="get"><｜DSML｜parameter name="n" string="true">null'
        "</｜DSML｜parameter></｜DSML｜invoke>",
        "",
        [("get", {"n": "null"})],
    ),
    (
        "deepseek",
        'Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>get<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Yes.",
        [("add", {"a": 1}), ("get", {})],
    ),
    (
        "deepseek",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```'
        "<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("add", {"a": 1}), ("get", {})],
    ),
    ("deepseek", '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}', "", [("add", {"a": 1})]),
    (
        "kimi",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}'
        "<|tool_call_end|><|tool_call_begin|>functions.get:1 <|tool_call_argument_begin|> {}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        [("add", {"a": 1}), ("get", {})],
    ),
    (
        "granite",
        '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}, {"name": "get", "arguments": {}}]',
        "",
        [("add", {"a": 1}), ("get", {})],
    ),
    ("granite", '<|tool_call|>[{"name": "get", "arguments": {}}]<|/tool_call|>', "", [("get", {})]),
    (
        "gemma",
        'I add.<|tool_call>call:add{a:1,b:[1.5,{c:<|"|>d,"}<|"|>},true],text:<|"|>12\n"é"<|"|>}<tool_call|>'
        "<|tool_call>call:get_time{}<tool_call|>",
        "I add.",
        [("add", {"a": 1, "b": [1.5, {"c": 'd,"}'}, True], "text": '12\n"é"'}), ("get_time", {})],
    ),
    (
        "gemma",
        '<|tool_call>call:add{a: 1, b: ["x, y", word]}',
        "",
        [("add", {"a": 1, "b": ["x, y", "word"]})],
    ),
    (
        "function-gemma",
        "<start_function_call>call:get{url:<escape>x<escape>,n:null}<end_function_call>",
        "",
        [("get", {"url": "x", "n": None})],
    ),
    (
        "pythonic",
        '[add(a=1, b="x, )]"), get_time()]',
        "",
        [("add", {"a": 1, "b": "x, )]"}), ("get_time", {})],
    ),
    (
        "pythonic",
        "<|python_start|>[get(url='it\\'s', n=None, x=[True, {\"a\": (1, -2.5)}], y=true)]<|python_end|>",
        "",
        [("get", {"url": "it's", "n": None, "x": [True, {"a": [1, -2.5]}], "y": True})],
    ),
    (
        "pythonic",
        " [ add ( text = '''\"\n''' , b = \"\" , ) , ]".replace(" , ]", " ]"),
        "",
        [("add", {"text": '"\n', "b": ""})],
    ),
]
TEXTS = [
    ("hermes", "A <tool_call> is a tag."),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call> and more'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}}</tool_call>'),
    ("hermes", " \n <tool_"),
    ("llama3", '{"name": "Ada", "age": 36}'),
    ("llama3", '  {"answer": 42}'),
    ("llama3", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS]nothing[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]" + "x" * 300 + "{}"),
    ("json", "{"),
    ("json", '[1, 2, {"name": "add"}]'),
    ("json", '{"name": "add", "arguments": [1]}'),
    ("json", "[" * 5_000),
    ("qwen3_coder", "<function=unknown>\n</function>"),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1"),
    ("qwen3_coder", "<tool_call>\n<function=add>\n1</function>"),
    ("qwen3_coder", "<function=" + "x" * 300),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=" + "x" * 300),
    ("pythonic", "[1, 2]"),
    ("pythonic", '["add"]'),
    ("pythonic", "[add(1)]"),
    ("pythonic", "[add(a=1"),
    ("pythonic", "[add(a=1, a=2)]"),
    ("pythonic", "[add(a=open('x'))]"),
    ("pythonic", "[add(a={1})]"),
    ("pythonic", "[add(a=b'x')]"),
    ("pythonic", "[add(a=" + "[" * 5_000 + "]" * 5_000 + ")]"),
    ("pythonic", "[add(a=" + "[" * 250 + "]" * 250 + ")]"),  # as deep as JSON may be on Python 3.11
    ("json", '{"name": "add", "arguments": {"a": ' + "[" * 250 + "]" * 250 + "}}"),
    ("pythonic", "[add(a=" + "9" * 5_000 + ".e)]"),
    ("pythonic", "[add(a=1)], and"[:9]),
    ("pythonic", "[unknown(a=1)]"),
    ("pythonic", "<|python_start|>print(1)"),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_each_formats_calls_in_any_pieces(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    for pieces in ([text], list(text), [text[i : i + 7] for i in range(0, len(text), 7)]):
        given_text, given_calls = read(FORMATS[name], pieces)
        assert given_text == content
        assert [(call, json.loads(arguments)) for call, arguments in given_calls] == calls
        assert read(FORMATS[name], pieces, is_eager=True) == (given_text, given_calls)


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_text_that_is_no_call_survives_whole(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(FORMATS[name], pieces) == (text, [])


PARTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "add", "arguments": {}}',
        '{"name": "get", "parameters": {"x": "}"}}', "{", "}", "[", "]", ";", ",", " ", "\n", '"', "\\", "add",
        "text", "<", '{"a": 1}', '"name"', ":", "é", "<function=", "add>", "<parameter=", "text>", "</parameter>",
        "</function>", "[add(", "a=", "'", ")", ", get(", "<|python_start|>", "<|python_end|>",
    ]
)  # fmt: skip


@PATIENT
@given(st.sampled_from(sorted(FORMATS)), st.lists(PARTS, max_size=12), st.booleans(), CUTS)
def test_the_result_does_not_depend_on_the_pieces(
    name: str, parts: list[str], is_guided: bool, cuts: list[int]
) -> None:
    text = "".join(parts)
    cuts = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(FORMATS[name], [text], is_guided=is_guided)
    assert read(FORMATS[name], pieces, is_guided=is_guided) == whole
    assert read(FORMATS[name], list(text), is_guided=is_guided) == whole
    eager = read(FORMATS[name], [text], is_guided=is_guided, is_eager=True)
    assert read(FORMATS[name], pieces, is_guided=is_guided, is_eager=True) == eager
    assert read(FORMATS[name], list(text), is_guided=is_guided, is_eager=True) == eager
    if not whole[1]:
        assert whole[0] == text


@PATIENT
@given(st.sampled_from(sorted(FORMATS)), st.text(max_size=60))
def test_any_other_text_survives(name: str, text: str) -> None:
    assert read(FORMATS[name], list(text)) == (text, [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(NAMES),
            "arguments": st.dictionaries(st.text(max_size=5), VALUES, max_size=3),
        }
    ),
    min_size=1,
    max_size=3,
)


@PATIENT
@given(st.sampled_from(sorted(JSON_FORMATS)), CALLS, st.booleans())
def test_calls_in_a_formats_own_shape_are_read_back(
    name: str, calls: list[dict[str, Any]], is_guided: bool
) -> None:
    text = written(FORMATS[name], calls)
    for pieces in ([text], list(text)):
        content, found = read(FORMATS[name], pieces, is_guided=is_guided)
        assert content == ""
        assert [{"name": call, "arguments": json.loads(arguments)} for call, arguments in found] == calls


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_a_guided_calls_arguments_are_given_out_as_they_come(name: str) -> None:
    fmt = FORMATS[name]
    reader = CallReader(fmt, FUNCTIONS, is_guided=True, max_calls=None)
    text = written(fmt, [CALL])
    start = text.index("[2, {")
    assert any(not isinstance(delta, TextDelta) for delta in reader.push(text[:start]))
    [delta] = reader.push(text[start : start + 4])
    assert delta.arguments == "[2, "  # type: ignore[union-attr]


def test_nothing_comes_behind_the_last_call_that_is_allowed() -> None:
    for is_guided in (False, True):
        text = written(HERMES, [CALL, CALL]) + " and more"
        assert len(read(HERMES, list(text), is_guided=is_guided, max_calls=1)[1]) == 1
        assert read(HERMES, list(text), is_guided=is_guided, max_calls=1)[0] == ""


EAGER = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"text": "one two"}}</tool_call>',
    "llama3": '{"type": "function", "name": "add", "parameters": {"text": "one two"}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"text": "one two"}}]',
    "mistral-named": '[TOOL_CALLS]add[ARGS]{"text": "one two"}',
    "json": '{"name": "add", "arguments": {"text": "one two"}}',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=text>\none two\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", EAGER)
def test_a_streamed_calls_name_comes_first_and_its_arguments_as_they_come(name: str) -> None:
    reader = CallReader(FORMATS[name], FUNCTIONS, is_guided=False, max_calls=None, is_eager=True)
    text = EAGER[name]
    start = text.index("add") + 3
    assert reader.push(text[:start]) == []
    deltas = [delta for letter in text[start:] for delta in reader.push(letter)]
    deltas += reader.finish()
    first, *rest = deltas
    assert isinstance(first, ToolCallDelta)
    assert (first.name, first.arguments) == ("add", "")
    pieces = [delta.arguments for delta in rest if isinstance(delta, ToolCallDelta)]
    assert len(pieces) == len(rest) > 7
    assert json.loads("".join(pieces)) == {"text": "one two"}


def test_arguments_in_python_come_one_by_one() -> None:
    reader = CallReader(PYTHONIC, FUNCTIONS, is_guided=False, max_calls=None, is_eager=True)
    given = [
        [delta.arguments for delta in reader.push(piece) if isinstance(delta, ToolCallDelta)]
        for piece in ("[add(", "a=1", ", b='x", "')", "]")
    ]
    assert ["".join(pieces) for pieces in given] == ["{", '"a": ', '1, "b": ', '"x"}', ""]


BROKEN = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', '{"a": 1', ""),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call> and', '{"a": }', " and"),
    ("json", '{"name": "add", "arguments": {"a": 1}, oh', '{"a": 1}', ", oh"),
    ("qwen3_coder", "<tool_call><function=add><parameter=text>\none", '{"text": "one', ""),
    ("qwen3_coder", "<tool_call><function=add>oh", "{", "oh"),
    ("pythonic", "[add(a=1, b=oh)]", '{"a": 1, "b": ', "oh)]"),
]


@pytest.mark.parametrize(("name", "text", "arguments", "content"), BROKEN)
def test_a_streamed_call_that_breaks_off_stays_so(name: str, text: str, arguments: str, content: str) -> None:
    """Of a whole answer it is text, as nothing was given out."""
    for pieces in ([text], list(text)):
        assert read(FORMATS[name], pieces, is_eager=True) == (content, [("add", arguments)])
        if "}}" not in text:
            assert read(FORMATS[name], pieces) == (text, [])


CUT = [
    # format, text up to where it was cut, whether a grammar guides it, the text and the calls that are given
    ("hermes", 'I look.\n<tool_call>\n{"name": "ad', False, "I look.", []),
    ("hermes", "<tool_call>", False, "", []),
    ("hermes", "<tool_ca", False, "<tool_ca", []),
    ("hermes", 'I see <tool_call> and {"name"', False, 'I see <tool_call> and {"name"', []),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "a', False, "", [("add", "{}")]),
    ("mistral-named", "[TOOL_CALLS]ad", False, "", []),
    ("qwen3_coder", "<tool_call>\n<function=ad", False, "", []),
    ("llama3", '<|python_tag|>{"name": "ad', False, "", []),
    ("json", '{"name": "ad', False, '{"name": "ad', []),
    ("json", '{"name": "ad', True, "", []),
    ("json", '{"name": "add", "arguments": {}}\n{"na', True, "", [("add", "{}")]),
]


@pytest.mark.parametrize(("name", "text", "is_guided", "content", "calls"), CUT)
def test_a_call_that_is_cut_before_its_name_is_there_is_no_text(
    name: str, text: str, is_guided: bool, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in ([text], list(text)):
        reader = CallReader(FORMATS[name], FUNCTIONS, is_guided=is_guided, max_calls=None, is_eager=True)
        deltas = [delta for piece in pieces for delta in reader.push(piece)]
        answer = Answer.of([*deltas, *reader.finish(is_cut=True), Finish("length")])
        assert answer.text.rstrip() == content
        assert [(call.name, call.arguments) for call in answer.calls] == calls


def test_long_calls_take_time_in_proportion_to_their_length() -> None:
    text = (
        "<tool_call>\n<function=add>\n<parameter=text>\n"
        + "x\n" * 20_000
        + "</parameter>\n</function>\n</tool_call>"
    )
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    [(_, arguments)] = read(QWEN3_CODER, pieces, is_eager=True)[1]
    assert len(json.loads(arguments)["text"]) == 39_999
