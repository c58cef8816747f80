"""Routes of llama.cpp's server, for its user interfaces and editors: /props, /slots, /apply-template,
/completion and /infill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from ...runtime.errors import RequestError
from ...runtime.step.requests import FinishReason, FirstToken, GenerationRequest
from ..http.errors import SERVER_ERROR, ApiError
from ..http.json_bodies import JsonDecoder, encode
from ..http.service import BodyRoute, Service
from ..http.sse import Framing
from .completions import CompletionFormat
from .fields import INFILL, LLAMA_CPP_COMPLETION, Fields, refuse_unsupported
from .fill_in import MAX_FILES, ContextFile, end_tokens, fill_prompt
from .generation import SequenceOutcome, Step, make_format, respond
from .responses import SYSTEM_FINGERPRINT, Usage
from .schemas import CompletionBody, GenerationBody, Prompt
from .structured import has_schema
from .tokens import PromptBody, prompt_chat

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer

# llama.cpp's streams of its own routes have no last event that is not JSON.
FRAMING = Framing("text/event-stream", b"data: ", b"\n\n", True, b"")


class InfillBody(GenerationBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: list[ContextFile] | None = None
    prompt: str | None = None
    t_max_prompt_ms: Any = None  # without effect


class PromptedBody(GenerationBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Of /completion."""

    prompt: Prompt
    t_max_prompt_ms: Any = None  # without effect


class AppliedTemplate(msgspec.Struct, frozen=True):
    prompt: str


