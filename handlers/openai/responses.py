"""Response bodies as values, in the shapes of OpenAI's API. No rules here: what goes in is decided by the
routes.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ... import __version__

SYSTEM_FINGERPRINT = f"teneral-{__version__}"  # the same for two answers when the same code made them


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Token details. `drafted_tokens` is our own; the next two are OpenAI's names for the result
    of a prediction, from any source.
    """

    drafted_tokens: int | UnsetType = UNSET
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET  # of a model that reasons


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class PromptLogprob(msgspec.Struct, frozen=True):
    """One token in a place of the prompt, as vLLM has it."""

    logprob: float
    rank: int  # from 1
    decoded_token: str


PromptPlaces = list[dict[int, PromptLogprob] | None]  # a place a token; the first has none


class ChunkExtras(msgspec.Struct, frozen=True):
    """Teneral's own fields of an answer or a chunk."""

    drafted_tokens: int | UnsetType = UNSET  # of the tokens since the choice's last chunk
    warnings: list[str] | UnsetType = UNSET  # what of the request is without effect with this model


# -- /v1/chat/completions
# -----------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class ChatFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ChatCustom(msgspec.Struct, frozen=True):
    name: str
    input: str


class ChatCall(msgspec.Struct, frozen=True):
    """A call of a function, or of a custom tool."""

    id: str
    function: ChatFunction | UnsetType = UNSET
    type: Literal["function", "custom"] = "function"
    custom: ChatCustom | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same, as vLLM names it
    tool_calls: list[ChatCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | UnsetType = UNSET  # as vLLM has it: the stop string or stop token
    token_ids: list[int] | UnsetType = UNSET  # as vLLM has them


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptPlaces | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str = SYSTEM_FINGERPRINT
    teneral: ChunkExtras | UnsetType = UNSET


class ChatFunctionDelta(msgspec.Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ChatCustomDelta(msgspec.Struct, frozen=True):
    input: str
    name: str | UnsetType = UNSET


class ChatCallDelta(msgspec.Struct, frozen=True):
    index: int
    function: ChatFunctionDelta | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    custom: ChatCustomDelta | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChatCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | UnsetType = UNSET  # as vLLM has it: the stop string or stop token
    token_ids: list[int] | UnsetType = UNSET  # as vLLM has them, with the first chunk of a step


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first chunk
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str = SYSTEM_FINGERPRINT
    teneral: ChunkExtras | UnsetType = UNSET


# -- /v1/completions
# ----------------------------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Columns, one entry a token. The first token of an echoed prompt has no log-probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptPlaces | UnsetType = UNSET
    stop_reason: str | int | UnsetType = UNSET  # as vLLM has it: the stop string or stop token
    token_ids: list[int] | UnsetType = UNSET  # as vLLM has them
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """The whole, and the chunks of a stream as well: the API has one shape for both."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str = SYSTEM_FINGERPRINT
    teneral: ChunkExtras | UnsetType = UNSET  # in chunks only


# -- /v1/embeddings
# -----------------------------------------------------------------------------------------------------


class Embedding(msgspec.Struct, frozen=True):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class Transcription(msgspec.Struct, frozen=True):
    text: str


# -- /v1/models
# ---------------------------------------------------------------------------------------------------------


class Architecture(msgspec.Struct, frozen=True):
    """OpenRouter's."""

    input_modalities: list[Literal["text", "image", "audio"]]
    output_modalities: list[Literal["text"]]


class Model(msgspec.Struct, frozen=True):
    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "teneral"
    parent: str | UnsetType = UNSET  # of an adapter: its base
    max_model_len: int | UnsetType = UNSET  # tokens of prompt and answer together; once it is known
    architecture: Architecture | UnsetType = UNSET  # of a model that writes text; likewise


class ModelList(msgspec.Struct, frozen=True):
    data: list[Model]
    object: Literal["list"] = "list"
