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
    "model": (_YES, "the served model's name, or nothing; `NAME:ADAPTER` for an [adapter](adapters.md)"),
    "lora": (_YES, "the name of an [adapter](adapters.md), where `model` names none"),
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
    "top_k": (_YES, "of other servers; 0 and -1 are all tokens"),
    "min_p": (_YES, "of other servers"),
    "repetition_penalty": (_YES, "of other servers"),
    "ignore_eos": (_YES, "of other servers"),
    "stop_token_ids": (_YES, "of other servers"),
    "min_tokens": (_YES, "vLLM's: no answer is shorter, unless its `response_format` is complete"),
    "bad_words": (_YES, "vLLM's: the tokens of each word, alone and after a space, are never completed"),
    "allowed_token_ids": (_YES, "vLLM's: the only tokens of an answer"),
    "include_stop_str_in_output": (_YES, "vLLM's"),
    "skip_special_tokens": (_YES, "vLLM's: with false special tokens have their text"),
    "truncate_prompt_tokens": (
        _YES,
        "vLLM's: only that number of the prompt's last tokens; -1: as many as fit",
    ),
    "prompt_logprobs": (_YES, "vLLM's: up to 20; not in a stream"),
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
    "no_stop_trim": (_NO, "SGLang's; false is what happens. Use `include_stop_str_in_output`"),
    "return_hidden_states": (_NO, "SGLang's; false is what happens"),
    "user": (_IDLE, "no users are distinguished by it: `teneral.tenant` does"),
    "teneral": (_YES, "`first_token`, `cache_salt`, `session`, `tenant`, `priority`"),
}

COMPLETIONS: Fields = {
    "prompt": (_YES, "a text, tokens, or several of either"),
    **_GENERATION,
    "echo": (_YES, ""),
    "logprobs": (_YES, "up to 20; with `echo` of the prompt, too, whose first token has none"),
    "best_of": (_YES, "choices, of which the `n` likeliest are given, by their tokens' mean log-probability"),
    "add_special_tokens": (_YES, "vLLM's: with false a prompt's text gets none"),
    "suffix": (_NO, "this model only goes on from a prompt"),
}

CHAT: Fields = {
    "messages": (
        _YES,
        "text only, and an assistant's refusals, which are text; images and audio are refused",
    ),
    **_GENERATION,
    "max_completion_tokens": (_YES, "goes before `max_tokens`"),
    "logprobs": (_YES, ""),
    "top_logprobs": (_YES, "up to 20"),
    "tools": (_YES, "functions: [tools.md](tools.md)"),
    "tool_choice": (_YES, "`auto`, `none`, `required`, a function, `allowed_tools`"),
    "parallel_tool_calls": (_YES, ""),
    "chat_template": (_YES, "vLLM's; where the server permits it, else refused"),
    "chat_template_kwargs": (_YES, "vLLM's; variables that the chat template has, others are refused"),
    "add_generation_prompt": (_YES, "vLLM's"),
    "continue_final_message": (_YES, "vLLM's"),
    "documents": (_YES, "where the chat template has them; else refused"),
    "reasoning_effort": (_YES, "where the chat template has it; else refused"),
    "modalities": (_YES, "`text`; others are refused"),
    "metadata": (_IDLE, "nothing is stored"),
    "store": (_IDLE, "nothing is stored"),
    "prediction": (_IDLE, "a hint for speed alone; the answer is the same"),
    "prompt_cache_key": (_IDLE, "prompts are found by their content; `teneral.cache_salt` keeps them apart"),
    "prompt_cache_options": (_IDLE, "as `prompt_cache_key`"),
    "prompt_cache_retention": (_IDLE, "as `prompt_cache_key`"),
    "safety_identifier": (_IDLE, "nothing is reported"),
    "service_tier": (_IDLE, "there is one tier; `teneral.priority` is ours"),
    "include_reasoning": (_NO, "vLLM's; true is what happens"),
    "separate_reasoning": (_NO, "SGLang's; true is what happens"),
    "stream_reasoning": (_NO, "SGLang's; true is what happens"),
    "audio": (_NO, "this model writes text"),
    "function_call": (_NO, "use `tool_choice`; `none` and `auto` are accepted"),
    "functions": (_NO, "use `tools`; an empty list is accepted"),
    "moderation": (_NO, "answers are not moderated"),
    "verbosity": (_NO, "say in a message how long the answer should be"),
    "web_search_options": (_NO, "this server does not search"),
}

EMBEDDINGS: Fields = {
    "input": (_YES, "a text, tokens, or several of either"),
    "model": (_YES, "the served model's name, or nothing"),
    "encoding_format": (_YES, "`float` or `base64`"),
    "dimensions": (_YES, "the first numbers, at unit length; more than the model has are refused"),
    "user": (_IDLE, "no users are distinguished by it"),
    "teneral": (_YES, "there are no fields of ours here: any is refused"),
}

