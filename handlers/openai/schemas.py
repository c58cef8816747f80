"""Request bodies as values: the fields of each route, and the errors for invalid ones.

A field that is unknown here, or of a wrong type, is refused by name, and null means the default: a field that is
ignored gives a client another answer than it asked for. What each field of each route comes to is in `fields.py`.
These are shapes only: ranges and combinations are checked where the values are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from ...runtime.errors import RequestError
from ...runtime.step.requests import FirstToken, Priority

Prompt = str | list[str | int | list[int]]
"""A text, tokens, or several of either; which one a list is, its items say (`prompts.py`)."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # without effect: chunks are never padded
    continuous_usage_stats: bool | None = None  # vLLM's: with include_usage, each chunk has the usage so far


class Extras(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Teneral's own fields of a generation."""

    first_token: FirstToken | None = None  # None: as the server is set
    cache_salt: str | None = None  # shares keys and values only with requests that give the same
    session: str | None = None  # keeps what was computed for the next request that names the same
    tenant: str | None = None  # shares its turns in the queue with requests that give the same
    priority: Priority | None = None  # None: interactive


class NoExtras(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No fields: vectors are always those of the exact weights."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema_: dict[str, Any] | bool | None = msgspec.field(name="schema", default=None)
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # without effect: every answer is of its schema


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `text`, `json_object` and `json_schema`; a schema may also come with `json_object`."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | bool | None = msgspec.field(name="schema", default=None)


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of these, all but `whitespace_pattern` exclude one another."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None


class GenerationBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The fields that /v1/completions and /v1/chat/completions share."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    # Of other servers' APIs
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    # The form of the answer, in the words of several servers; at most one may be given (`structured.py`)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    # vLLM's and llama.cpp's names of fields of ours
    cache_salt: str | None = None
    priority: int | None = None
    session_id: str | None = None
    n_predict: int | None = None
    repeat_penalty: float | None = None
    thinking_token_budget: int | None = None
    # What an answer has besides
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    lora: str | None = None  # the name of an adapter, where `model` names none
    teneral: Extras | None = None
    # Without effect on an answer (`fields.py`)
    user: str | None = None
    cache_prompt: Any = None
    id_slot: Any = None
    samplers: Any = None
    backend_sampling: Any = None
    n_keep: Any = None
    n_discard: Any = None
    n_cache_reuse: Any = None
    repeat_last_n: Any = None
    timings_per_token: Any = None
    response_fields: Any = None
    sse_ping_interval: Any = None
    stream_interval: Any = None
    return_mm_kwargs: Any = None
    xtc_threshold: Any = None
    dynatemp_exponent: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None
    adaptive_decay: Any = None
    dry_base: Any = None
    dry_allowed_length: Any = None
    dry_penalty_last_n: Any = None
    dry_sequence_breakers: Any = None
    # Refused, unless null or what happens in any case (`fields.py`)
    no_stop_trim: bool | None = None
    return_hidden_states: bool | None = None
    use_beam_search: Any = None
    length_penalty: Any = None
    spaces_between_special_tokens: Any = None
    truncation_side: Any = None
    watermarking: Any = None
    logprob_token_ids: Any = None
    repetition_detection: Any = None
    routed_experts_prompt_start: Any = None
    return_token_offsets: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None
    typical_p: Any = None
    top_n_sigma: Any = None
    xtc_probability: Any = None
    dynatemp_range: Any = None
    mirostat: Any = None
    adaptive_target: Any = None
    dry_multiplier: Any = None
    min_keep: Any = None
    n_cmpl: Any = None
    n_indent: Any = None
    n_probs: Any = None
    post_sampling_probs: Any = None
    return_tokens: Any = None
    return_progress: Any = None
    t_max_predict_ms: Any = None
    verbose: Any = None

    @property
    def includes_usage(self) -> bool:
        """True if a stream is to end with its usage. Its other chunks then have it as null."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_usage_so_far(self) -> bool:
        """True if each chunk of a stream is to have the usage up to it."""
        options = self.stream_options
        return self.includes_usage and options is not None and bool(options.continuous_usage_stats)


class CompletionBody(GenerationBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    prompt: Prompt
    add_special_tokens: bool | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    prompt_embeds: Any = None  # refused, unless null


class ImageUrl(msgspec.Struct, frozen=True):
    url: str
    detail: str | None = None  # without effect


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None  # of an assistant's part of this type, as OpenAI's answers have it
    image_url: str | ImageUrl | None = None

    @property
    def is_image(self) -> bool:
        return self.type == "image_url"


class PlacedPart(ContentPart, frozen=True):
    """A part made of another API's; no client's body has one."""

    place: str = ""  # of the client's part, which errors name


def part_text(kind: str, text: str | None, param: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a part of one of these kinds. Raises `RequestError`, naming `param`."""
    if kind not in kinds:
        raise RequestError(
            f"{param} is of type {kind[:50]!r}; texts are taken, and images by models that see", param=param
        )
    if text is None:
        raise RequestError(f"{param}.text is missing", param=f"{param}.text")
    return text


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON, as the model wrote it


class CustomCall(msgspec.Struct, frozen=True):
    name: str
    input: str


class ToolCall(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A call of a function. One of a custom tool comes as `custom`, and has the function that it is for the model."""

    id: str | None = None
    type: Literal["function", "custom"] = "function"
    function: FunctionCall = FunctionCall("", "")
    custom: CustomCall | None = None
    index: int | None = None  # some clients send a call back as it came in a stream
    # Of other providers, without effect: their clients keep them in histories
    provider_specific_fields: Any = None
    extra_content: Any = None
    cache_control: Any = None

    def __post_init__(self) -> None:
        if self.custom is not None:
            arguments = msgspec.json.encode({"input": self.custom.input}).decode()
            msgspec.structs.force_setattr(self, "function", FunctionCall(self.custom.name, arguments))
        elif not self.function.name:
            raise ValueError(f"Object missing required field `{self.type}`")


class Message(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as vLLM names it
    reasoning_details: list[dict[str, Any]] | None = None  # the same, as OpenRouter has it
    prefix: bool | None = None  # of the last message, an assistant's: as `continue_final_message`
    # Of other providers, without effect: their clients keep them in histories
    id: str | None = None
    provider_specific_fields: Any = None
    thinking_blocks: Any = None
    cache_control: Any = None
    # As answers have them, which clients send back; of any use only where they are null or empty
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenRouter's options of reasoning, to which those of other APIs come."""

    effort: str | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    summary: str | None = None  # without effect: reasoning is given whole


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """Anthropic's, DeepSeek's and GLM's options of reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None  # where it is enabled
    display: str | None = None  # `omitted`: without its text, in messages


class UsageOptions(msgspec.Struct, frozen=True, kw_only=True):
    """OpenRouter's."""

    include: bool | None = None


class ChatBody(GenerationBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningOptions | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    reasoning_budget_tokens: int | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_format: str | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    usage: UsageOptions | None = None
    # Without effect on an answer: docs/openai.md says why
    metadata: dict[str, str] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    cache_control: Any = None
    context_management: Any = None
    include_server_side_tool_invocations: bool | None = None
    models: list[str] | None = None
    provider: Any = None
    route: str | None = None
    stop_server_tools_when: Any = None
    trace: Any = None
    # Refused, unless null or what happens in any case (`fields.py`)
    stream_reasoning: bool | None = None
    return_prompt_text: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    parse_tool_calls: Any = None
    reasoning_control: Any = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    moderation: Any = None
    web_search_options: Any = None
    debug: Any = None
    deferred_tools: Any = None
    image_config: Any = None
    plugins: Any = None
    top_a: Any = None
    transforms: Any = None

    @property
    def has_images(self) -> bool:
        parts = (message.content for message in self.messages if isinstance(message.content, list))
        return any(part.is_image for content in parts for part in content)

    @property
    def includes_usage(self) -> bool:
        return super().includes_usage or (self.usage is not None and bool(self.usage.include))


class PlacedChat(ChatBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A chat made of another API's request, whose errors name the client's fields. Never a client's body."""

    tool_places: list[str]  # of `tools`, in their order


class EmbeddingBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None  # without effect
    teneral: NoExtras | None = None
