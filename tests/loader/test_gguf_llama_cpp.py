"""Tokens and logits of GGUF files by llama.cpp itself, compared with those of the same files read here.

llama.cpp has an environment of its own, which scripts/conformance-gguf makes; TENERAL_LLAMA_CPP names its Python.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.gguf_files import float_tensors, gguf_file, metadata
from tests.support.memory_store import MemoryStore
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from teneral.loader.artifact import open_artifact, open_model
from teneral.loader.format.gguf.directory import GgufDirectory
from teneral.runtime.quality.evaluate import PartCounter, WholeDecoder
from teneral.runtime.quality.sequences import Sequences

LLAMA_CPP = os.environ.get("TENERAL_LLAMA_CPP", "")
ROOT = Path(__file__).parents[2]
NAME = "model.gguf"
SPLITS = (
    *("gpt-2", "smollm", "refact", "llama-bpe", "dbrx"),
    *("qwen2", "qwen35", "deepseek-r1-qwen", "gpt-4o", "tekken"),
)
TEXTS = (
    "Hello, world! It's 2024, and they'll've DON'T'd 1234567 things.",
    "  leading, trailing  \n\n\t tabs\r\n and   runs    of spaces   ",
    "def f(x):\n    return x**2  # squares\n\n\nclass A:\n\tpass\n",
    "Füße, naïve café, ÀÉÎ, ǅungla, e\u0301 combined, ﬁ ligature",
    "日本語のテキスト、한국어 문장, Русский ТЕКСТ, العربية ١٢٣, हिन्दी ४५",
    "camelCaseWordsAndHTTPServerNAMES'S x'LL Y'Re",
    "emoji 🙂👩‍👩‍👧 end\u00a0of\u2003wide\u3000spaces\u200b.",
    "http://a.b/c?d=e&f=g#h -- (x)[y]{z} <|end|> <|start|>a //\n/ !!\n?",
    "",
    " ",
    "\n",
)

pytestmark = [
    pytest.mark.skipif(not LLAMA_CPP, reason="needs llama.cpp: run scripts/conformance-gguf"),
    pytest.mark.slow,
]


def run(program: Path, *arguments: str, given: Any) -> Any:
    command = [LLAMA_CPP, str(program), *arguments]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def tokens_of(path: Path, texts: list[str]) -> list[list[int]]:
    """By llama.cpp."""
    found: list[list[int]] = run(
        ROOT / "tests" / "support" / "llama_cpp_tokens.py", given={"model": str(path), "texts": texts}
    )
    return found


def tokenizer_of(source: Any) -> Tokenizer:
    return Tokenizer.from_str(source.read("tokenizer.json", max_bytes=1 << 28)[0].decode())


def own_tokens(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]


def random_texts(count: int) -> list[str]:
    """Of characters from all of `TEXTS`, in an order that no writer had in mind."""
    chance = random.Random(0)
    letters = [*{letter for text in TEXTS for letter in text if letter not in "<|>"}, *"  \n  '"]
    return ["".join(chance.choices(letters, k=chance.randrange(1, 40))) for _ in range(count)]


def comparable(split: str, texts: list[str]) -> list[str]:
    """The texts that llama.cpp splits as the model's own tokenizer does.

    It leaves out Qwen's normalization (NFC), and takes case for that of ASCII and marks for no letters where the
    patterns of GPT-4o and Tekken have classes for both.
    """
    if split in ("qwen2", "qwen35", "deepseek-r1-qwen"):
        return [unicodedata.normalize("NFC", text) for text in texts]
    if split in ("gpt-4o", "tekken"):
        return ["".join(letter for letter in text if not _differs(letter)) for text in texts]
    return texts


def _differs(letter: str) -> bool:
    kind = unicodedata.category(letter)
    return kind.startswith("M") or (kind in ("Lu", "Ll", "Lt") and not letter.isascii())


@pytest.fixture(scope="module")
def byte_level() -> tuple[list[str], list[str]]:
    """Tokens and merges across the borders of words: tokens tell where a text was split."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS * 4, *random_texts(300)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    return [*pieces, "<|end|>", "<|start|>"], merges


