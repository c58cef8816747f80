from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.support.fake_runtime_api import FakeRuntimeApi
from tests.support.instances import TinyParts


@pytest.fixture(scope="module")
def tiny_parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyParts]:
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
    )  # on a busy machine, threads that wait for each other cost more than a tiny model
    parts = TinyParts.make("llama", tmp_path_factory.mktemp("tiny"))
    yield parts
    parts.tokenizer.close()
    torch.set_num_threads(threads)


@pytest.fixture
def api() -> Iterator[FakeRuntimeApi]:
    with FakeRuntimeApi() as api:
        yield api
