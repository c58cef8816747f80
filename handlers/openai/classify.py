"""POST /v1/classify, as vLLM has it: the probability of each label, of one or several texts."""

from __future__ import annotations

import secrets
import time

import msgspec
import numpy as np
from aiohttp import web

from ...runtime.errors import RequestError
from ..http.json_bodies import Decoder, encode
from ..http.service import Service
from .embeddings import rows_of
from .fields import CLASSIFY
from .rerank import EncoderBody, EncoderUsage, as_texts, check_encoder_body, within


class ClassifyBody(EncoderBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    input: str | list[str]


class Classified(msgspec.Struct, frozen=True):
    index: int
    label: str  # the likeliest
    probs: list[float]  # in the order of the model's labels
    num_classes: int


class Classification(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[Classified]
    usage: EncoderUsage
    object: str = "list"


class ClassifyRoute:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._decoder = Decoder(ClassifyBody)

    async def post(self, request: web.Request) -> web.Response:
        service = self._service
        async with service.admission.body(request) as data:
            body = self._decoder.decode(data)
            service.check_model(body.model)
            check_encoder_body(body, CLASSIFY)
            texts = as_texts(body.input, param="input", max_texts=service.limits.max_embedding_inputs)
            with service.admission.waiting(1):
                tokenizer = await service.tokenizer()
                embedder = await service.ready(service.instance.embedder)
                if not embedder.labels:
                    raise RequestError(
                        "this model makes embeddings and has no labels",
                        param="model",
                        hint="Ask /v1/embeddings, or serve a classifier.",
                    )
                embedder.require_room()
                pairs = await service.text_threads.run(
                    len(data), tokenizer.encode_pairs, [(text, None) for text in texts]
                )
            kept = within(pairs, body.truncate_prompt_tokens, embedder.max_tokens)
            token_lists = [pair.tokens for pair in kept]
            logits = await rows_of(service, embedder, embedder.classify, token_lists)
        probabilities = logits if body.wants_logits else embedder.score_functions.probabilities(logits)
        answer = Classification(
            f"classify-{secrets.token_hex(12)}",
            int(time.time()),
            service.instance.model_name,
            [_classified(index, row, embedder.labels) for index, row in enumerate(probabilities)],
            EncoderUsage(*[sum(map(len, token_lists))] * 2),
        )
        return web.Response(body=encode(answer), content_type="application/json")


def _classified(index: int, row: np.ndarray, labels: tuple[str, ...]) -> Classified:
    return Classified(index, labels[int(row.argmax())], row.tolist(), len(labels))
