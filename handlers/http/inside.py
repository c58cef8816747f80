"""The application's routes for other parts of the same process: what arrives by another way than HTTP, and is meant for
them, goes through everything that an HTTP request does.

The way is a local socket in a folder that only this user can enter. It knows neither platforms nor batches.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from ...loader.errors import UsageError
from .limits import MAX_HEADER_BYTES, MAX_HEADERS, MAX_REQUEST_LINE_BYTES

BASE_URL = "http://inside"  # requests name their path behind it


@asynccontextmanager
async def serving_inside(app: web.Application) -> AsyncIterator[aiohttp.ClientSession]:
    """While in here the session's requests reach the application. Any number at a time; no time-outs but the
    application's own; nothing is decompressed. `UsageError` where no temporary folder can be made.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="teneral-")
    except OSError as error:
        raise UsageError(
            f"a temporary folder is needed for a local socket: {error.strerror or error}",
            key="TMPDIR",
            hint="Name a folder that may be written to with TMPDIR.",
        ) from error
    with folder as place:
        path = str(Path(place) / "http.sock")
        runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,
            max_line_size=MAX_REQUEST_LINE_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            shutdown_timeout=0.5,
        )
        await runner.setup()
        try:
            await web.UnixSite(runner, path).start()
            async with aiohttp.ClientSession(
                BASE_URL,
                connector=aiohttp.UnixConnector(path, limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            ) as session:
                yield session
        finally:
            await runner.cleanup()
