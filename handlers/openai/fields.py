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
    "stream_options": (
        _YES,
        "`include_usage`; vLLM's `continuous_usage_stats`; `include_obfuscation` is without effect",
    ),
    **dict.fromkeys(("max_tokens", "temperature", "top_p", "presence_penalty"), (_YES, "")),
    **dict.fromkeys(("frequency_penalty", "logit_bias", "seed", "stop"), (_YES, "")),
    "top_k": (_YES, "of other servers; 0 and -1 are all tokens"),
    **dict.fromkeys(
        ("min_p", "repetition_penalty", "ignore_eos", "stop_token_ids"), (_YES, "of other servers")
    ),
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
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"), (_YES, "vLLM's older name")
    ),
    "guided_whitespace_pattern": (_YES, "vLLM's older name; compact JSON without it"),
    "json_schema": (_YES, "SGLang's and llama.cpp's"),
    "regex": (_YES, "SGLang's"),
    "ebnf": (_YES, "SGLang's; GBNF or Lark's notation"),
    "grammar": (_YES, "llama.cpp's; as `ebnf`"),
    "cache_salt": (_YES, "vLLM's; as `teneral.cache_salt`"),
    "priority": (_YES, "vLLM's; above 0: `teneral.priority` `batch`, else `interactive`"),
    "session_id": (_YES, "vLLM's; as `teneral.session`"),
    "n_predict": (_YES, "llama.cpp's `max_tokens`, where there is none; -1: until the context is full"),
    "repeat_penalty": (_YES, "llama.cpp's `repetition_penalty`"),
    "request_id": (_YES, "vLLM's: the end of the answer's `id`"),
    "return_token_ids": (_YES, "vLLM's: `prompt_token_ids` and each choice's `token_ids`"),
    "return_tokens_as_token_ids": (_YES, "vLLM's: log-probabilities name tokens as `token_id:7`"),
    "teneral": (_YES, "`first_token`, `cache_salt`, `session`, `tenant`, `priority`"),
    "user": (_IDLE, "no users are distinguished by it: `teneral.tenant` does"),
    "cache_prompt": (_IDLE, "the KV cache keeps the beginnings of all prompts"),
    "id_slot": (_IDLE, "sequences have no slots to choose from"),
    "samplers": (_IDLE, "the order of samplers is fixed"),
    "backend_sampling": (_IDLE, "the same tokens either way"),
    **dict.fromkeys(("n_keep", "n_discard", "n_cache_reuse"), (_IDLE, "a context is never shifted")),
    "repeat_last_n": (_IDLE, "penalties count all tokens"),
    "timings_per_token": (_IDLE, "`/metrics` has times"),
    "response_fields": (_IDLE, "answers have all fields"),
    "sse_ping_interval": (_IDLE, "idle streams get a comment every few seconds"),
    "stream_interval": (_IDLE, "a chunk has the tokens that are there"),
    "return_mm_kwargs": (_IDLE, "of another route"),
    **dict.fromkeys(
        (
            *("xtc_threshold", "dynatemp_exponent", "mirostat_tau", "mirostat_eta", "adaptive_decay"),
            *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        ),
        (_IDLE, "of a sampler that is off: its switch is refused"),
    ),
    "no_stop_trim": (_NO, "SGLang's; false is what happens. Use `include_stop_str_in_output`"),
    "return_hidden_states": (_NO, "SGLang's; false is what happens"),
    "use_beam_search": (_NO, "false is what happens; `best_of` of /v1/completions gives the likeliest"),
    "length_penalty": (_NO, "of a beam search; 1 is what happens"),
    "spaces_between_special_tokens": (_NO, "true is what happens"),
    "truncation_side": (_NO, "`left` is what happens"),
    "watermarking": (_NO, "false is what happens"),
    "logprob_token_ids": (_NO, "use `logprobs`"),
    "repetition_detection": (_NO, "use `repetition_penalty`"),
    "routed_experts_prompt_start": (_NO, "answers have no routes of experts"),
    "return_token_offsets": (_NO, "false is what happens"),
    **dict.fromkeys(
        ("kv_transfer_params", "ec_transfer_params"), (_NO, "this server computes prompts and answers")
    ),
    "vllm_xargs": (_NO, "of vLLM's own extensions"),
    **dict.fromkeys(
        (
            *("typical_p", "top_n_sigma", "xtc_probability", "dynatemp_range", "mirostat"),
            *("adaptive_target", "dry_multiplier"),
        ),
        (_NO, "llama.cpp's sampler; the value that switches it off is accepted"),
    ),
    "min_keep": (_NO, "0 is what happens"),
    "n_cmpl": (_NO, "use `n`"),
    "n_indent": (_NO, "0 is what happens"),
    "n_probs": (_NO, "use `logprobs`"),
    "post_sampling_probs": (_NO, "false is what happens"),
    "return_tokens": (_NO, "use `return_token_ids`"),
    "return_progress": (_NO, "false is what happens"),
    "t_max_predict_ms": (_NO, "use the header `Deadline-Ms`; 0 and -1 are accepted"),
    "verbose": (_NO, "false is what happens"),
}

