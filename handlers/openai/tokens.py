"""POST /tokenize and /detokenize, as vLLM has them: from texts or messages to tokens, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from ...runtime.errors import RequestError
from ...runtime.text.backend import MAX_TOKEN
from ..http.json_bodies import JsonDecoder, encode
from ..http.service import Service
from .chat import chat_settings
from .chat_request import ChatRequest
from .fields import TOKENIZE, refuse_unsupported
from .generation import make_format
from .logprobs import token_bytes
from .schemas import ChatBody, Message

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer


class ChatPromptBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The fields of a chat that make its prompt."""

    model: str | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None


class PromptBody(ChatPromptBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Messages, with what belongs to them."""

    messages: list[Message]
    reasoning_effort: str | None = None


class TokenizeBody(ChatPromptBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A text, or messages with what belongs to them."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    # llama.cpp's
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    parse_special: Any = None  # refused, unless null or true
    mm_processor_kwargs: Any = None


class DetokenizeBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class TokenPiece(msgspec.Struct, frozen=True):
    id: int
    piece: str | list[int]  # its text, or its bytes


class Tokenized(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int | TokenPiece]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str
    content: str  # the same, as llama.cpp names it


class TokenRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._tokenize = JsonDecoder(TokenizeBody)
        self._detokenize = JsonDecoder(DetokenizeBody)

    async def tokenize(self, request: web.Request) -> web.Response:
        service = self._service
        async with service.admission.body(request) as data:
            body = self._tokenize.decode(data)
            service.check_model(body.model)
            _check(body)
            chat = None
            if body.messages is not None:
                make = partial(prompt_chat, body, service)
                chat = await make_format(service, len(data), make, has_schema=bool(body.tools))
            tokenizer = await service.tokenizer()
            tokens, pieces = await service.text_threads.run(len(data), _tokens_of, body, chat, tokenizer)
        answer = Tokenized(len(tokens), await service.context_tokens(), list(tokens), pieces)
        return web.Response(body=encode(answer), content_type="application/json")

    async def detokenize(self, request: web.Request) -> web.Response:
        service = self._service
        async with service.admission.body(request) as data:
            body = self._detokenize.decode(data)
            service.check_model(body.model)
            if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < MAX_TOKEN:
                raise RequestError("tokens has a number that no vocabulary could have", param="tokens")
            tokenizer = await service.tokenizer()
            text = await service.text_threads.run(
                len(data), tokenizer.decode, body.tokens, skip_special_tokens=False
            )
        return web.Response(body=encode(Detokenized(text, text)), content_type="application/json")


def prompt_chat(body: ChatPromptBody, service: Service) -> ChatRequest:
    """The chat whose prompt is asked for, which is then the same."""
    chat = ChatBody(
        messages=body.messages or [],
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort if isinstance(body, PromptBody) else None,
    )
    return ChatRequest(chat, request_id="tokenize", settings=chat_settings(service))


# Fields of a prompt of messages.
_OF_CHATS = (
    "add_generation_prompt",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
)


def _check(body: TokenizeBody) -> None:
    refuse_unsupported(body, TOKENIZE)
    if sum(each is not None for each in (body.prompt, body.messages, body.content)) != 1:
        raise RequestError("one of prompt, messages and content must be given", param="prompt")
    if body.add_special is not None and body.content is None:
        raise RequestError("add_special is for content", param="add_special")
    if body.messages is None:
        for name in _OF_CHATS:
            if getattr(body, name) is not None:
                raise RequestError(f"{name} is for messages, and there is a prompt", param=name)
    elif body.add_special_tokens:
        raise RequestError(
            "add_special_tokens is for a prompt: the chat template writes those of messages",
            param="add_special_tokens",
        )


def _tokens_of(
    body: TokenizeBody, chat: ChatRequest | None, tokenizer: TextTokenizer
) -> tuple[Sequence[int | TokenPiece], list[str] | UnsetType]:
    """The tokens, and their pieces where they are asked for."""
    tokens: Sequence[int]
    if body.content is not None:
        adds_special = bool(body.add_special if body.add_special_tokens is None else body.add_special_tokens)
        tokens = tokenizer.encode(body.content, add_special_tokens=adds_special)
    elif chat is None:
        tokens = tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    else:
        (request,) = chat.prepare(tokenizer, None)
        tokens = request.prompt_tokens
    shown: Sequence[int | TokenPiece] = tokens
    if body.with_pieces:
        shown = [TokenPiece(token, _text_or_bytes(token_bytes(tokenizer, token))) for token in tokens]
    if not body.return_token_strs:
        return shown, UNSET
    return shown, [tokenizer.id_to_piece(token) or "" for token in tokens]


def _text_or_bytes(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
