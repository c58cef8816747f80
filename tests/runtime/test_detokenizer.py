"""Incremental detokenising against real decoders: byte-level BPE, byte fallback, WordPiece."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from teneral.runtime.text.detokenizer import MAX_OPEN_TOKENS, REPLACEMENT, Detokenizer

TEXT = (
    "The quick brown fox – naïve café, 東京タワー, 😀👩‍👩‍👧 and Ünïcödé ✓. \n\n"
    "  Indented\tcode: x = {1: 'a'}\n"
    "مرحبا بالعالم  Привет 🇩🇪 한국어 "
)


def byte_level():
    """Few merges, so that most characters outside ASCII are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return tokenizer


def byte_fallback():
    """Llama 2's decoder: pieces with ▁, and <0xNN> for what the vocabulary lacks; one leading space is stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzTHé.,", "▁the", "▁a", "an", "▁qu"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "n")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


def word_piece():
    pieces = ["[UNK]", "[CLS]", "[SEP]", "the", "un", "##happy", "##ness", "cat", "##s", ".", ",", "a"]
    tokenizer = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def tokenizer(request):
    return request.param()


@pytest.fixture(scope="module")
def bytes_tokenizer():
    return byte_level()


@pytest.fixture(scope="module")
def fallback_tokenizer():
    return byte_fallback()


def pieces_of(tokenizer, tokens, prompt=()):
    detokenizer = Detokenizer(tokenizer, prompt)
    return [detokenizer.push(token) for token in tokens]


def test_the_pieces_are_the_whole_text(tokenizer):
    tokens = tokenizer.encode(TEXT).ids
    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_no_piece_has_half_a_character(tokenizer):
    tokens = tokenizer.encode(TEXT).ids
    assert not any(REPLACEMENT in piece for piece in pieces_of(tokenizer, tokens))


def test_a_character_comes_with_its_last_byte(bytes_tokenizer):
    character = "\U0001f9ff"
    tokens = [
        bytes_tokenizer.token_to_id(letter) for letter in "ðŁ§¿"
    ]  # byte-level BPE's letters for its bytes
    assert pieces_of(bytes_tokenizer, tokens) == ["", "", "", character]


def test_an_incomplete_character_at_the_end_is_never_given_out(tokenizer):
    tokens = tokenizer.encode("ab \U0001f9ff").ids
    assert "".join(pieces_of(tokenizer, tokens[:-1])) == "ab "


def test_the_space_before_the_first_generated_word_depends_on_the_prompt(fallback_tokenizer):
    prompt = fallback_tokenizer.encode("the").ids
    the = fallback_tokenizer.token_to_id("▁the")
    assert pieces_of(fallback_tokenizer, [the], prompt) == [" the"]
    assert pieces_of(fallback_tokenizer, [the]) == ["the"]


def test_special_tokens_have_no_text_and_do_not_cost_a_space(fallback_tokenizer):
    the, end = fallback_tokenizer.token_to_id("▁the"), fallback_tokenizer.token_to_id("</s>")
    assert pieces_of(fallback_tokenizer, [the, end, the, end, end, the]) == [
        "the",
        "",
        " the",
        "",
        "",
        " the",
    ]


def test_word_pieces_join():
    tokenizer = word_piece()
    tokens = [
        tokenizer.token_to_id(piece) for piece in ("the", "un", "##happy", "##ness", "[SEP]", "cat", ".")
    ]
    assert pieces_of(tokenizer, tokens) == ["the", " un", "happy", "ness", "", " cat", "."]


def test_bytes_that_are_no_character_are_shown_after_a_bounded_wait(tokenizer):
    lead = tokenizer.token_to_id("<0xF0>") or tokenizer.token_to_id("ð")
    pieces = pieces_of(tokenizer, [lead] * 12)
    assert pieces[:3] == ["", "", ""]
    assert len("".join(pieces)) >= 8


def test_text_goes_on_after_bytes_that_are_no_character(tokenizer):
    lead = tokenizer.token_to_id("<0xF0>") or tokenizer.token_to_id("ð")
    tokens = [*tokenizer.encode("the").ids, *[lead] * 6, *tokenizer.encode("quant").ids]
    text = "".join(pieces_of(tokenizer, tokens))
    assert text.startswith("the")
    assert text.endswith("quant")
    assert REPLACEMENT in text


def test_tokens_that_end_one_character_and_begin_the_next_flow_without_end():
    """Each token is the last byte of a character and the first two of the next."""

    class Straddling:
        def decode(self, tokens):
            return b"".join(b"\x9e\xe4\xbd" if token else b"\xe4\xbd" for token in tokens).decode(
                errors="replace"
            )

    detokenizer = Detokenizer(Straddling(), [])
    pieces = [detokenizer.push(token) for token in [0, *[1] * (4 * MAX_OPEN_TOKENS)]]
    assert pieces == ["", *["\u4f5e"] * (4 * MAX_OPEN_TOKENS)]


def test_the_window_stays_short():
    longest = 0

    class Watching:
        def decode(self, tokens):
            nonlocal longest
            longest = max(longest, len(tokens))
            return "x" * len(tokens)

    detokenizer = Detokenizer(Watching(), [1] * 1000)
    for _ in range(500):
        detokenizer.push(1)
    assert longest <= 9


@settings(deadline=None, max_examples=150)
@given(text=st.text(max_size=40), prompt_length=st.integers(0, 10))
def test_any_text_comes_out_as_it_is_wherever_the_prompt_ends(bytes_tokenizer, text, prompt_length):
    prompt_text, rest = text[:prompt_length], text[prompt_length:]
    prompt, tokens = bytes_tokenizer.encode(prompt_text).ids, bytes_tokenizer.encode(rest).ids
    expected = rest.rstrip(REPLACEMENT)  # what a text ends with of U+FFFD could be an open character
    if not prompt_text.endswith(REPLACEMENT):
        assert "".join(pieces_of(bytes_tokenizer, tokens, prompt)).startswith(expected)


def test_random_tokens_never_lose_or_repeat_text(bytes_tokenizer):
    """Mostly bytes that are no UTF-8; compared with decoding all at once, U+FFFD left out."""
    generator = random.Random(5)
    for _ in range(60):
        tokens = [generator.randrange(2, bytes_tokenizer.get_vocab_size()) for _ in range(60)]
        text = "".join(pieces_of(bytes_tokenizer, tokens)).replace(REPLACEMENT, "")
        whole = bytes_tokenizer.decode(tokens).replace(REPLACEMENT, "")
        assert text == whole
