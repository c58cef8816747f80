"""Calls as a family's template writes those of a conversation, read back: arguments of any kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.chat_templates import made_templates

from teneral.handlers.openai.deltas import Answer, Delta, Finish
from teneral.handlers.openai.prompts import with_arguments
from teneral.handlers.openai.tools.choose import tool_format
from teneral.handlers.openai.tools.reader import CallReader
from teneral.handlers.openai.tools.sections import kimi_ids

FUNCTIONS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": "array"},
            "place": {"type": "object"},
        },
    },
    "time": {"type": "object", "properties": {}},
}
CALLS: list[tuple[str, Any]] = [
    (
        "weather",
        {"city": 'O"slo\n1', "days": 3, "units": ["C", {"a": None}], "place": {"lat": 1.5, "in": "x"}},
    ),
    ("time", {}),
]
LOOP = "{% for call in messages[-1].tool_calls %}{% set f = call.function %}"
TEMPLATES = {
    "hermes": LOOP
    + "<tool_call>\n{{ {'name': f.name, 'arguments': f.arguments} | tojson }}\n</tool_call>\n{% endfor %}",
    "qwen3_coder": LOOP
    + "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>\n{% endfor %}",
    "glm": LOOP
    + "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "dsml": "{% set d = '｜DSML｜' %}<{{ d }}function_calls>\n"
    + LOOP
    + '<{{ d }}invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}<{{ d }}parameter name="{{ k }}" '
    "string=\"{{ 'true' if v is string else 'false' }}\">{{ v if v is string else v | tojson }}</{{ d }}parameter>\n"
    "{% endfor %}</{{ d }}invoke>\n{% endfor %}</{{ d }}function_calls>",
    "deepseek": "<｜tool▁calls▁begin｜>"
    + LOOP
    + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}"
    "<｜tool▁calls▁end｜>",
    "deepseek-fenced": "<｜tool▁calls▁begin｜>"
    + LOOP
    + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```"
    "<｜tool▁call▁end｜>{{ '' if loop.last else '\n' }}{% endfor %}<｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|>"
    + LOOP
    + "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>"
    "{% endfor %}<|tool_calls_section_end|>",
    "granite": "<|tool_call|>[" + LOOP + "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}]",
    "gemma": '{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{{ "{" }}'
    "{% for k, w in v.items() %}{{ k }}:{{ value(w) }}{{ '' if loop.last else ',' }}{% endfor %}}"
    "{% elif v is sequence %}[{% for w in v %}{{ value(w) }}{{ '' if loop.last else ',' }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    + LOOP
    + "<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>{% endfor %}",
}


@pytest.fixture(scope="module")
def make() -> Iterator[Any]:
    with made_templates() as made:
        yield made


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("is_eager", [True, False])
def test_a_templates_own_calls_are_read(make: Any, name: str, is_eager: bool) -> None:
    template = TEMPLATES[name]
    fmt = tool_format({"default": template})
    assert fmt is not None
    assert fmt.name == name.removesuffix("-fenced")
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": called, "arguments": json.dumps(arguments)},
        }
        for number, (called, arguments) in enumerate(CALLS)
    ]
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    messages = with_arguments(conversation)
    if fmt.given_ids is not None:
        messages = fmt.given_ids(messages)
    text = make(template).render(messages)
    for size in (len(text), 1, 5):
        reader = CallReader(fmt, FUNCTIONS, is_guided=False, max_calls=None, is_eager=is_eager)
        deltas: list[Delta] = []
        for start in range(0, len(text), size):
            deltas += reader.push(text[start : start + size])
        answer = Answer.of([*deltas, *reader.finish(), Finish("stop")])
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == CALLS
        assert not answer.text.strip()


def test_kimis_ids_have_the_functions_name_and_count_on() -> None:
    def call(name: str, given: str) -> dict[str, Any]:
        return {"id": given, "function": {"name": name, "arguments": {}}}

    messages = kimi_ids(
        [
            {"role": "assistant", "content": "", "tool_calls": [call("a", "x"), call("b", "y")]},
            {"role": "tool", "content": "1", "tool_call_id": "y"},
            {"role": "assistant", "content": "", "tool_calls": [call("a", "z")]},
            {"role": "tool", "content": "1", "tool_call_id": "z"},
        ]
    )
    ids = [each["id"] for message in messages for each in message.get("tool_calls", [])]
    assert ids == ["functions.a:0", "functions.b:1", "functions.a:2"]
    assert [message.get("tool_call_id") for message in messages] == [None, ids[1], None, ids[2]]
