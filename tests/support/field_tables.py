"""The fields that vLLM and llama.cpp know, and the tables of fields in docs/openai.md.

As of November 2026. A field that they know is never unknown here: a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from teneral.handlers.openai.fields import ROUTES, Fields


class OtherServers(NamedTuple):
    """The fields of one route."""

    vllm: frozenset[str]
    llama_cpp: frozenset[str]


def _names(*texts: str) -> frozenset[str]:
    return frozenset(name for text in texts for name in text.split())


_OPENAI = (
    "model n stream stream_options max_tokens temperature top_p presence_penalty frequency_penalty logit_bias seed "
    "stop"
)
_VLLM = (
    "user use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids "
    "include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens "
    "truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words "
    "add_special_tokens response_format structured_outputs priority request_id session_id "
    "return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs "
    "cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget "
    "stream_interval"
)
_LLAMA_CPP = (
    "verbose timings_per_token cache_prompt return_tokens return_progress sse_ping_interval n_predict n_indent n_keep "
    "n_discard n_cmpl n_cache_reuse t_max_predict_ms response_fields top_k min_p top_n_sigma xtc_probability "
    "xtc_threshold typical_p dynatemp_range dynatemp_exponent repeat_last_n repeat_penalty dry_multiplier dry_base "
    "dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target "
    "adaptive_decay n_probs min_keep backend_sampling post_sampling_probs json_schema grammar ignore_eos samplers "
    "id_slot lora"
)
_CHAT = (
    "messages max_completion_tokens logprobs top_logprobs tools tool_choice parallel_tool_calls reasoning_effort "
    "response_format chat_template_kwargs add_generation_prompt continue_final_message echo"
)
_MESSAGES = "model messages system tools tool_choice chat_template_kwargs"
_SAMPLED = "stream temperature top_p top_k"

OTHER_SERVERS: Mapping[str, OtherServers] = {
    "/v1/chat/completions": OtherServers(
        _names(
            *(_OPENAI, _VLLM, _CHAT),
            "include_reasoning documents chat_template media_io_kwargs mm_processor_kwargs return_prompt_text",
        ),
        _names(
            _OPENAI,
            _LLAMA_CPP,
            _CHAT,
            "reasoning_format parse_tool_calls reasoning_control reasoning_budget_tokens",
        ),
    ),
    "/v1/completions": OtherServers(
        _names(_OPENAI, _VLLM, "prompt echo logprobs suffix prompt_embeds"),
        _names(_OPENAI, _LLAMA_CPP, "prompt logprobs response_format"),
    ),
    "/v1/responses": OtherServers(
        _names(
            "background include input instructions max_output_tokens max_tool_calls metadata model parallel_tool_calls",
            "previous_response_id prompt reasoning service_tier store stream temperature text tool_choice tools",
            "top_logprobs top_p truncation user prompt_cache_key logit_bias top_k skip_special_tokens",
            "include_stop_str_in_output request_id mm_processor_kwargs priority cache_salt structured_outputs",
            "enable_response_messages previous_input_messages previous_response repetition_penalty seed stop",
            "ignore_eos vllm_xargs presence_penalty frequency_penalty",
        ),
        _names(
            "input instructions max_output_tokens model parallel_tool_calls reasoning stream temperature text",
            "tool_choice tools top_logprobs top_p",
        ),
    ),
    "/v1/messages": OtherServers(
        _names(_MESSAGES, "max_tokens metadata output_config kv_transfer_params stop_sequences", _SAMPLED),
        _names(_MESSAGES, "max_tokens metadata thinking stop_sequences", _SAMPLED),
    ),
    "/v1/messages/count_tokens": OtherServers(_names(_MESSAGES), _names(_MESSAGES, "thinking")),
}


def as_markdown(routes: Mapping[str, Fields] = ROUTES) -> str:
    """The tables of docs/openai.md, or of other routes; with the fields that other servers know, where a route is
    theirs, too.
    """
    lines: list[str] = []
    for route, fields in routes.items():
        others = OTHER_SERVERS.get(route)
        columns, rule = (" vLLM | llama.cpp |", "---|---|") if others else ("", "")
        lines += [f"### {route}", "", f"| field | |{columns} |", f"|---|---|{rule}---|"]
        for name, (effect, note) in fields.items():
            known = [] if others is None else ["yes" if name in each else "" for each in others]
            lines.append(f"| {' | '.join([f'`{name}`', str(effect), *known, note])} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
