from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
from tests.support.small_host import SmallHost, small_host

from teneral.handlers.function.context import Context


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
