"""One invocation's answer on its way to Lambda: whole, or in pieces, and if it must be, an error.

Whether an error can still be the answer, or only its last words, depends on whether anything was sent: that is known
here and nowhere else.
"""

from __future__ import annotations

import logging

from ....runtime.errors import CancelledError
from .errors import MAX_RESPONSE_BYTES, ResponseTooLargeError, report
from .invocation import Invocation
from .runtime_api import RuntimeApi, RuntimeApiError, Stream

logger = logging.getLogger("teneral.lambda")


class Reply:
    """For one task. What is sent in pieces must be ended, or failed."""

    def __init__(self, api: RuntimeApi, invocation: Invocation) -> None:
        self._api = api
        self._invocation = invocation
        self._stream: Stream | None = None
        self._is_over = False

    @property
    def has_begun(self) -> bool:
        """Whether something was sent, so that an error can only follow it."""
        return self._stream is not None or self._is_over

    async def whole(self, body: bytes, content_type: str = "application/json") -> None:
        """Answer at once. Raises `ResponseTooLargeError`, having sent nothing, and `RuntimeApiError`."""
        if len(body) > MAX_RESPONSE_BYTES:
            raise ResponseTooLargeError(len(body))
        self._is_over = True
        asked = self._invocation
        try:
            await self._api.respond(asked.request_id, body, content_type, asked.invocation_id)
        except RuntimeApiError as error:
            _only_if_fatal(error)

    async def write(self, piece: bytes, content_type: str) -> None:
        """Send a piece; the first one begins the answer. Waits while Lambda is slow. Raises `RuntimeApiError` where it
        cannot be begun, and `CancelledError` where Lambda takes no more of it, which is no reason to end the instance.
        """
        if self._stream is None:
            asked = self._invocation
            self._stream = await self._api.begin_stream(asked.request_id, content_type, asked.invocation_id)
        if piece:
            try:
                await self._stream.write(piece)
            except RuntimeApiError as error:
                self._is_over = True
                raise CancelledError("Lambda takes no more of the answer") from error

    async def end(self) -> None:
        """All pieces were sent."""
        assert self._stream is not None
        self._is_over = True
        try:
            await self._stream.end()
        except RuntimeApiError as error:
            logger.warning("%s", error.message)  # as in `write`

    async def fail(self, error: BaseException) -> None:
        """Tell an error: as the answer, or behind the pieces that were sent. Does nothing once the answer is over.
        Raises `RuntimeApiError`.
        """
        if self._is_over:
            return
        self._is_over = True
        told, asked = report(error), self._invocation
        body = told.body(asked.request_id)
        try:
            if self._stream is not None:
                await self._stream.end(error_type=told.error_type, error_body=body)
            else:
                await self._api.fail(
                    asked.request_id, body, told.error_type, told.cause(), asked.invocation_id
                )
        except RuntimeApiError as refused:
            if self._stream is None:
                _only_if_fatal(refused)


def _only_if_fatal(error: RuntimeApiError) -> None:
    """A refused answer, as of an invocation that Lambda has given up, is no reason to end the instance."""
    if error.is_fatal:
        raise error
    logger.warning("%s", error.message)
