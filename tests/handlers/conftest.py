"""Shared parts of the tests of handlers. Most need no torch: what does imports it itself."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from tests.support.small_host import SmallHost, small_host

from teneral.handlers.function.context import Context

if TYPE_CHECKING:
    from tests.support.instances import TinyParts


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """On a busy machine, threads that wait for each other cost more than a tiny model."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_parts(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[TinyParts]:
    from tests.support.instances import TinyParts

    parts = TinyParts.make("llama", tmp_path_factory.mktemp("tiny-llama"))
    yield parts
    parts.tokenizer.close()


@pytest.fixture(scope="session")
def encoder_parts(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[TinyParts]:
    from tests.support.instances import TinyParts

    parts = TinyParts.make("bert", tmp_path_factory.mktemp("tiny-bert"))
    yield parts
    parts.tokenizer.close()


@pytest.fixture
def host() -> Iterator[SmallHost]:
    with small_host() as host:
        yield host


@pytest.fixture
def loading_host() -> Iterator[SmallHost]:
    with small_host(arrived=False) as host:
        yield host


@pytest.fixture
def make_context(host: SmallHost) -> Callable[..., Context]:
    def make(**options: object) -> Context:
        return Context(host, request_id=uuid.uuid4().hex, **options)

    return make


@pytest.fixture
def context(make_context: Callable[..., Context]) -> Context:
    return make_context()
