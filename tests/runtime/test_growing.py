"""A tokenizer that parses its vocabulary later says the same before and after."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from teneral.runtime.errors import ModelError
from teneral.runtime.synth import tokenizer_files
from teneral.runtime.text.backend import LocalBackend
from teneral.runtime.text.subset import GrowingBackend

TEXTS = ["", "the rain in Spain stays", "<|im_end|> and l'été 蜻蛉", "no " * 50_000]


@pytest.fixture(scope="module")
def tokenizer_json() -> Any:
    return tokenizer_files(32_000, encoder=False)["tokenizer.json"]


@pytest.fixture(scope="module")
def whole(tokenizer_json: Any) -> LocalBackend:
    return LocalBackend.from_file(json.dumps(tokenizer_json, ensure_ascii=False).encode(), {})


def tokens_of(backend: GrowingBackend | LocalBackend, text: str) -> tuple[list[int], Any, str]:
    tokens = backend.encode(text, add_special_tokens=True)
    return tokens, backend.offsets(text), backend.decode(tokens[:9], skip_special_tokens=False)


def test_it_says_the_same_before_and_after(tokenizer_json: Any, whole: LocalBackend) -> None:
    backend = GrowingBackend(json.dumps(tokenizer_json, ensure_ascii=False).encode(), {})
    assert not backend.is_whole
    assert not backend.has_decoded.is_set()
    for text in TEXTS[:-1]:
        assert tokens_of(backend, text) == tokens_of(whole, text)
    assert backend.has_decoded.is_set()
    assert not backend.is_whole
    backend.complete()
    assert backend.is_whole
    for text in TEXTS:
        assert tokens_of(backend, text) == tokens_of(whole, text)
    assert backend.piece_to_id("e") == whole.piece_to_id("e")
    assert backend.id_to_piece(300) == whole.id_to_piece(300)


def test_a_text_that_needs_all_of_it_has_it_parsed(tokenizer_json: Any, whole: LocalBackend) -> None:
    backend = GrowingBackend(json.dumps(tokenizer_json, ensure_ascii=False).encode(), {})
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda text: tokens_of(backend, text), TEXTS * 3))
    assert answers == [tokens_of(whole, text) for text in TEXTS * 3]
    assert backend.is_whole


def test_a_small_one_is_whole_at_once() -> None:
    data = json.dumps(tokenizer_files(300, encoder=False)["tokenizer.json"]).encode()
    assert GrowingBackend(data, {}).is_whole


def test_completing_during_requests_changes_nothing(tokenizer_json: Any, whole: LocalBackend) -> None:
    backend = GrowingBackend(json.dumps(tokenizer_json, ensure_ascii=False).encode(), {})
    expected = tokens_of(whole, TEXTS[1])
    thread = threading.Thread(target=backend.complete)
    answers = [tokens_of(backend, TEXTS[1])]
    thread.start()
    while thread.is_alive():
        answers.append(tokens_of(backend, TEXTS[1]))
    assert all(answer == expected for answer in answers)


def test_what_cannot_be_parsed_is_an_error_from_then_on(tokenizer_json: Any) -> None:
    model = tokenizer_json["model"] | {"merges": [*tokenizer_json["model"]["merges"], "no such"]}
    backend = GrowingBackend(json.dumps(tokenizer_json | {"model": model}, ensure_ascii=False).encode(), {})
    assert backend.encode("the", add_special_tokens=True)
    for _ in range(2):
        with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
            backend.complete()
        with pytest.raises(ModelError, match="cannot be read"):
            backend.encode("the", add_special_tokens=True)


@pytest.mark.parametrize("data", [b"", b"{" * 300_000, b"{}" + b" " * 300_000])
def test_what_is_no_tokenizer_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        GrowingBackend(data, {})
