"""Arrays whose items must differ, beyond what a grammar can express."""

from __future__ import annotations

import json
import random

import pytest
from tests.support.grammar_answers import random_answer
from tests.support.instances import TinyParts

from teneral.runtime.errors import GrammarError
from teneral.runtime.grammar.compiler import GrammarCompiler
from teneral.runtime.grammar.json_schema.unique_items import (
    Position,
    RepeatedItemError,
    TokenTexts,
    UniqueItems,
)
from teneral.runtime.grammar.spec import GrammarSpec


def test_tokens_of_several_items_repeat_none() -> None:
    schema = json.loads(
        GrammarSpec.json_schema({"type": "array", "items": {"type": "string"}, "uniqueItems": True}).text
    )
    texts = TokenTexts([b'["', b"a", b'","', b'","a"', b'"', b'","a","b"', b"]", b"\\u0061", b"\\", b"u"])
    unique = UniqueItems(schema)
    position = unique.advance(Position(), b'["a')
    for token, text in enumerate(texts.texts):
        try:
            unique.advance(position, text)
        except RepeatedItemError:
            assert token in texts.may_repeat(position)
    with pytest.raises(RepeatedItemError):
        unique.advance(position, b'","a"')
    with pytest.raises(RepeatedItemError):
        unique.advance(position, b'","b","b"')
    with pytest.raises(RepeatedItemError):  # the same character in another text
        unique.advance(position, b"\\u0061")


def test_an_array_that_runs_out_of_items_is_an_error_not_an_invalid_answer(
    parts: TinyParts, compiler: GrammarCompiler
) -> None:
    schema = {
        "type": "array",
        "items": {"type": "string", "pattern": "^a$"},
        "uniqueItems": True,
        "minItems": 2,
    }
    grammar = compiler.compile(GrammarSpec.json_schema(schema))
    with pytest.raises(GrammarError, match="no item is left"):
        random_answer(parts, grammar, random.Random(0), 40)


def test_differing_items_need_compact_json_and_a_whole_answer(compiler: GrammarCompiler) -> None:
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    with pytest.raises(GrammarError, match="whitespace"):
        GrammarSpec.json_schema(schema, whitespace=" ?")
    spec = GrammarSpec.json_schema(schema, param="p")
    with pytest.raises(GrammarError, match="uniqueItems"):
        spec.embedded_schema()
    with pytest.raises(GrammarError, match="uniqueItems"):
        compiler.compile(GrammarSpec.composed("start: @answer", answer=spec, param="p"))
