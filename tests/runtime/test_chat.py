from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.chat_templates import SPECIAL_TOKENS, USER, made_templates
from tests.support.small_host import small_backend
from transformers import PreTrainedTokenizerFast

from teneral.runtime.errors import RequestError
from teneral.runtime.text.chat import (
    MAX_MESSAGES,
    MAX_TEMPLATE_CHARS,
    ChatTemplate,
)

# In the manner of the families that are served, each with the features its family's templates use.

HEADERS = """
{{- bos_token }}
{%- set ns = namespace(system='You are helpful.') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}
    {{- 'Environment: ipython\\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- '\\n\\n' }}
    {%- endfor %}
{%- endif %}
{{- ns.system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('only one tool call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' ~ call.arguments | tojson ~ '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""


CHATML = """{%- macro describe(tool, depth=0) -%}
{{ tool.function.name }}(
{%- for name, kind in tool.function.get('parameters', {}).items() | sort -%}
{{ name }}: {{ kind }}{{ ", " if not loop.last }}
{%- endfor %})
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
        {{- describe(tool) }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages[::-1] %}
    {%- if message.role == "tool" %}{%- continue %}{%- endif %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if loop.index0 > 50 %}{% break %}{%- endif %}
    {{- index }}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content | default('', true) %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {% generation %}{{ content }}{% endgeneration %}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{ tool_call.function.name }}{{- '", "arguments": ' }}
            {%- if tool_call.function.arguments is string %}
                {{- tool_call.function.arguments }}
            {%- else %}
                {{- tool_call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


INST = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{{ ' ' + message['content'] | trim + ' ' + eos_token -}}
{% else %}
{{ raise_exception('only user and assistant roles are supported') }}
{% endif %}
{% endfor %}
"""


PLAIN = """
{% for message in messages %}
{{ message['role'] }}: {{ message['content'] | trim }}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}
"""


TEMPLATES = {"headers": HEADERS, "chatml": CHATML, "inst": INST, "plain": PLAIN}


TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Où? <b>", "parameters": {"b": "x", "a": "y"}},
    },
    {"type": "function", "function": {"name": "none"}},
]


CALL = {"function": {"name": "weather", "arguments": {"where": "Zürich", "deep": [1, 2.5, None, True]}}}


CONVERSATIONS = {
    "one": USER,
    "system": [{"role": "system", "content": "  Be brief.\n"}, *USER],
    "turns": [
        *USER,
        {"role": "assistant", "content": " <think>x</think>\n\nhello "},
        {"role": "user", "content": "é🐉"},
    ],
    "none": [{"role": "user", "content": "x", "name": None, "tool_calls": None}],
    "call": [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain"},
        {"role": "user", "content": "thanks"},
    ],
    "wrong": [{"role": "assistant", "content": "I begin"}],
}


@pytest.fixture(scope="module")
def oracle():
    return PreTrainedTokenizerFast(tokenizer_object=small_backend(), **SPECIAL_TOKENS)


@pytest.fixture(scope="module")
def ours():
    templates = {name: ChatTemplate({"default": text}, SPECIAL_TOKENS) for name, text in TEMPLATES.items()}
    yield templates
    for template in templates.values():
        template.close()


@pytest.fixture
def template():
    with made_templates() as make:
        yield make


def both(ours, oracle, name, messages, **options):
    """What we and transformers make of it: a text each, or False for a refusal."""
    variables = options.pop("variables", {})
    outcomes = []
    for render in (
        lambda: ours[name].render(messages, variables=variables, **options),
        lambda: oracle.apply_chat_template(
            messages, chat_template=TEMPLATES[name], tokenize=False, **options, **variables
        ),
    ):
        try:
            outcomes.append(render())
        except (RequestError, Exception):
            outcomes.append(False)
    return outcomes


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_what_transformers_makes(ours, oracle, name, conversation, tools, add_generation_prompt):
    messages = CONVERSATIONS[conversation]
    got, expected = both(
        ours, oracle, name, messages, tools=tools, add_generation_prompt=add_generation_prompt
    )
    assert got == expected


def test_the_comparison_is_not_one_of_refusals_alone(ours, oracle):
    results = [both(ours, oracle, name, CONVERSATIONS["turns"], tools=None)[0] for name in TEMPLATES]
    assert all(results)
    assert len(set(results)) == len(results)


@pytest.mark.parametrize("thinking", [True, False])
def test_variables_of_the_caller_reach_the_template(ours, oracle, thinking):
    got, expected = both(
        ours, oracle, "chatml", USER, add_generation_prompt=True, variables={"enable_thinking": thinking}
    )
    assert got == expected
    assert ("<think>" in got) is not thinking


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=20)}
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=80, deadline=None)
@given(name=st.sampled_from(sorted(TEMPLATES)), messages=MESSAGES)
def test_any_conversation_is_rendered_as_transformers_renders_it(ours, oracle, name, messages):
    got, expected = both(ours, oracle, name, messages, add_generation_prompt=True)
    assert got == expected


def test_the_date_is_local(template):
    year = time.strftime("%Y")
    assert template("{{ strftime_now('%Y') }}").render(USER) in (year, time.strftime("%Y"))


def test_text_in_parts_becomes_one_text(ours):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert ours["inst"].render([{"role": "user", "content": parts}]) == ours["inst"].render(USER)


def test_a_template_of_the_caller_stands_in_for_the_models_own(template):
    one = template("model's")
    assert one.render(USER, source="{{ messages[0].content }}!") == "hi!"
    assert one.render(USER) == "model's"
    for source in ("{% if %}", "{{ namespace(_x=1) }}", "x" * (MAX_TEMPLATE_CHARS + 1)):
        with pytest.raises(RequestError) as caught:
            one.render(USER, source=source)
        assert caught.value.param == "chat_template"


def test_a_model_without_a_template_says_what_to_do():
    one = ChatTemplate({}, SPECIAL_TOKENS)
    with pytest.raises(RequestError) as caught:
        one.render(USER)
    assert "--chat-template" in caught.value.hint
    assert "/v1/completions" in caught.value.hint
    assert one.render(USER, source="{{ messages[0].content }}") == "hi"
    one.close()


# Invalid messages.


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        (USER * (MAX_MESSAGES + 1), "messages"),
        ([*USER, "hi"], "messages[1]"),
        ([{"content": "hi"}], "messages[0]"),
        ([{"role": 1, "content": "hi"}], "messages[0]"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": "hi", "more": object()}], "messages"),
        ([{"role": "user", "content": "x" * (9 << 20)}], "messages"),
    ],
)
def test_invalid_messages_are_refused_where_they_are_wrong(ours, messages, param):
    with pytest.raises(RequestError) as caught:
        ours["plain"].render(messages)
    assert caught.value.param == param


def test_the_template_s_own_error_reaches_the_caller(ours):
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        ours["inst"].render(CONVERSATIONS["wrong"])
    assert caught.value.param == "messages"


def test_a_template_that_fails_on_the_messages_says_how(template):
    with pytest.raises(RequestError, match="no attribute 'nothing'"):
        template("{{ messages[0].nothing.more }}").render(USER)


def test_half_a_surrogate_pair_passes_through(ours):
    assert "\ud83d" in ours["inst"].render([{"role": "user", "content": "\ud83d"}])
