"""POST /v1/score, /v1/rerank and /v1/classify: the relevance of texts to others, and the
probability of each label.

A classifier with one label reads both texts together, as a cross-encoder; a model that embeds
compares their vectors by the cosine. Shapes are those of vLLM, and of Jina's and Cohere's
rerankers. Texts and pairs on their way to an encoder are shortened where the request permits it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from aiohttp import web
from msgspec import UNSET, UnsetType

from ...runtime.errors import RequestError
from ...runtime.text.backend import EncodedPair
from ..http.json_bodies import encode
from ..http.service import BodyRoute, Service
from .embeddings import rows_of, unit_length
from .fields import CLASSIFY, RERANK, SCORE, Fields, refuse_unsupported
from .parameters import WHOLE_CONTEXT, check_truncation

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer


class EncoderBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The fields that routes over texts share."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    activation: bool | None = None
    user: str | None = None  # without effect
    priority: int | None = None

    @property
    def wants_logits(self) -> bool:
        return self.use_activation is False or self.activation is False


class EncoderUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


def check_encoder_body(body: EncoderBody, fields: Fields) -> None:
    """Raises `RequestError` for what is not supported, or is out of range."""
    refuse_unsupported(body, fields)
    check_truncation(body.truncate_prompt_tokens)


def as_texts(given: str | list[str], *, param: str, max_texts: int) -> list[str]:
    """One or several texts as several. Raises `RequestError` for none and for too many."""
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise RequestError(f"{param} is empty", param=param)
    if len(texts) > max_texts:
        raise RequestError(
            f"{param} has {len(texts)} items, but may have {max_texts}",
            param=param,
            hint="Send several requests.",
        )
    return texts


def within(pairs: Sequence[EncodedPair], keep: int | None, max_tokens: int) -> list[EncodedPair]:
    """Shortened to `keep`, which is `truncate_prompt_tokens`, and to the `max_tokens` that the model takes."""
    if keep is None:
        return list(pairs)
    return [pair.within(max_tokens if keep == WHOLE_CONTEXT else min(keep, max_tokens)) for pair in pairs]


if TYPE_CHECKING:
    pass


class ScoreBody(EncoderBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None


class Document(msgspec.Struct, frozen=True):
    text: str


class RerankBody(EncoderBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None
    rank_fields: list[str] | None = None
    instruction: str | None = None


class Score(msgspec.Struct, frozen=True):
    index: int
    score: float
    object: str = "score"


class Scores(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: EncoderUsage
    object: str = "list"


class Ranked(msgspec.Struct, frozen=True):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Ranking(msgspec.Struct, frozen=True):
    id: str
    model: str
    results: list[Ranked]  # the most relevant first
    usage: EncoderUsage
    object: str = "list"


class ScoreRoute(BodyRoute[ScoreBody]):
    kind = ScoreBody

    async def _answer(self, request: web.Request, body: ScoreBody, body_bytes: int) -> web.Response:
        service = self._service
        service.check_model(body.model)
        check_encoder_body(body, SCORE)
        most = service.limits.max_embedding_inputs
        firsts = as_texts(body.text_1, param="text_1", max_texts=most)
        seconds = as_texts(body.text_2, param="text_2", max_texts=most)
        if len(firsts) not in (1, len(seconds)):
            raise RequestError(
                f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}; there must be as many, or one text_1",
                param="text_1",
            )
        scores, num_tokens = await relevance(service, body, firsts, seconds, body_bytes)
        answer = Scores(
            f"score-{secrets.token_hex(12)}",
            int(time.time()),
            service.instance.model_name,
            [Score(index, score) for index, score in enumerate(scores)],
            EncoderUsage(num_tokens, num_tokens),
        )
        return web.Response(body=encode(answer), content_type="application/json")


class RerankRoute(BodyRoute[RerankBody]):
    kind = RerankBody

    async def _answer(self, request: web.Request, body: RerankBody, body_bytes: int) -> web.Response:
        service = self._service
        service.check_model(body.model)
        check_encoder_body(body, RERANK)
        limits = (("top_n", body.top_n, 0), ("max_tokens_per_doc", body.max_tokens_per_doc, 1))
        for name, value, least in limits:
            if value is not None and value < least:
                raise RequestError(f"{name} is {value}, but must be at least {least}", param=name)
        documents = as_texts(
            [each if isinstance(each, str) else each.text for each in body.documents],
            param="documents",
            max_texts=service.limits.max_embedding_inputs,
        )
        scores, num_tokens = await relevance(
            service, body, [body.query], documents, body_bytes, max_second=body.max_tokens_per_doc
        )
        # Of equals, the first stays first.
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        shows = body.return_documents is not False
        answer = Ranking(
            f"rerank-{secrets.token_hex(12)}",
            service.instance.model_name,
            [
                Ranked(index, scores[index], Document(documents[index]) if shows else UNSET)
                for index in order[: body.top_n or None]
            ],
            EncoderUsage(num_tokens, num_tokens),
        )
        return web.Response(body=encode(answer), content_type="application/json")


async def relevance(
    service: Service,
    body: ScoreBody | RerankBody,
    firsts: Sequence[str],
    seconds: Sequence[str],
    body_bytes: int,
    *,
    max_second: int | None = None,
) -> tuple[list[float], int]:
    """A score for each of `seconds`, and the tokens that they took. `firsts` has as many texts, or one for all."""
    with service.admission.waiting(1):
        tokenizer, embedder = await service.encoder()
        embedder.require_room()
        if len(embedder.labels) > 1:
            raise RequestError(
                f"this model has {len(embedder.labels)} labels; only one label says how relevant a text is",
                param="model",
                hint="Serve a cross-encoder or a model that embeds, or ask /v1/classify.",
            )
        encode_texts: Callable[..., list[EncodedPair]] = _singles
        if embedder.labels:
            encode_texts = partial(_pairs, instruction=body.instruction)
        elif body.instruction is not None:
            raise RequestError(
                "this model embeds texts, which take no instruction",
                param="instruction",
                hint="Write it into the texts.",
            )
        texts = await service.text_threads.run(
            body_bytes, encode_texts, tokenizer, firsts, seconds, max_second
        )
    # A bound of documents asks for shortening, to what the model takes as well.
    keep = body.truncate_prompt_tokens if max_second is None else body.truncate_prompt_tokens or WHOLE_CONTEXT
    kept = within(texts, keep, embedder.max_tokens)
    token_lists = [each.tokens for each in kept]
    num_tokens = sum(map(len, token_lists))
    if not embedder.labels:
        vectors = await rows_of(service, embedder, embedder.embed, token_lists)
        return _cosines(vectors[: len(firsts)], vectors[len(firsts) :]), num_tokens
    compute = partial(embedder.classify, type_lists=[each.types for each in kept])
    logits = await rows_of(service, embedder, compute, token_lists)
    scores = logits if body.wants_logits else embedder.score_functions.relevance(logits)
    return scores[:, 0].tolist(), num_tokens


def _pairs(
    tokenizer: TextTokenizer,
    firsts: Sequence[str],
    seconds: Sequence[str],
    max_second: int | None,
    *,
    instruction: str | None,
) -> list[EncodedPair]:
    """A pair for each of `seconds`."""
    first_of = firsts if len(firsts) == len(seconds) else [firsts[0]] * len(seconds)
    pairs = tokenizer.encode_pairs(list(zip(first_of, seconds, strict=True)), instruction=instruction)
    return pairs if max_second is None else [pair.with_part(1, max_second) for pair in pairs]


def _singles(
    tokenizer: TextTokenizer, firsts: Sequence[str], seconds: Sequence[str], max_second: int | None
) -> list[EncodedPair]:
    """Each text by itself, `firsts` first."""
    texts = tokenizer.encode_pairs([(text, None) for text in (*firsts, *seconds)])
    if max_second is None:
        return texts
    return [*texts[: len(firsts)], *(text.with_part(0, max_second) for text in texts[len(firsts) :])]


def _cosines(firsts: np.ndarray, seconds: np.ndarray) -> list[float]:
    """firsts (N or 1, size), seconds (N, size)."""
    cosines: list[float] = (unit_length(firsts) * unit_length(seconds)).sum(axis=1).tolist()
    return cosines


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


class ClassifyRoute(BodyRoute[ClassifyBody]):
    kind = ClassifyBody

    async def _answer(self, request: web.Request, body: ClassifyBody, body_bytes: int) -> web.Response:
        service = self._service
        service.check_model(body.model)
        check_encoder_body(body, CLASSIFY)
        texts = as_texts(body.input, param="input", max_texts=service.limits.max_embedding_inputs)
        with service.admission.waiting(1):
            tokenizer, embedder = await service.encoder()
            if not embedder.labels:
                raise RequestError(
                    "this model makes embeddings and has no labels",
                    param="model",
                    hint="Ask /v1/embeddings, or serve a classifier.",
                )
            embedder.require_room()
            pairs = await service.text_threads.run(
                body_bytes, tokenizer.encode_pairs, [(text, None) for text in texts]
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
