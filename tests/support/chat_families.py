"""Tiny models with the chat templates and special tokens of families that call tools and reason, and answers that a
test writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.instances import TinyParts
from tests.support.tiny_models import save_tiny, tiny_model
from tokenizers import AddedToken, Tokenizer

CONTEXT = 4096

_MESSAGES = (
    "{% for message in messages %}<|{{ 'user' if message.role != 'assistant' else 'assistant' }}|>"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.arguments.keys() | list }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As gpt-oss' template treats conversations: a result has the name of the call before it, a call is the only one in its
# message and has no text, and reasoning goes with calls alone.
_HARMONY = (
    "<|start|>system<|message|>{{ reasoning_effort or 'medium' }}<|end|>"
    "{% if tools %}<|start|>developer<|message|>{% for tool in tools %}"
    "{{ '// ' + tool.function.description + ' ' + tool.function.name + ' ' }}{% endfor %}<|end|>{% endif %}"
    "{% set last = namespace(name=none) %}{% for message in messages %}"
    "{% if message.role == 'assistant' and message.tool_calls %}"
    "{% if message.tool_calls | length > 1 or message.content %}{{ raise_exception('one call') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}{% set last.name = call.name %}"
    "{% if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}"
    "{{ '<|end|>' if add_generation_prompt or not loop.last else '<|return|>' }}"
    "{% elif message.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ message.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Each family's template ('': none), and its added tokens with whether they are special.
FAMILIES: dict[str, tuple[str, dict[str, bool]]] = {
    "hermes": (
        "{% if tools %}<tools>{{ tools | tojson }}</tools> <tool_call>{% endif %}" + _MESSAGES,
        {"<tool_call>": False, "</tool_call>": False},
    ),
    "llama3": (
        "{% if tools %}{{ tools | tojson }}<|python_tag|>{% endif %}" + _MESSAGES,
        {"<|python_tag|>": True},
    ),
    "mistral": (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for message in messages if message.tool_call_id and message.tool_call_id | length != 9 %}"
        "{{ raise_exception('ids have 9 characters') }}{% endfor %}" + _MESSAGES + "{# [TOOL_CALLS] #}",
        {"[TOOL_CALLS]": True},
    ),
    "qwen3_coder": (
        "{% if tools %}{{ tools | tojson }}<tool_call><function=name>{% endif %}" + _MESSAGES,
        {"<tool_call>": False, "</tool_call>": False},
    ),
    "pythonic": (
        "{% if tools %}{{ tools | tojson }}[func_name1(key=value)]{% endif %}" + _MESSAGES,
        {"<|python_start|>": True, "<|python_end|>": True},
    ),
    "none": ("", {}),
    "plain": (_MESSAGES.replace("tool_calls", "calls"), {}),
    "fill": (
        _MESSAGES,
        dict.fromkeys(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"), True),
    ),
    "reasoning": (
        "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% if enable_thinking %}{% endif %}"
        + _MESSAGES
        + "{% if add_generation_prompt and enable_thinking is not false %}<think>\n{% endif %}{# </think> #}",
        {"<think>": False, "</think>": False, "<tool_call>": False, "</tool_call>": False},
    ),
    "harmony": (
        _HARMONY,
        {
            "<|channel|>": True,
            "<|constrain|>": True,
            "<|message|>": True,
            "<|return|>": True,
            "<|call|>": True,
        },
    ),
}
_ENDS = {"harmony": ("<|return|>", "<|call|>")}  # where they are others


def family_parts(family: str, directory: Path, *, context: int = CONTEXT) -> TinyParts:
    template, added = FAMILIES[family]
    save_tiny("llama", directory, max_position_embeddings=context)
    path = directory / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "chat_template": template or None}
    if family in _ENDS:
        settings["eos_token"] = _ENDS[family][0]
    path.write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text, is_special in added.items():
        token = AddedToken(text, special=is_special)
        if is_special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    tokenizer.save(str(directory / "tokenizer.json"))
    if family in _ENDS:
        ends = [tokenizer.token_to_id(text) for text in _ENDS[family]]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return TinyParts.read(directory, tiny_model("llama", max_position_embeddings=context))


@contextmanager
def scripted(server: Any, text: str) -> Iterator[None]:
    """While it lasts, the model of a `StagedInstance` answers with `text` where no grammar forbids it: requests with
    the same prompt, one after the other.
    """
    model = server.instance.model
    tokenizer = server.instance.tokenizer.result()
    tokens = [*tokenizer.encode(text, add_special_tokens=False), *tokenizer.eos_token_ids]
    real = model.forward
    first_position: int | None = None

    def forward(batch: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal first_position
        logits = real(batch, *arguments, **options)
        rows = np.zeros(np.shape(logits), np.float32)
        for row, index in enumerate(batch.logit_rows.tolist()):
            position = int(batch.positions[index])
            if first_position is None or position <= first_position:
                first_position = position
            place = min(position - first_position, len(tokens) - 1)
            rows[row, tokens[place]] = 100.0
        return rows

    model.forward = forward
    try:
        yield
    finally:
        del model.forward
