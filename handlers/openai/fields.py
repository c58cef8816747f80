"""Each field of each route, and its effect: honoured, refused, or accepted without effect.

The table in docs/openai.md is this one, and tests compare it with the bodies of `schemas.py` and with the types of the
public `openai` package, so that no field of either is ignored unnoticed.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from ...runtime.errors import RequestError


class Effect(enum.StrEnum):
    HONOURED = "honoured"
    REFUSED = "refused"  # with 400 and the field's name, unless it is null
    WITHOUT_EFFECT = "accepted without effect"


Fields = Mapping[str, tuple[Effect, str]]

_YES, _NO, _IDLE = Effect.HONOURED, Effect.REFUSED, Effect.WITHOUT_EFFECT

_GENERATION: Fields = {
    "model": (_YES, "the served model's name, or nothing"),
    "n": (_YES, "choices, each with its own seed"),
    "stream": (_YES, ""),
    "stream_options": (_YES, "`include_usage`; `include_obfuscation` is without effect"),
    "max_tokens": (_YES, ""),
    "temperature": (_YES, ""),
    "top_p": (_YES, ""),
    "presence_penalty": (_YES, ""),
    "frequency_penalty": (_YES, ""),
    "logit_bias": (_YES, ""),
    "seed": (_YES, ""),
    "stop": (_YES, ""),
    "top_k": (_YES, "of other servers"),
    "min_p": (_YES, "of other servers"),
    "repetition_penalty": (_YES, "of other servers"),
    "ignore_eos": (_YES, "of other servers"),
    "stop_token_ids": (_YES, "of other servers"),
    "response_format": (_YES, "`text`, `json_object`, `json_schema`: [structured.md](structured.md)"),
    "structured_outputs": (_YES, "vLLM's: `json`, `regex`, `choice`, `grammar`, `json_object`"),
    "guided_json": (_YES, "vLLM's older name"),
    "guided_regex": (_YES, "vLLM's older name"),
    "guided_choice": (_YES, "vLLM's older name"),
    "guided_grammar": (_YES, "vLLM's older name"),
    "guided_whitespace_pattern": (_YES, "vLLM's older name; compact JSON without it"),
    "json_schema": (_YES, "SGLang's and llama.cpp's"),
    "regex": (_YES, "SGLang's"),
    "ebnf": (_YES, "SGLang's; GBNF or Lark's notation"),
    "user": (_IDLE, "no users are distinguished by it: `teneral.tenant` does"),
    "teneral": (_YES, "`first_token`, `cache_salt`, `session`, `tenant`, `priority`"),
}

COMPLETIONS: Fields = {
    "prompt": (_YES, "a text, tokens, or several of either"),
    **_GENERATION,
    "echo": (_YES, "without `logprobs`"),
    "logprobs": (_YES, "up to 20"),
    "best_of": (_YES, "where it equals `n`; else refused"),
    "suffix": (_NO, "this model only goes on from a prompt"),
}

CHAT: Fields = {
    "messages": (_YES, "text only; images and audio are refused"),
    **_GENERATION,
    "max_completion_tokens": (_YES, "goes before `max_tokens`"),
    "logprobs": (_YES, ""),
    "top_logprobs": (_YES, "up to 20"),
    "tools": (_YES, "given to the model's chat template"),
    "tool_choice": (_YES, "`auto` and `none`"),
    "parallel_tool_calls": (_YES, ""),
    "modalities": (_YES, "`text`; others are refused"),
    "metadata": (_IDLE, "nothing is stored"),
    "store": (_IDLE, "nothing is stored"),
    "prediction": (_IDLE, "a hint for speed alone; the answer is the same"),
    "prompt_cache_key": (_IDLE, "prompts are found by their content; `teneral.cache_salt` keeps them apart"),
    "prompt_cache_options": (_IDLE, "as `prompt_cache_key`"),
    "prompt_cache_retention": (_IDLE, "as `prompt_cache_key`"),
    "safety_identifier": (_IDLE, "nothing is reported"),
    "service_tier": (_IDLE, "there is one tier; `teneral.priority` is ours"),
    "audio": (_NO, "this model writes text"),
    "function_call": (_NO, "use `tool_choice`"),
    "functions": (_NO, "use `tools`"),
    "moderation": (_NO, "answers are not moderated"),
    "reasoning_effort": (_NO, "models take it by their chat templates, under names of their own"),
    "verbosity": (_NO, "say in a message how long the answer should be"),
    "web_search_options": (_NO, "this server does not search"),
}

EMBEDDINGS: Fields = {
    "input": (_YES, "a text, tokens, or several of either"),
    "model": (_YES, "the served model's name, or nothing"),
    "encoding_format": (_YES, "`float` or `base64`"),
    "dimensions": (_YES, "where the model has that number; else refused"),
    "user": (_IDLE, "no users are distinguished by it"),
    "teneral": (_YES, "there are no fields of ours here: any is refused"),
}

ROUTES: Mapping[str, Fields] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/embeddings": EMBEDDINGS,
}


def refuse_unsupported(body: Any, fields: Fields) -> None:
    """Raises `RequestError` for the first field that would change the answer and is not there."""
    for name, (effect, why) in fields.items():
        if effect is Effect.REFUSED and getattr(body, name) not in (None, ""):
            raise RequestError(f"{name} is not supported: {why}", param=name)


def as_markdown() -> str:
    """The table of docs/openai.md."""
    lines: list[str] = []
    for route, fields in ROUTES.items():
        lines += [f"### {route}", "", "| field | | |", "|---|---|---|"]
        lines += [f"| `{name}` | {effect} | {note} |" for name, (effect, note) in fields.items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
