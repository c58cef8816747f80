"""A tiny model with its tokenizer, and grammars over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.inspection import text_backend_of
from tests.support.instances import TinyParts

from teneral.runtime.grammar.compiler import GrammarCompiler


@pytest.fixture(scope="package")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyParts]:
    parts = TinyParts.make("llama", tmp_path_factory.mktemp("tiny-llama"))
    yield parts
    parts.tokenizer.close()


@pytest.fixture(scope="package")
def compiler(parts: TinyParts) -> GrammarCompiler:
    tokenizer = parts.tokenizer
    return GrammarCompiler(text_backend_of(tokenizer).tokenizer_json, tokenizer.eos_token_ids)
