"""Shared parts of the tests of the HTTP server: one tiny model, and servers in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.chat_families import family_parts
from tests.support.http_server import running_server
from tests.support.instances import StagedInstance, TinyParts

from teneral.handlers.function.calls import DEFAULT_MAX_CALLS
from teneral.handlers.function.handler import Handler
from teneral.handlers.http.limits import Limits
from teneral.handlers.platforms import HTTP, Platform


@pytest.fixture(scope="session")
def chat_parts(
    tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> Iterator[Callable[[str], TinyParts]]:
    """The parts of the tiny model of a family of chats, by its name."""
    made: dict[str, TinyParts] = {}

    def parts(name: str) -> TinyParts:
        if name not in made:
            made[name] = family_parts(name, tmp_path_factory.mktemp(name))
        return made[name]

    yield parts
    for each in made.values():
        each.tokenizer.close()


@pytest.fixture
def start(tiny_parts: TinyParts) -> Callable[..., Any]:
    """`async with start(...) as server`: settings of the instance, and `handler`, `limits`,
    `drain_timeout_s`, `loaded`.
    """

    def make(
        *,
        handler: Callable[..., Any] | None = None,
        max_calls: int = DEFAULT_MAX_CALLS,
        limits: Limits | None = None,
        drain_timeout_s: float = 5.0,
        send_buffer_bytes: int | None = None,
        loaded: bool = True,
        parts: TinyParts = tiny_parts,
        platform: Platform = HTTP,
        **settings: Any,
    ) -> Any:
        instance = StagedInstance(parts, **settings)
        if loaded:
            instance.let_in()
        return running_server(
            instance,
            handler=None if handler is None else Handler(handler, max_calls=max_calls),
            limits=limits or Limits.from_config(instance.config),
            drain_timeout_s=drain_timeout_s,
            send_buffer_bytes=send_buffer_bytes,
            platform=platform,
        )

    return make
