"""Threads that turn text into tokens and back. Both may wait for another process, and for long texts before them: the
event loop never does, and no short text waits for the long ones.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LONG_BYTES = 32 << 10  # of a body: what it holds takes 10 ms and more to tokenise
MAX_SHORT, MAX_LONG = 8, 2  # threads; the tokenizer works on fewer texts at a time


class TextThreads:
    """Used on the event loop. Threads start when they are needed, and end with the process."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(MAX_SHORT, "teneral-text")
        self._long = ThreadPoolExecutor(MAX_LONG, "teneral-long-text")

    async def run(self, body_bytes: int, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """What `function` returns or raises. `body_bytes` is the length of what it looks at."""
        threads = self._long if body_bytes > LONG_BYTES else self._short
        call = functools.partial(function, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(threads, call)