class ServerRoutes:
    """Descriptions of the server, and the prompts that its chat template makes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._template = JsonDecoder(PromptBody)

    async def props(self, request: web.Request) -> web.Response:
        """Waits for the model."""
        service = self._service
        settings = await service.ready(service.instance.text_settings)
        context = await service.context_tokens()
        answer = {
            "default_generation_settings": {"n_ctx": context, "params": {}},
            "total_slots": service.instance.config.max_running,
            "model_alias": service.instance.model_name,
            "model_path": service.instance.model_name,
            "modalities": {"vision": settings.images is not None, "audio": False},
            "chat_template": settings.templates.get("default", ""),
            "bos_token": settings.special_tokens.get("bos_token", ""),
            "eos_token": settings.special_tokens.get("eos_token", ""),
            "build_info": SYSTEM_FINGERPRINT,
            "is_sleeping": False,
        }
        return web.Response(body=encode(answer), content_type="application/json")

    async def slots(self, request: web.Request) -> web.Response:
        """Places in a batch. A slot says that it is busy, and shows no prompt."""
        service, must_be_free = self._service, request.query.getall("fail_on_no_slot", ["0"])
        if must_be_free not in (["0"], ["1"]):
            raise RequestError("fail_on_no_slot must be 0 or 1", param="fail_on_no_slot")
        engine = await service.ready(service.instance.engine)
        num_running, num_slots = engine.statistics().running, service.instance.config.max_running
        if must_be_free == ["1"] and num_running >= num_slots:
            raise ApiError(503, "no slot is idle", kind=SERVER_ERROR, code="no_slot")
        slots = [
            {"id": number, "n_ctx": engine.max_context, "is_processing": number < num_running}
            for number in range(num_slots)
        ]
        return web.Response(body=encode(slots), content_type="application/json")

    async def apply_template(self, request: web.Request) -> web.Response:
        service = self._service
        async with service.admission.body(request) as data:
            body = self._template.decode(data)
            service.check_model(body.model)
            make = partial(prompt_chat, body, service)
            chat = await make_format(service, len(data), make, has_schema=bool(body.tools))
            tokenizer = await service.tokenizer()
            text = await service.text_threads.run(len(data), chat.render, tokenizer)
        return web.Response(body=encode(AppliedTemplate(text)), content_type="application/json")


class InfillRoute(BodyRoute[InfillBody]):
    kind = InfillBody

    async def _answer(self, request: web.Request, body: InfillBody, body_bytes: int) -> web.StreamResponse:
        return await _answer(self._service, request, body, body_bytes, partial(InfillFormat, body))


class PromptedRoute(BodyRoute[PromptedBody]):
    kind = PromptedBody

    async def _answer(self, request: web.Request, body: PromptedBody, body_bytes: int) -> web.StreamResponse:
        make = partial(ContentFormat, body, body.prompt, LLAMA_CPP_COMPLETION)
        return await _answer(self._service, request, body, body_bytes, make)


async def _answer(
    service: Service,
    request: web.Request,
    body: GenerationBody,
    body_bytes: int,
    make: Callable[..., ContentFormat],
) -> web.StreamResponse:
    model = service.answering_as(body.model, body.lora)
    make = partial(make, model=model, first_token=service.first_token)
    fmt = await make_format(service, body_bytes, make, has_schema=has_schema(body))
    return await respond(service, request, fmt, body_bytes=body_bytes, framing=FRAMING)


class ContentFormat(CompletionFormat):
    """One request's side of the wire: a completion, with an answer of another shape."""

    def __init__(
        self, asked: GenerationBody, prompt: Prompt, fields: Fields, *, model: str, first_token: FirstToken
    ) -> None:
        refuse_unsupported(asked, fields)
        if asked.n not in (None, 1):
            raise RequestError("n other than 1 is not supported: an answer has one text", param="n")
        shared = {name: getattr(asked, name) for name in GenerationBody.__struct_fields__}
        if asked.max_tokens is None and asked.n_predict is None:
            shared["n_predict"] = -1
        # The end of a stream is written with the usage.
        shared["stream_options"] = None
        shared["t_max_predict_ms"] = None
        body = CompletionBody(prompt=prompt, **shared)
        super().__init__(body, model=model, max_sequences=1, first_token=first_token)

    def chunks(self, step: Step) -> list[bytes]:
        index, event = step
        self._tokens.add(index, event)
        items = [{"index": index, "content": event.text, "stop": False}] if event.text else []
        if event.finish_reason is not None:
            usage = Usage(self.num_prompt_tokens, self._tokens.num_tokens, 0)
            items.append(self._end("", event.finish_reason, event.stopped_by, usage))
        return [encode(item) for item in items]

    def whole(self, outcomes: Sequence[SequenceOutcome], usage: Usage) -> bytes:
        (outcome,) = outcomes
        assert outcome.finish_reason is not None
        return encode(self._end(outcome.text, outcome.finish_reason, outcome.stopped_by, usage))

    def _end(
        self, text: str, reason: FinishReason, stopped_by: str | int | None, usage: Usage
    ) -> dict[str, Any]:
        """The whole answer, or the last chunk."""
        kind = "limit" if reason is FinishReason.LENGTH else "word" if isinstance(stopped_by, str) else "eos"
        return {
            "index": 0,
            "content": text,
            "stop": True,
            "model": self._model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "stop_type": kind,
            "stopping_word": stopped_by if isinstance(stopped_by, str) else "",
            "truncated": False,
        }


class InfillFormat(ContentFormat):
    """A `ContentFormat` whose prompt is made of what is around a place."""

    def __init__(self, asked: InfillBody, *, model: str, first_token: FirstToken) -> None:
        if len(asked.input_extra or []) > MAX_FILES:
            raise RequestError(f"input_extra may have {MAX_FILES} files", param="input_extra")
        super().__init__(asked, asked.prompt or "", INFILL, model=model, first_token=first_token)
        self._infill = asked

    def prepare(self, tokenizer: TextTokenizer, max_tokens: int | None) -> list[GenerationRequest]:
        asked = self._infill
        tokens = fill_prompt(
            tokenizer,
            asked.input_prefix or "",
            asked.input_suffix or "",
            files=asked.input_extra or [],
            begun=asked.prompt or "",
            param="input_suffix",
        )
        self.use_prompt(tokens, end_tokens(tokenizer))
        return super().prepare(tokenizer, max_tokens)
