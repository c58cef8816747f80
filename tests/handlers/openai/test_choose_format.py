"""The format of calls that a chat template calls for."""

from __future__ import annotations

import pytest

from teneral.handlers.openai.deltas import answers_in_channels
from teneral.handlers.openai.tools.choose import SETTINGS, tool_format
from teneral.runtime.config import SETTINGS as CONFIG

TEMPLATES = {
    "[TOOL_CALLS]{{ call }}": "mistral",
    "<tool_call>{{ call | tojson }}</tool_call>": "hermes",
    "<tool_call>\n<function=example>\n<parameter=key>": "qwen3_coder",
    "<tool_call>{{ name }}<arg_key>": "glm",
    "<｜tool▁calls▁begin｜>{{ call }}": "deepseek",
    "{% set dsml = '｜DSML｜' %}<{{ dsml }}function_calls>": "dsml",
    "<|tool_calls_section_begin|>{{ call }}": "kimi",
    "<|tool_call|>{{ calls | tojson }}": "granite",
    "<|tool_call>call:{{ name }}": "gemma",
    "<start_function_call>call:{{ name }}": "gemma",
    "<|python_start|>{{ call }}<|python_end|>": "pythonic",
    "[func_name1(params_name1=params_value1)]": "pythonic",
    "<|python_tag|>{{ call }}": "llama3",
    '<|python_start|>{{ text }}<|python_end|>{{ name }} "parameters": {{ call }}': "llama3",
    '<|start_header_id|>{{ call }} "parameters": ': "llama3",
    "<|start|>assistant<|channel|>final<|message|>{{ text }}": "harmony",
    "{{ messages }}": "json",
    "": "json",
}


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
def test_the_template_chooses_the_format(template: str, name: str) -> None:
    chosen = tool_format({"default": template})
    assert chosen is not None
    assert chosen.name == name


def test_a_setting_goes_before_the_template() -> None:
    for setting in set(SETTINGS) - {"auto", "off"}:
        chosen = tool_format({"default": "<tool_call>"}, setting)
        assert chosen is not None
        assert chosen.name == setting
    assert tool_format({"default": "<tool_call>"}, "off") is None


def test_channels_are_read_where_the_template_has_them_and_by_the_setting() -> None:
    channels, others = {"default": "<|channel|>final<|message|>"}, {"default": "{{ messages }}"}
    assert [answers_in_channels(channels, setting) for setting in ("auto", "off", "harmony")] == [True] * 3
    assert not answers_in_channels(channels, "json")
    assert not answers_in_channels(others)
    assert answers_in_channels(others, "harmony")


def test_the_servers_setting_has_the_same_names() -> None:
    for name in SETTINGS:
        assert CONFIG["tool_parser"].parse(name) == name
