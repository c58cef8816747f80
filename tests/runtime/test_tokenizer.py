from __future__ import annotations

import json
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.small_host import BEGIN, END, small_backend
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from teneral.loader.errors import UsageError
from teneral.runtime.errors import ModelError, RequestError
from teneral.runtime.text.backend import LocalBackend
from teneral.runtime.text.settings import MAX_TEMPLATE_BYTES, TextSettings, read_template
from teneral.runtime.text.tokenizer import MAX_TEXT_CHARS, TextTokenizer

TEXT = "The dragonfly, newly emerged, is called a teneral: pale, soft. C'est l'été 蜻蛉 🐉\n\tEnd.  " * 3


@pytest.fixture(scope="module")
def backend():
    return small_backend(texts=(TEXT,), vocab_size=400)


@pytest.fixture(scope="module")
def tokenizer(backend):
    settings = TextSettings({"eos_token": END}, {}, frozenset())
    return TextTokenizer(
        LocalBackend(Tokenizer.from_str(backend.to_str()), settings.special_tokens), settings
    )


@pytest.fixture(scope="module")
def oracle(backend):
    """The tokenizer that transformers reads from the same file."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BEGIN, eos_token=END, clean_up_tokenization_spaces=False
    )


def from_files(**files):
    """A tokenizer from files: names with '_' for '.'; JSON values, text or bytes."""

    def read(name):
        content = files.get(name.replace(".", "_"))
        if content is None or isinstance(content, bytes):
            return content
        return content.encode() if isinstance(content, str) else json.dumps(content).encode()

    tokenizer = TextTokenizer.from_files(read)
    tokenizer.close()
    return tokenizer


TEXTS = st.text(max_size=60) | st.lists(
    st.sampled_from([BEGIN, END, " dragonfly", "é", "蜻", "🐉", "\n", "  ", "<", "/s>"]), max_size=12
).map("".join)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, add_special_tokens=st.booleans())
def test_it_encodes_as_transformers_does(tokenizer, oracle, text, add_special_tokens):
    expected = oracle(text, add_special_tokens=add_special_tokens)["input_ids"]
    assert tokenizer.encode(text, add_special_tokens=add_special_tokens) == expected


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_it_decodes_as_transformers_does(tokenizer, oracle, data, skip):
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    expected = oracle.decode(tokens, skip_special_tokens=skip)
    assert tokenizer.decode(tokens, skip_special_tokens=skip) == expected


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_a_text_comes_back_as_it_was(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == BEGIN + text


def test_other_threads_run_while_a_long_text_is_tokenised(tokenizer):
    thread = threading.Thread(target=lambda: tokenizer.encode("abcdefgh " * (MAX_TEXT_CHARS // 9)))
    num_turns = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 5  # one that kept the interpreter to itself would leave one or two


def test_a_text_that_is_too_long_is_refused_before_it_is_tokenised(tokenizer):
    assert len(tokenizer.encode(" " * MAX_TEXT_CHARS)) > 0
    with pytest.raises(RequestError, match="characters"):
        tokenizer.encode(" " * (MAX_TEXT_CHARS + 1))


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("\ud83d")


@pytest.mark.parametrize("tokens", [[-1], [1 << 40], ["a"], [None]])
def test_what_is_no_token_cannot_be_decoded(tokenizer, tokens):
    with pytest.raises(RequestError, match="invalid tokens"):
        tokenizer.decode(tokens)


def test_a_token_beyond_the_vocabulary_has_no_text(tokenizer):
    assert tokenizer.decode([tokenizer.vocab_size + 7]) == ""


def test_pieces_and_ids_are_each_others_inverse(tokenizer):
    for token in range(tokenizer.vocab_size):
        assert tokenizer.piece_to_id(tokenizer.id_to_piece(token)) == token
    assert tokenizer.id_to_piece(tokenizer.vocab_size) is None
    assert tokenizer.id_to_piece(-1) is None
    assert tokenizer.id_to_piece(1 << 60) is None
    assert tokenizer.piece_to_id("no such piece") is None


def test_padding_and_truncation_of_the_file_are_not_applied(backend):
    backend = Tokenizer.from_str(backend.to_str())
    backend.enable_padding(length=64)
    backend.enable_truncation(4)
    tokens = from_files(tokenizer_json=backend.to_str()).encode("a text of several tokens")
    assert 4 < len(tokens) < 64


# Files.


def test_special_tokens_may_be_texts_or_objects_and_stand_in_either_file(backend):
    tokenizer = from_files(
        tokenizer_json=backend.to_str(),
        special_tokens_map_json={"bos_token": {"content": BEGIN, "lstrip": False}, "eos_token": "overruled"},
        tokenizer_config_json={
            "eos_token": END,
            "unk_token": None,
            "model_max_length": 7,
            "add_bos_token": True,
        },
    )
    assert tokenizer.special_tokens == {"bos_token": BEGIN, "eos_token": END}


def test_a_named_special_token_is_recognised_and_skipped_even_if_the_vocabulary_has_it_as_a_word():
    vocabulary = {"a": 0, "<turn>": 1, "<": 2, ">": 3, "t": 4, "u": 5, "r": 6, "n": 7}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer = from_files(tokenizer_json=backend.to_str(), tokenizer_config_json={"eos_token": "<turn>"})
    assert tokenizer.encode("a<turn>a") == [0, 1, 0]
    assert tokenizer.decode([0, 1, 0]) == "a a"
    assert tokenizer.vocab_size == len(vocabulary)


def test_a_named_special_token_that_the_vocabulary_lacks_is_not_added(backend):
    tokenizer = from_files(tokenizer_json=backend.to_str(), tokenizer_config_json={"eos_token": "<nowhere>"})
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config_json": {"eos_token_id": 7}}, {7}),
        ({"config_json": {"eos_token_id": 7}, "generation_config_json": {"eos_token_id": [8, 9]}}, {8, 9}),
        ({"config_json": {"eos_token_id": 7}, "generation_config_json": {}}, {7}),
        ({"config_json": {"eos_token_id": 7}, "tokenizer_config_json": {"eos_token": END}}, {1, 7}),
        (
            {"config_json": {"eos_token_id": None}, "tokenizer_config_json": {"eos_token": {"content": END}}},
            {1},
        ),
    ],
)
def test_every_token_that_ends_a_text_is_collected(backend, files, expected):
    assert from_files(tokenizer_json=backend.to_str(), **files).eos_token_ids == expected


@pytest.mark.parametrize("eos", ["2", -1, 1.5, True, [1, "2"], {"a": 1}, 1 << 40])
def test_an_eos_token_id_that_is_no_token_is_refused(backend, eos):
    with pytest.raises(ModelError, match="eos_token_id"):
        from_files(tokenizer_json=backend.to_str(), config_json={"eos_token_id": eos})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer_json": b""}, "tokenizer.json cannot be read"),
        ({"tokenizer_json": b"\xff\xfe"}, "tokenizer.json cannot be read"),
        ({"tokenizer_json": {"version": "1.0"}}, "tokenizer.json cannot be read"),
        ({"tokenizer_json": b"[" * 100_000}, "tokenizer.json cannot be read"),
        ({"tokenizer_config_json": "{"}, "tokenizer_config.json is not JSON"),
        ({"tokenizer_config_json": "[" * 100_000}, "tokenizer_config.json is not JSON"),
        ({"special_tokens_map_json": []}, "special_tokens_map.json is not a JSON object"),
        ({"generation_config_json": b"\xff"}, "generation_config.json is not JSON"),
        ({"chat_template_jinja": b"\xff"}, "chat_template.jinja is not UTF-8"),
        ({"tokenizer_config_json": {"chat_template": [{"name": "rag", "template": "x"}]}}, "only rag"),
    ],
)
def test_a_damaged_file_is_named(backend, files, message):
    with pytest.raises(ModelError, match=message):
        from_files(**({"tokenizer_json": backend.to_str()} | files if files else {}))


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists))
def test_any_bytes_for_a_tokenizer_end_in_an_error_that_says_so(data):
    with pytest.raises(ModelError):
        from_files(tokenizer_json=data if isinstance(data, bytes) else json.dumps(data).encode())


def test_a_wordpiece_tokenizer_works_as_well():
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "soft": 3, "##er": 4, "wing": 5, "##s": 6}
    backend = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    tokenizer = from_files(tokenizer_json=backend.to_str())
    tokens = tokenizer.encode("Softer Wings")
    assert tokens == [3, 4, 5, 6]
    assert tokenizer.decode(tokens) == "softer wings"


def test_the_template_file_goes_before_the_one_in_the_settings(backend):
    files = {"tokenizer_json": backend.to_str(), "tokenizer_config_json": {"chat_template": "settings"}}
    messages = [{"role": "user", "content": "x"}]
    for more, expected in (({}, "settings"), ({"chat_template_jinja": "file"}, "file")):
        tokenizer = from_files(**files, **more)
        assert tokenizer.chat(messages) == expected
        tokenizer.close()


def test_a_template_of_its_own_serves_requests_with_tools(backend):
    templates = {"default": "plain", "tool_use": "with {{ tools | length }}"}
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    tokenizer = from_files(tokenizer_json=backend.to_str(), tokenizer_config_json={"chat_template": listed})
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.chat(messages) == "plain"
    assert tokenizer.chat(messages, tools=[]) == "plain"
    assert tokenizer.chat(messages, tools=[{"type": "function"}]) == "with 1"
    tokenizer.close()


def test_special_tokens_are_variables_of_the_template_and_may_be_overruled(backend):
    tokenizer = from_files(
        tokenizer_json=backend.to_str(),
        tokenizer_config_json={"bos_token": BEGIN, "chat_template": "{{ bos_token }}{{ mood }}"},
    )
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.chat(messages, mood="calm") == f"{BEGIN}calm"
    assert tokenizer.chat(messages, bos_token="") == ""
    tokenizer.close()


def test_a_template_file_stands_in_for_the_models_own(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text("mine")
    settings = TextSettings({}, {"default": "theirs", "tool_use": "theirs"}, frozenset())
    assert settings.with_template(read_template(str(path))).templates == {"default": "mine"}
    path.write_bytes(b"\xff")
    for wrong in (str(path), str(tmp_path / "missing"), str(tmp_path)):
        with pytest.raises(UsageError, match="chat template"):
            read_template(wrong)
    path.write_bytes(b"x" * (MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(UsageError, match="larger"):
        read_template(str(path))