RESPONSES: Fields = {
    "input": (
        _YES,
        "a text, or items: messages of text, `function_call`, `function_call_output`, `reasoning`",
    ),
    "model": (_YES, "the served model's name, or nothing"),
    "instructions": (_YES, "the first message, a system's"),
    "max_output_tokens": (_YES, ""),
    "temperature": (_YES, ""),
    "top_p": (_YES, ""),
    "top_logprobs": (_YES, "up to 20"),
    "include": (_YES, "`message.output_text.logprobs`; `reasoning.encrypted_content` is without effect"),
    "tools": (_YES, "functions; others are refused"),
    "tool_choice": (_YES, "`none`, `auto`, `required` or a function"),
    "parallel_tool_calls": (_YES, ""),
    "text": (_YES, "`format`: `text`, `json_object`, `json_schema`; `verbosity` is refused"),
    "reasoning": (_YES, "`effort`, where the model's template takes it; `summary` is without effect"),
    "stream": (_YES, ""),
    "stream_options": (_YES, "`include_obfuscation` is without effect; the last event has the usage"),
    "store": (_YES, "false, which is the default here: nothing is stored; true is refused"),
    "background": (_YES, "false; true is refused"),
    "truncation": (_YES, "`disabled`; `auto` is refused"),
    "metadata": (_YES, "comes back with the answer"),
    "teneral": (_YES, "`first_token`, `cache_salt`, `session`, `tenant`, `priority`"),
    "max_tool_calls": (_IDLE, "of tools that run on the server, of which there are none"),
    "prompt_cache_key": (_IDLE, "prompts are found by their content; `teneral.cache_salt` keeps them apart"),
    "prompt_cache_options": (_IDLE, "as `prompt_cache_key`"),
    "prompt_cache_retention": (_IDLE, "as `prompt_cache_key`"),
    "safety_identifier": (_IDLE, "nothing is reported"),
    "service_tier": (_IDLE, "there is one tier; `teneral.priority` is ours"),
    "user": (_IDLE, "no users are distinguished by it: `teneral.tenant` does"),
    "previous_response_id": (_NO, "nothing is stored: send the conversation's items as `input`"),
    "conversation": (_NO, "nothing is stored: send the conversation's items as `input`"),
    "prompt": (_NO, "nothing is stored: send the prompt's text"),
    "access_programs": (_NO, "there are none"),
    "background_options": (_NO, "answers come in the request"),
    "context_management": (_NO, "the context is the client's to shorten"),
    "image": (_NO, "this model writes text"),
    "moderation": (_NO, "answers are not moderated"),
}

TOKENIZE: Fields = {
    "model": (_YES, "the served model's name, or nothing"),
    "prompt": (_YES, "a text"),
    "messages": (_YES, "in place of `prompt`: the model's chat template makes one of them"),
    "add_special_tokens": (_YES, "of a prompt; true unless given"),
    "add_generation_prompt": (_YES, "of messages; true unless given"),
    "tools": (_YES, "of messages: given to the model's chat template"),
    "return_token_strs": (_YES, "`token_strs`: the tokens as the vocabulary spells them"),
    "chat_template": (_YES, "of messages, where the server permits it"),
    "chat_template_kwargs": (_YES, "of messages: as of /v1/chat/completions"),
    "continue_final_message": (_YES, "of messages"),
    "mm_processor_kwargs": (_NO, "this model takes text"),
}

DETOKENIZE: Fields = {
    "tokens": (_YES, "up to as many as a body may have; special ones have their text"),
    "model": (_YES, "the served model's name, or nothing"),
}

_ENCODER: Fields = {
    "model": (_YES, "the served model's name, or nothing"),
    "truncate_prompt_tokens": (
        _YES,
        "vLLM's: longer texts lose their last tokens, of a pair the second text first; -1: what the model takes",
    ),
    "use_activation": (_YES, "vLLM's: with false logits as they are"),
    "activation": (_YES, "vLLM's older name"),
    "user": (_IDLE, "no users are distinguished by it"),
    "priority": (_NO, "texts are served in the order in which they come"),
}

CLASSIFY: Fields = {"input": (_YES, "a text, or several"), **_ENCODER}

SCORE: Fields = {
    "text_1": (_YES, "a text, or as many as `text_2` has"),
    "text_2": (_YES, "a text, or several"),
    **_ENCODER,
}

RERANK: Fields = {
    "query": (_YES, "a text"),
    "documents": (_YES, "texts, or objects with a `text`"),
    "top_n": (_YES, "the best only; 0: all"),
    "return_documents": (_YES, "Jina's; true unless given"),
    "max_tokens_per_doc": (
        _YES,
        "Cohere's: longer documents lose their last tokens; without it they are refused",
    ),
    **_ENCODER,
    "rank_fields": (_NO, "documents have one field, `text`"),
}

ROUTES: Mapping[str, Fields] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/embeddings": EMBEDDINGS,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/v1/classify": CLASSIFY,
    "/v1/score": SCORE,
    "/v1/rerank": RERANK,
}


# Values of refused fields that request the default behaviour: vLLM's router sends them with each
# request.
_AS_IT_IS: Mapping[str, tuple[Any, ...]] = {
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    # Older clients', of a chat without functions.
    "functions": ([],),
    "function_call": ("none", "auto"),
}


def refuse_unsupported(body: Any, fields: Fields) -> None:
    """Raises `RequestError` for the first unsupported field that would change the answer."""
    for name, (effect, why) in fields.items():
        if effect is Effect.REFUSED and getattr(body, name) not in (None, "", *_AS_IT_IS.get(name, ())):
            raise RequestError(f"{name} is not supported: {why}", param=name)


def as_markdown(routes: Mapping[str, Fields] = ROUTES) -> str:
    """The tables of docs/openai.md, or of other routes."""
    lines: list[str] = []
    for route, fields in routes.items():
        lines += [f"### {route}", "", "| field | | |", "|---|---|---|"]
        lines += [f"| `{name}` | {effect} | {note} |" for name, (effect, note) in fields.items()]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