@pytest.mark.parametrize("split", SPLITS)
def test_each_rule_splits_text_as_llama_cpp_does(
    split: str, byte_level: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    pieces, merges = byte_level
    more: dict[str, Any] = {
        "tokenizer__ggml__pre": split,
        "tokenizer__ggml__tokens": pieces,
        "tokenizer__ggml__token_type": [1] * (len(pieces) - 2) + [3, 3],
        "tokenizer__ggml__merges": merges,
        "tokenizer__ggml__bos_token_id": len(pieces) - 1,
        "tokenizer__ggml__eos_token_id": len(pieces) - 2,
    }
    data = gguf_file(metadata(**more), float_tensors(vocab_size=len(pieces)))
    (tmp_path / NAME).write_bytes(data)
    texts = comparable(split, [*TEXTS, *random_texts(400)])

    own = own_tokens(tokenizer_of(GgufDirectory(MemoryStore({NAME: data}), NAME)), texts)

    for text, ours, theirs in zip(texts, own, tokens_of(tmp_path / NAME, texts), strict=True):
        assert ours == theirs, text


@pytest.mark.parametrize("opens", [True, False], ids=["opening space", "as it is"])
def test_sentence_pieces_are_those_of_llama_cpp(opens: bool, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False)
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in [*TEXTS[:5] * 4, prose()]], trainer)
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    single = sorted(piece for piece in vocabulary if len(piece) == 1)
    joined = sorted((piece for piece in vocabulary if len(piece) > 1), key=vocabulary.__getitem__)
    more: dict[str, Any] = {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__pre": None,
        "tokenizer__ggml__merges": None,
        "tokenizer__ggml__add_space_prefix": opens,
        "tokenizer__ggml__tokens": [
            *("<unk>", "<s>", "</s>"),
            *(f"<0x{byte:02X}>" for byte in range(256)),
            *joined,
            *single,
        ],
        "tokenizer__ggml__token_type": [2, 3, 3, *[6] * 256, *[1] * (len(joined) + len(single))],
        "tokenizer__ggml__scores": [
            *[0.0] * 259,
            *(-float(rank) for rank in range(len(joined))),
            *[-1e9] * len(single),
        ],
        "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 2,
    }
    size = len(more["tokenizer__ggml__tokens"])
    data = gguf_file(metadata(**more), float_tensors(vocab_size=size))
    (tmp_path / NAME).write_bytes(data)
    texts = [text for text in [*TEXTS, *random_texts(400), prose()] if text and "<|" not in text]

    own = own_tokens(tokenizer_of(GgufDirectory(MemoryStore({NAME: data}), NAME)), texts)

    for text, ours, theirs in zip(texts, own, tokens_of(tmp_path / NAME, texts), strict=True):
        assert ours == theirs, text


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The file that its package has, as llama.cpp's converter and quantiser wrote it."""
    command = [sys.executable, str(ROOT / "demo" / "smollm2.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def prose() -> str:
    return (ROOT / "docs" / "architecture.md").read_text()


def test_a_real_files_tokens_are_those_of_llama_cpp(smollm2: Path) -> None:
    chat = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    texts = [*TEXTS, *random_texts(400), prose(), chat]
    own = own_tokens(tokenizer_of(open_model(str(smollm2))), texts)
    for text, ours, theirs in zip(texts, own, tokens_of(smollm2, texts), strict=True):
        assert ours == theirs, text


def test_a_real_file_expects_the_same_next_tokens(smollm2: Path, tmp_path: Path) -> None:
    """llama.cpp rounds the inputs of products to 8 bits, so two tokens that are nearly as likely may change places."""
    source = open_model(str(smollm2))
    window = own_tokens(tokenizer_of(source), [prose()])[0][:256]
    run(
        ROOT / "benchmarks" / "peers" / "logits.py",
        str(smollm2),
        str(tmp_path / "theirs.npy"),
        given=[window],
    )
    theirs = np.load(tmp_path / "theirs.npy")[0, : len(window)]
    manifest = open_artifact(source)
    model = WholeDecoder(source, manifest, threads=None, on_part=PartCounter(None, 0))
    ours = Sequences(model.decoder, 1, len(window)).feed({0: window}, num_logits=len(window))

    second, first = np.sort(theirs, axis=1)[:, -2:].T
    is_clear = first - second > 1.0
    agrees = ours.argmax(axis=1) == theirs.argmax(axis=1)
    assert is_clear.sum() > 60
    assert agrees[is_clear].all()
    assert agrees.mean() > 0.9