# Of those, what bodies of other APIs have as well, by the same names.
SHARED_GENERATION = (
    *(
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "stop",
    ),
    *("ignore_eos", "stop_token_ids", "min_tokens", "bad_words", "allowed_token_ids", "skip_special_tokens"),
    *("include_stop_str_in_output", "structured_outputs", "cache_salt", "priority", "session_id"),
)

# OpenRouter's.
ROUTER: Fields = {
    **dict.fromkeys(("models", "provider", "route"), (_IDLE, "OpenRouter's, of a router: `model` is served")),
    "stop_server_tools_when": (_IDLE, "OpenRouter's: no tools run on the server"),
    "trace": (_IDLE, "OpenRouter's: nothing is reported"),
}

COMPLETIONS: Fields = {
    "prompt": (_YES, "a text, tokens, or several of either"),
    **_GENERATION,
    "echo": (_YES, ""),
    "logprobs": (_YES, "up to 20; with `echo` of the prompt, too, whose first token has none"),
    "best_of": (_YES, "choices, of which the `n` likeliest are given, by their tokens' mean log-probability"),
    "add_special_tokens": (_YES, "vLLM's: with false a prompt's text gets none"),
    "thinking_token_budget": (_NO, "of chats; -1 is accepted"),
    "suffix": (_YES, "where the vocabulary has tokens for filling in the middle; else refused"),
    "prompt_embeds": (_NO, "send `prompt`"),
}

INFILL: Fields = {
    "input_prefix": (_YES, "the text before the place"),
    "input_suffix": (_YES, "the text behind it"),
    "input_extra": (_YES, "other files: `filename`, `text`"),
    "prompt": (_YES, "the beginning of the answer"),
    **_GENERATION,
    "n": (_YES, "1; others are refused"),
    "thinking_token_budget": (_NO, "of chats; -1 is accepted"),
    "stream_options": (_IDLE, "the last chunk has the counts"),
    **dict.fromkeys(("t_max_prompt_ms", "t_max_predict_ms"), (_IDLE, "the header `Deadline-Ms` is a limit")),
}

LLAMA_CPP_COMPLETION: Fields = {
    **{name: INFILL[name] for name in INFILL if not name.startswith("input_")},
    "prompt": (_YES, "a text, or tokens"),
}

