"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from ...runtime.errors import RequestError
from ..http.json_bodies import encode
from ..http.service import CALL, BodyRoute, Service
from .parameters import WHOLE_CONTEXT, check_truncation, split_prompt, tokens_of
from .responses import Embedding, EmbeddingList, EmbeddingUsage
from .schemas import EmbeddingBody

if TYPE_CHECKING:
    import numpy as np

    from ...runtime.engine.embedder import Embedder
    from ...runtime.text.tokenizer import TextTokenizer


class EmbeddingRoute(BodyRoute[EmbeddingBody]):
    kind = EmbeddingBody

    async def _answer(self, request: web.Request, body: EmbeddingBody, body_bytes: int) -> web.Response:
        service = self._service
        service.check_model(body.model)
        check_truncation(body.truncate_prompt_tokens)
        inputs = split_prompt(body.input, param="input", max_prompts=service.limits.max_embedding_inputs)
        with service.admission.waiting(1):
            tokenizer, embedder = await service.encoder()
            if embedder.labels:
                raise RequestError(
                    "this model classifies texts and makes no embeddings",
                    param="model",
                    hint="Ask /v1/classify, or serve a model that embeds.",
                )
            embedder.require_room()
            keep, most = body.truncate_prompt_tokens, embedder.max_tokens
            encode_text: Callable[[str], Sequence[int]] = partial(tokenizer.encode, max_tokens=most)
            if keep is not None:
                most = most if keep == WHOLE_CONTEXT else min(keep, most)
                encode_text = partial(_truncated, tokenizer, most)
            token_lists = await service.text_threads.run(
                body_bytes, lambda: [tokens_of(item, encode_text, param="input") for item in inputs]
            )
            if keep is not None:
                token_lists = [tokens[:most] for tokens in token_lists]  # those that were sent as tokens
        vectors = await rows_of(service, embedder, embedder.embed, token_lists)
        # Here too: thousands of vectors as text are megabytes.
        answer = await asyncio.to_thread(self._encoded, body, vectors, sum(map(len, token_lists)))
        return web.Response(body=answer, content_type="application/json")

    def _encoded(self, body: EmbeddingBody, vectors: np.ndarray, num_tokens: int) -> bytes:
        vectors = shortened(vectors, body.dimensions)
        pack = _base64 if body.encoding_format == "base64" else _numbers
        return encode(
            EmbeddingList(
                [Embedding(index, pack(vector)) for index, vector in enumerate(vectors)],
                self._service.instance.model_name,
                EmbeddingUsage(num_tokens, num_tokens),
            )
        )


def _truncated(tokenizer: TextTokenizer, max_tokens: int, text: str) -> tuple[int, ...]:
    """The text's tokens without the last ones, but with all special tokens. Raises `ContextLengthError` where
    these alone are more.
    """
    (encoded,) = tokenizer.encode_pairs([(text, None)])
    return encoded.within(max_tokens).tokens


async def rows_of(
    service: Service,
    embedder: Embedder,
    compute: Callable[[Sequence[Sequence[int]]], Future[np.ndarray]],
    token_lists: Sequence[Sequence[int]],
) -> np.ndarray:
    """A row for each text, (N, columns) fp32. `compute` is the embedder's `embed` or `classify`."""
    call = CALL.get()
    call.prompt_tokens = sum(map(len, token_lists))
    service.metrics.prompt_taken(call.prompt_tokens)
    call.limit(service.limits.request_timeout_s)
    rows = compute(token_lists)
    try:
        return await asyncio.wrap_future(rows)
    finally:
        embedder.give_up(rows)  # a client that went away, or has waited long enough


def shortened(vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The first `dimensions` numbers of each row, at unit length; None: the rows as they are. Raises `RequestError`
    for more than there are.
    """
    size = vectors.shape[1]
    if dimensions is None or dimensions == size:
        return vectors
    if not 0 < dimensions < size:
        raise RequestError(
            f"dimensions is {dimensions}, but this model's embeddings have from 1 to {size}",
            param="dimensions",
        )
    return unit_length(vectors[:, :dimensions])


def unit_length(vectors: np.ndarray) -> np.ndarray:
    """(N, size) fp32, each row divided by its length; a row of zeros stays one."""
    wide = vectors.astype("f8")
    lengths = (wide * wide).sum(axis=1, keepdims=True) ** 0.5
    result: np.ndarray = (wide / lengths.clip(1e-12)).astype("f4")
    return result


def _numbers(vector: np.ndarray) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers


def _base64(vector: np.ndarray) -> str:
    """The numbers as little-endian float32, as OpenAI's clients ask for them."""
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode("ascii")
