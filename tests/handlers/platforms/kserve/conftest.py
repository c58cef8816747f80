"""Shared parts of the tests of the Open Inference Protocol: the tiny models of the HTTP server's
tests, and requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.http_server import running_server
from tests.support.instances import StagedInstance, TinyParts
from tests.support.paced import PacedSource, every_read
from tests.support.switching import Models

from teneral.handlers.function.handler import Handler
from teneral.handlers.http.limits import Limits


@pytest.fixture
def start(tiny_parts: TinyParts) -> Callable[..., Any]:
    """`async with start(...) as server`: settings of the instance, and `handler`, `limits`, `loaded`."""

    def make(
        *,
        handler: Callable[..., Any] | None = None,
        limits: Limits | None = None,
        loaded: bool = True,
        parts: TinyParts = tiny_parts,
        **settings: Any,
    ) -> Any:
        instance = StagedInstance(parts, **settings)
        if loaded:
            instance.let_in()
        return running_server(
            instance,
            handler=None if handler is None else Handler(handler),
            limits=limits or Limits.from_config(instance.config),
        )

    return make


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Models:
    models = Models(tmp_path_factory.mktemp("switch"))
    models.tuned("one", seed=1)
    models.tuned("two", seed=2)
    return models


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`held(name)` holds all reads of weights of the artifact of that name, from its next opening on."""
    from teneral.runtime.instance import loading

    open_model, rules = loading.open_model, {}

    def opened(address: str, *args: Any, **kwargs: Any) -> Any:
        source = open_model(address, *args, **kwargs)
        hold = rules.get(Path(address).name)
        if hold is None:
            return source
        paced = PacedSource(source)
        hold.append(paced.hold(every_read))
        return paced

    monkeypatch.setattr(loading, "open_model", opened)

    def hold(name: str) -> list[Any]:
        return rules.setdefault(name, [])

    yield hold
    for holds in rules.values():
        for each in holds:
            each.release()
