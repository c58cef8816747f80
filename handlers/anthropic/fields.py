"""Each field of /v1/messages and its effect; docs/openai.md has the table."""

from __future__ import annotations

from ..openai.fields import Effect, Fields

_YES, _NO, _IDLE = Effect.HONOURED, Effect.REFUSED, Effect.WITHOUT_EFFECT

_PROMPT: Fields = {
    "model": (_YES, "the served model's name"),
    "messages": (
        _YES,
        "`text`, `tool_use`, `tool_result` and `thinking` blocks; a last assistant's is gone on from",
    ),
    "system": (_YES, "a text, or blocks of text"),
    "tools": (_YES, "functions; others are refused"),
    "tool_choice": (_YES, "`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`"),
    "thinking": (_YES, "where the model's template has `enable_thinking`; `budget_tokens` is without effect"),
    "output_config": (_YES, "`format`: `json_schema`; `effort` where the model's template takes it"),
    "cache_control": (_IDLE, "prompts are found by their content, here and in blocks"),
    "speed": (_NO, "there is one speed"),
    "user_profile_id": (_NO, "there are no profiles"),
    "workspace_id": (_NO, "there are no workspaces"),
}

MESSAGES: Fields = {
    **_PROMPT,
    "max_tokens": (_YES, ""),
    "stop_sequences": (_YES, ""),
    "stream": (_YES, ""),
    "temperature": (_YES, ""),
    "top_p": (_YES, ""),
    "top_k": (_YES, ""),
    "teneral": (_YES, "`first_token`, `cache_salt`, `session`, `tenant`, `priority`"),
    "metadata": (_IDLE, "no users are distinguished by it: `teneral.tenant` does"),
    "service_tier": (_IDLE, "there is one tier; `teneral.priority` is ours"),
    "container": (_NO, "nothing is stored"),
    "context_management": (_NO, "the context is the client's to shorten"),
    "diagnostics": (_NO, "there are none"),
    "inference_geo": (_NO, "this server is where it is"),
    "mcp_servers": (_NO, "this server calls no others"),
}

COUNT_TOKENS: Fields = {**_PROMPT}

ROUTES = {"/v1/messages": MESSAGES, "/v1/messages/count_tokens": COUNT_TOKENS}
