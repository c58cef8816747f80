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
    "reasoning": (
        "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% if enable_thinking %}{% endif %}"
        + _MESSAGES
        + "{% if add_generation_prompt and enable_thinking is not false %}<think>\n{% endif %}{# </think> #}",
        {"<think>": False, "</think>": False, "<tool_call>": False, "</tool_call>": False},
    ),
}


def family_parts(family: str, directory: Path) -> TinyParts:
    template, added = FAMILIES[family]
    save_tiny("llama", directory, max_position_embeddings=CONTEXT)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template or None}))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text, is_special in added.items():
        token = AddedToken(text, special=is_special)
        if is_special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    tokenizer.save(str(directory / "tokenizer.json"))
    return TinyParts.read(directory, tiny_model("llama", max_position_embeddings=CONTEXT))


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