CHAT: Fields = {
    "messages": (
        _YES,
        "text, and an assistant's refusals, which are text; `image_url` where the model takes images; audio is refused",
    ),
    **_GENERATION,
    "max_completion_tokens": (_YES, "goes before `max_tokens`"),
    "logprobs": (_YES, ""),
    "top_logprobs": (_YES, "up to 20"),
    "tools": (_YES, "functions and custom tools: [tools.md](tools.md)"),
    "tool_choice": (_YES, "`auto`, `none`, `required`, a function, a custom tool, `allowed_tools`"),
    "parallel_tool_calls": (_YES, ""),
    "chat_template": (_YES, "vLLM's; where the server permits it, else refused"),
    "chat_template_kwargs": (_YES, "vLLM's; variables that the chat template has, others are refused"),
    "add_generation_prompt": (_YES, "vLLM's"),
    "add_special_tokens": (_YES, "vLLM's: with true also those that the chat template does not write"),
    "continue_final_message": (_YES, "vLLM's"),
    "echo": (_YES, "vLLM's: the answer begins with the last message, if that is an assistant's"),
    "documents": (_YES, "where the chat template has them; else refused"),
    "reasoning_effort": (
        _YES,
        "where the chat template has it; `none` switches reasoning off where the template can; else without "
        "effect, with a warning in the answer",
    ),
    "thinking_token_budget": (
        _YES,
        "vLLM's: the most tokens of reasoning; its end is forced then; -1: no limit. Without effect, with a warning, "
        "where the model does not reason",
    ),
    "thinking_budget": (_YES, "Qwen's; as `thinking_token_budget`"),
    "reasoning_budget_tokens": (_YES, "llama.cpp's; as `thinking_token_budget`"),
    "reasoning": (
        _YES,
        "OpenRouter's: `effort`, `max_tokens`, `enabled`, `exclude`, as the fields here; `summary` is without effect",
    ),
    "thinking": (
        _YES,
        "Anthropic's, DeepSeek's and GLM's: `type` is `enabled`, `adaptive` or `disabled`, as `reasoning.enabled`; "
        "`budget_tokens`, as `thinking_token_budget`; its other fields are without effect",
    ),
    "enable_thinking": (_YES, "Qwen's; as `reasoning.enabled`"),
    "include_reasoning": (_YES, "vLLM's; with false answers have no reasoning"),
    "separate_reasoning": (_YES, "SGLang's; with false reasoning is text of the answer"),
    "reasoning_format": (
        _YES,
        "llama.cpp's: `auto`, `deepseek`; `none`: reasoning is text of the answer; and Groq's "
        "`parsed`, `raw` and `hidden`",
    ),
    "verbosity": (_YES, "where the chat template has it; else without effect, with a warning in the answer"),
    "modalities": (_YES, "`text`; others are refused"),
    "usage": (_YES, "OpenRouter's: `include`, as `stream_options.include_usage`"),
    "metadata": (_IDLE, "nothing is stored"),
    "store": (_IDLE, "nothing is stored"),
    "prediction": (_IDLE, "a hint for speed alone; the answer is the same"),
    "prompt_cache_key": (_IDLE, "prompts are found by their content; `teneral.cache_salt` keeps them apart"),
    "prompt_cache_options": (_IDLE, "as `prompt_cache_key`"),
    "prompt_cache_retention": (_IDLE, "as `prompt_cache_key`"),
    "safety_identifier": (_IDLE, "nothing is reported"),
    "service_tier": (_IDLE, "there is one tier; `teneral.priority` is ours"),
    "cache_control": (_IDLE, "the KV cache keeps the beginnings of all prompts"),
    "context_management": (_IDLE, "nothing is compacted"),
    "include_server_side_tool_invocations": (_IDLE, "no tools run on the server"),
    **ROUTER,
    "stream_reasoning": (_NO, "SGLang's; true is what happens"),
    "return_prompt_text": (_NO, "use /apply-template"),
    **dict.fromkeys(
        ("media_io_kwargs", "mm_processor_kwargs"), (_NO, "images are prepared as the model says")
    ),
    "parse_tool_calls": (_NO, "true is what happens; `--tool-parser off` is the server's"),
    "reasoning_control": (_NO, "false is what happens"),
    "audio": (_NO, "this model writes text"),
    "function_call": (_NO, "use `tool_choice`; `none` and `auto` are accepted"),
    "functions": (_NO, "use `tools`; an empty list is accepted"),
    "moderation": (_NO, "answers are not moderated"),
    "web_search_options": (_NO, "this server does not search"),
    "debug": (_NO, "OpenRouter's: there is no other server's request to show"),
    "deferred_tools": (_NO, "OpenRouter's: all tools are in the prompt"),
    "image_config": (_NO, "OpenRouter's: this model writes text"),
    "plugins": (_NO, "OpenRouter's: this server has none; an empty list is accepted"),
    "top_a": (_NO, "OpenRouter's: 0 is what happens; use `min_p`"),
    "transforms": (
        _NO,
        "OpenRouter's: a prompt is not shortened unless `truncate_prompt_tokens` says so; an empty list is accepted",
    ),
}

