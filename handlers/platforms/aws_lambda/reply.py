"""The answer to one invocation, sent to Lambda as a whole or in pieces, or an error.

Whether an error can be the answer itself, or only follow its pieces, depends on whether anything
was sent: only this module knows that.
"""

from __future__ import annotations

import logging

from ....runtime.errors import CancelledError
from .errors import MAX_RESPONSE_BYTES, ResponseTooLargeError, report
from .invocation import Invocation
from .runtime_api import RuntimeApi, RuntimeApiError, Stream

logger = logging.getLogger("teneral.lambda")


class Reply:
    """An answer. For one task. An answer in pieces must be ended, or failed."""

    def __init__(self, api: RuntimeApi, invocation: Invocation) -> None:
        self._api = api
        self._invocation = invocation
        self._stream: Stream | None = None
        self._is_over = False

    @property
    def has_begun(self) -> bool:
        """Whether anything was sent, so that an error can only follow it."""
        return self._stream is not None or self._is_over

    async def whole(self, body: bytes, content_type: str = "application/json") -> None:
        """Send the whole answer. Raises `ResponseTooLargeError`, with nothing sent, and
        `RuntimeApiError`.
        """
        if len(body) > MAX_RESPONSE_BYTES:
            raise ResponseTooLargeError(len(body))
        self._is_over = True
        asked = self._invocation
        try:
            await self._api.respond(asked.request_id, body, content_type, asked.invocation_id)
        except RuntimeApiError as error:
            _only_if_fatal(error)

    async def write(self, piece: bytes, content_type: str) -> None:
        """Send a piece; the first one begins the answer. Waits while Lambda is slow.

        Raises `RuntimeApiError` if it cannot begin, and `CancelledError` if Lambda accepts no more
        of it, which does not end the instance.
        """
        if self._stream is None:
            asked = self._invocation
            self._stream = await self._api.begin_stream(asked.request_id, content_type, asked.invocation_id)
        if piece:
            try:
                await self._stream.write(piece)
            except RuntimeApiError as error:
                self._is_over = True
                raise CancelledError("Lambda accepts no more of the answer") from error

    async def end(self) -> None:
        """End the pieces."""
        assert self._stream is not None
        self._is_over = True
        try:
            await self._stream.end()
        except RuntimeApiError as error:
            logger.warning("%s", error.message)  # as in `write`

    async def fail(self, error: BaseException) -> None:
        """Report an error: as the answer, or after the pieces sent. Does nothing once the answer is
        over. Raises `RuntimeApiError`.
        """
        if self._is_over:
            return
        self._is_over = True
        failure, asked = report(error), self._invocation
        body = failure.body(asked.request_id)
        try:
            if self._stream is not None:
                await self._stream.end(error_type=failure.error_type, error_body=body)
            else:
                await self._api.fail(
                    asked.request_id, body, failure.error_type, failure.cause(), asked.invocation_id
                )
        except RuntimeApiError as refused:
            if self._stream is None:
                _only_if_fatal(refused)


def _only_if_fatal(error: RuntimeApiError) -> None:
    """Raise only fatal errors: a refused answer, as of an invocation that Lambda has given up, does
    not end the instance.
    """
    if error.is_fatal:
        raise error
    logger.warning("%s", error.message)
