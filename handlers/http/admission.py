"""Admission control before any work is done: bounds on the number of sequences and on the memory of
bodies.

The engine has a bound of its own. This module counts the sequences on their way to it (being
tokenised, or waiting for the tokenizer or the model to load) together with those that it has; so an
admitted request finds a place when it arrives, and the rest are refused at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from aiohttp import web

from ...runtime.errors import CapacityError, RequestError
from .connections import invite_body
from .errors import ApiError
from .json_bodies import memory_bytes
from .limits import Limits

if TYPE_CHECKING:
    from .compression import BodyDecompressor


class Bodies:
    """The bodies of the requests in progress, bounded one by one and all together. For the event loop's thread only."""

    def __init__(
        self,
        limits: Limits,
        arrived: Callable[[web.Request], None] = lambda _: None,
        retry_after_s: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`arrived` is called once a request's body is there; it may raise."""
        self._limits = limits
        self._arrived = arrived
        self._retry_after_s = retry_after_s
        self.charged_bytes = 0

    @asynccontextmanager
    async def read(
        self, request: web.Request, memory_bytes: Callable[[bytearray], int] = len
    ) -> AsyncIterator[bytearray]:
        """The request's body, charged inside this context with the memory that it takes once it is decoded.

        A compressed one is decompressed as it arrives: the limits are those of the JSON in it. Raises
        `ApiError` 413 for a body beyond the limit, 408 for one that does not arrive, 415 for an
        unknown compression, 400 for a damaged one, and `CapacityError` if the bodies of all requests
        together are too large.
        """
        decompress = self._decoder_of(request)
        data = bytearray()
        charged_bytes = 0
        try:
            async for chunk in self._chunks(request):
                for piece in decompress(chunk) if decompress else (chunk,):
                    if len(data) + len(piece) > self._limits.max_body_bytes:
                        raise self._too_large()
                    charged_bytes += self._charge(len(piece))
                    data += piece
            if decompress is not None:
                decompress.finish()
            charged_bytes += self._charge(memory_bytes(data) - len(data))
            self._arrived(request)
            yield data
        finally:
            self.charged_bytes -= charged_bytes

    async def _chunks(self, request: web.Request) -> AsyncIterator[bytes]:
        """The body's chunks as they arrive; 408 at the time limit."""
        end_s = asyncio.get_running_loop().time() + self._limits.body_timeout_s
        await invite_body(request)
        while True:
            try:
                async with asyncio.timeout_at(end_s):
                    chunk = await request.content.readany()
            except TimeoutError:
                raise ApiError(408, "the body did not arrive in time", code="request_timeout") from None
            if not chunk:
                return
            yield chunk

    def _charge(self, num_bytes: int) -> int:
        """Charge that much memory; returns the number. Raises `CapacityError` beyond the limit."""
        if self.charged_bytes + num_bytes > self._limits.max_body_bytes_in_flight:
            raise CapacityError(
                "the bodies of the requests in progress use all of their memory limit",
                retry_after_s=self._retry_after_s(),
            )
        self.charged_bytes += num_bytes
        return num_bytes

    @contextmanager
    def charged(self, num_bytes: int) -> Iterator[None]:
        """Charge that much memory inside this context. Raises `CapacityError`."""
        self._charge(num_bytes)
        try:
            yield
        finally:
            self.charged_bytes -= num_bytes

    def _decoder_of(self, request: web.Request) -> BodyDecompressor | None:
        """The decompressor of a request's body; None for a plain one. Raises what its head forbids."""
        decompressor = None
        if encodings := request.headers.getall("Content-Encoding", []):
            from .compression import decompressor_of  # of few requests

            decompressor = decompressor_of(encodings)
        if request.content_length is not None and request.content_length > self._limits.max_body_bytes:
            raise self._too_large()
        return decompressor

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self._limits.max_body_bytes} bytes", code="request_too_large"
        )


class Admission:
    """The admission of one server. For the event loop's thread only. `num_in_engine` returns the
    number of the engine's sequences, `retry_after_s` the time for refused clients to retry.
    """

    def __init__(
        self,
        limits: Limits,
        num_in_engine: Callable[[], int],
        retry_after_s: Callable[[], float],
        body_is_there: Callable[[web.Request], None] = lambda _: None,
    ) -> None:
        """`body_is_there` is called once a request's body has arrived; it may raise."""
        self._limits = limits
        self._num_in_engine = num_in_engine
        self._retry_after_s = retry_after_s
        self._bodies = Bodies(limits, body_is_there, retry_after_s)
        self._waiting = 0
        self._answer_bytes = 0

    @property
    def num_waiting(self) -> int:
        """The admitted sequences that the engine does not have yet."""
        return self._waiting

    @property
    def body_bytes(self) -> int:
        """The memory currently charged for request bodies."""
        return self._bodies.charged_bytes

    @property
    def answer_bytes(self) -> int:
        """The memory currently charged for unfinished answers."""
        return self._answer_bytes

    @contextmanager
    def waiting(self, num_sequences: int) -> Iterator[None]:
        """Count the sequences as waiting inside this context; leave it once the engine has them.
        Raises `CapacityError`.
        """
        taken = self._waiting + self._num_in_engine()
        if taken + num_sequences > self._limits.max_taken:
            raise CapacityError(
                f"{taken} sequences are running or waiting, of at most {self._limits.max_taken}",
                retry_after_s=self._retry_after_s(),
                hint="Try again shortly, or start more instances.",
            )
        self._waiting += num_sequences
        try:
            yield
        finally:
            self._waiting -= num_sequences

    @contextmanager
    def answer(self) -> Iterator[Callable[[int], None]]:
        """A context with a function that charges memory for an unfinished answer. It raises
        `RequestError` beyond the limit of one answer, and `CapacityError` beyond that of all.
        """
        charged_bytes = 0

        def charge(num_bytes: int) -> None:
            nonlocal charged_bytes
            if charged_bytes + num_bytes > self._limits.max_answer_bytes:
                raise RequestError(
                    f"the answer's log-probabilities would take more than {self._limits.max_answer_bytes} bytes",
                    param="logprobs",
                    hint="Request fewer tokens, choices or log-probabilities, or for a stream.",
                )
            if self._answer_bytes + num_bytes > self._limits.max_answer_bytes_in_flight:
                raise CapacityError(
                    "the log-probabilities of the requests in progress use all of their memory limit",
                    retry_after_s=self._retry_after_s(),
                )
            charged_bytes += num_bytes
            self._answer_bytes += num_bytes

        try:
            yield charge
        finally:
            self._answer_bytes -= charged_bytes

    def form(self, request: web.Request) -> AbstractAsyncContextManager[bytearray]:
        """The request's body, as in `Bodies.read`, charged as it is: of a form with files."""
        return self._bodies.read(request)

    @contextmanager
    def memory(self, num_bytes: int) -> Iterator[None]:
        """Charge memory that a body has become, inside this context. Raises `CapacityError`."""
        with self._bodies.charged(num_bytes):
            yield

    def body(self, request: web.Request) -> AbstractAsyncContextManager[bytearray]:
        """The request's body, as in `Bodies.read`, charged together with its decoded values."""
        return self._bodies.read(request, memory_bytes)