EMBEDDINGS: Fields = {
    "input": (_YES, "a text, tokens, or several of either"),
    "model": (_YES, "the served model's name, or nothing"),
    "encoding_format": (_YES, "`float` or `base64`"),
    "dimensions": (_YES, "the first numbers, at unit length; more than the model has are refused"),
    "truncate_prompt_tokens": (
        _YES,
        "vLLM's: longer texts lose their last tokens; -1: what the model takes, as sentence-transformers does",
    ),
    "user": (_IDLE, "no users are distinguished by it"),
    "teneral": (_YES, "there are no fields of ours here: any is refused"),
}

RESPONSES: Fields = {
    "input": (
        _YES,
        "a text, or items: messages of text and `input_image`, `agent_message`, `function_call`, "
        "`custom_tool_call`, a client's `tool_search_call` and their outputs, `reasoning`, "
        "`item_reference`; items of tools that OpenAI runs are left out with a warning",
    ),
    "model": (_YES, "the served model's name, or nothing"),
    "instructions": (_YES, "the first message, a system's"),
    "max_output_tokens": (_YES, ""),
    "temperature": (_YES, ""),
    "top_p": (_YES, ""),
    "top_logprobs": (_YES, "up to 20"),
    "include": (_YES, "`message.output_text.logprobs`; OpenAI's others are without effect"),
    "tools": (
        _YES,
        "functions and custom tools, also in a `namespace`, and a client's `tool_search`; "
        "others are left out with a warning, or refused if required",
    ),
    "tool_choice": (_YES, "`none`, `auto`, `required`, a function, a custom tool, `allowed_tools`"),
    "parallel_tool_calls": (_YES, ""),
    "text": (
        _YES,
        "`format`: `text`, `json_object`, `json_schema`; `verbosity` where the model's template takes it, else a "
        "warning",
    ),
    "reasoning": (
        _YES,
        "`effort` where the model's template takes it, else a warning; `summary` is without effect, with a warning; "
        "OpenRouter's `max_tokens` and `enabled`, as of /v1/chat/completions",
    ),
    "stream": (_YES, ""),
    "stream_options": (_YES, "`include_obfuscation` is without effect; the last event has the usage"),
    "store": (_YES, "true unless given: kept within `--responses-bytes` and `--responses-idle-s`"),
    "background": (_YES, "with `stream`, too: its events are found by the id"),
    "truncation": (_YES, "`auto`: the oldest messages are left out where the context is full; `disabled`"),
    "metadata": (_YES, "comes back with the answer"),
    "previous_response_id": (_YES, "of an answer that is stored, by the same API key"),
    "conversation": (_YES, "of /v1/conversations: its items come first, and the answer's are added"),
    "teneral": (_YES, "`first_token`, `cache_salt`, `session`, `tenant`, `priority`"),
    **{name: _GENERATION[name] for name in SHARED_GENERATION},
    **{name: CHAT[name] for name in ("chat_template_kwargs", "enable_thinking", "modalities")},
    "max_tool_calls": (_IDLE, "of tools that run on the server, of which there are none"),
    "prompt_cache_key": (_IDLE, "prompts are found by their content; `teneral.cache_salt` keeps them apart"),
    "prompt_cache_options": (_IDLE, "as `prompt_cache_key`"),
    "prompt_cache_retention": (_IDLE, "as `prompt_cache_key`"),
    "safety_identifier": (_IDLE, "nothing is reported"),
    "service_tier": (_IDLE, "there is one tier; `teneral.priority` is ours"),
    "user": (_IDLE, "no users are distinguished by it: `teneral.tenant` does"),
    "client_metadata": (_IDLE, "Codex's: nothing is reported"),
    "context_management": (_IDLE, "nothing is compacted; `truncation` shortens a context that is full"),
    "request_id": (_IDLE, "vLLM's: an answer's id is the server's, for it names the stored answer"),
    **ROUTER,
    "prompt": (_NO, "no prompts are stored: send the prompt's text"),
    "access_programs": (_NO, "there are none"),
    "background_options": (_NO, "there are none"),
    "image": (_NO, "this model writes text"),
    "moderation": (_NO, "answers are not moderated"),
    "multi_agent": (_NO, "this server runs no agents"),
    "enable_response_messages": (_NO, "vLLM's: false is what happens"),
    "previous_input_messages": (_NO, "vLLM's: send its items in `input`"),
    "previous_response": (_NO, "vLLM's: send `previous_response_id`, or its items in `input`"),
    "mm_processor_kwargs": CHAT["mm_processor_kwargs"],
    "vllm_xargs": _GENERATION["vllm_xargs"],
    **{name: CHAT[name] for name in ("image_config", "plugins", "transforms")},
}

