"""Real tokenizers of the three kinds that models have, as `context.model` shows them, and texts to cut with them."""

from __future__ import annotations

from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from teneral.runtime.text.backend import LocalBackend

from .small_host import SENTENCE, small_backend

STORY = (
    "The nymph lives under water for years. It climbs a stem at night; there, its skin splits.\n\n"
    "A soft, pale dragonfly pulls itself out! By morning its wings have hardened, and it flies.\n"
)


class RealTokens:
    """A real tokenizer, as `context.model` shows it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = LocalBackend(tokenizer, {})

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        return self._backend.offsets(text)


def byte_level() -> RealTokens:
    return RealTokens(small_backend(texts=(SENTENCE, STORY), vocab_size=400))


def metaspace() -> RealTokens:
    """Tokens like SentencePiece's: a mark in front of each word, the first included; unknown characters as bytes."""
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ["▁", "e", "th", "▁th", "▁the", "he", "t", "h", "s", "▁s", "in", "an", " "]:
        pieces.setdefault(piece, len(pieces))
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("h", "e"), ("▁", "s")]
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return RealTokens(tokenizer)


def word_pieces() -> RealTokens:
    """Tokens like BERT's: lower case; accents and spaces belong to no token."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator([STORY, SENTENCE], trainer)
    return RealTokens(tokenizer)


TOKENIZERS = {"byte level": byte_level(), "metaspace": metaspace(), "word pieces": word_pieces()}
TEXTS = st.one_of(
    st.text(max_size=400),
    st.lists(
        st.sampled_from(
            [
                "The ",
                "the",
                " dragonfly",
                ". ",
                "\n\n",
                "\n",
                "é",
                "蜻蛉。",
                "🐉",
                "  ",
                "? ",
                ", ",
                "x" * 30,
                "\t",
            ]
        ),
        max_size=150,
    ).map("".join),
)
