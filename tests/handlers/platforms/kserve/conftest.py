"""What the tests of the Open Inference Protocol share: the tiny models of the HTTP face's tests, and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.support.http_server import running_server
from tests.support.instances import StagedInstance, TinyParts

from teneral.handlers.function.handler import Handler
from teneral.handlers.http.limits import Limits


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other cost more than a tiny model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_parts(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[TinyParts]:
    parts = TinyParts.make("llama", tmp_path_factory.mktemp("tiny-llama"))
    yield parts
    parts.tokenizer.close()


@pytest.fixture(scope="session")
def encoder_parts(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[TinyParts]:
    parts = TinyParts.make("bert", tmp_path_factory.mktemp("tiny-bert"))
    yield parts
    parts.tokenizer.close()


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
        instance = KindlyInstance(parts, **settings)
        if loaded:
            instance.let_in()
        return running_server(
            instance,
            handler=None if handler is None else Handler(handler),
            limits=limits or Limits.from_config(instance.config),
        )

    return make


class KindlyInstance(StagedInstance):
    """One that says of what kind it is, as a loaded one does."""

    def let_in(self) -> KindlyInstance:
        self.kind.set_result("encoder" if hasattr(self._parts.model, "embed") else "decoder")
        super().let_in()
        return self