COUNT_INPUT_TOKENS: Fields = {
    **{
        name: RESPONSES[name]
        for name in (
            *("input", "model", "instructions", "tools", "tool_choice", "parallel_tool_calls", "text"),
            *("reasoning", "previous_response_id", "conversation"),
        )
    },
    "truncation": (_IDLE, "nothing is left out of the count"),
    "personality": (_IDLE, "say in `instructions` how the model should answer"),
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
    "content": (_YES, "llama.cpp's `prompt`, without special tokens around it unless `add_special` is true"),
    "add_special": (_YES, "llama.cpp's, of `content`"),
    "with_pieces": (
        _YES,
        "llama.cpp's: each token with its text as `piece`, or its bytes where these are no text",
    ),
    "parse_special": (_NO, "llama.cpp's: true is what happens"),
    "mm_processor_kwargs": (_NO, "this model takes text"),
}

APPLY_TEMPLATE: Fields = {
    "messages": (_YES, ""),
    **{
        name: TOKENIZE[name]
        for name in (
            *("model", "tools", "add_generation_prompt", "continue_final_message"),
            *("chat_template", "chat_template_kwargs"),
        )
    },
    "reasoning_effort": (_YES, "as of /v1/chat/completions"),
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
    "instruction": (_YES, "of a model whose chat template writes pairs: replaces its own"),
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
    "instruction": (_YES, "of a model whose chat template writes pairs: replaces its own"),
    **_ENCODER,
    "rank_fields": (_NO, "documents have one field, `text`"),
}

ROUTES: Mapping[str, Fields] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/completion": LLAMA_CPP_COMPLETION,
    "/infill": INFILL,
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": COUNT_INPUT_TOKENS,
    "/v1/embeddings": EMBEDDINGS,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/apply-template": APPLY_TEMPLATE,
    "/v1/classify": CLASSIFY,
    "/v1/score": SCORE,
    "/v1/rerank": RERANK,
}


# Values of refused fields that request the default behaviour: vLLM's router sends them with each
# request.
_AS_IT_IS: Mapping[str, tuple[Any, ...]] = {
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "stream_reasoning": (True,),
    # vLLM's and llama.cpp's defaults: their clients send them all.
    **dict.fromkeys(("spaces_between_special_tokens", "parse_tool_calls", "parse_special"), (True,)),
    **dict.fromkeys(
        (
            *("use_beam_search", "watermarking", "return_token_offsets", "return_prompt_text"),
            *("post_sampling_probs", "return_tokens", "return_progress", "verbose", "reasoning_control"),
            "enable_response_messages",
        ),
        (False,),
    ),
    **dict.fromkeys(
        (
            *("routed_experts_prompt_start", "min_keep", "n_indent", "n_probs", "xtc_probability"),
            *("dynatemp_range", "mirostat", "dry_multiplier", "top_a"),
        ),
        (0,),
    ),
    **dict.fromkeys(("vllm_xargs", "media_io_kwargs", "mm_processor_kwargs"), ({},)),
    **dict.fromkeys(("length_penalty", "typical_p", "n_cmpl"), (1,)),
    **dict.fromkeys(("t_max_predict_ms", "top_n_sigma"), (0, -1)),
    **dict.fromkeys(("adaptive_target", "thinking_token_budget"), (-1,)),
    "truncation_side": ("left",),
    "speed": ("standard",),
    # Older clients', of a chat without functions.
    "functions": ([],),
    **dict.fromkeys(("plugins", "transforms", "previous_input_messages"), ([],)),
    **dict.fromkeys(("debug", "image_config"), ({},)),
    "function_call": ("none", "auto"),
}


def refuse_unsupported(body: Any, fields: Fields) -> None:
    """Raises `RequestError` for the first unsupported field that would change the answer."""
    for name, (effect, why) in fields.items():
        if effect is Effect.REFUSED and getattr(body, name) not in (None, "", *_AS_IT_IS.get(name, ())):
            raise RequestError(f"{name} is not supported: {why}", param=name)
