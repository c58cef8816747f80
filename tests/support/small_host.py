"""A model host small enough for a test: a real tokenizer and a real engine around a model that recites one
sentence.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from teneral.runtime.config import ServeConfig
from teneral.runtime.engine.embedder import Embedder
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.errors import ModelError
from teneral.runtime.step.backend import host_backend
from teneral.runtime.text.backend import LocalBackend
from teneral.runtime.text.chat import ChatTemplate
from teneral.runtime.text.settings import TextSettings
from teneral.runtime.text.tokenizer import TextTokenizer

SENTENCE = " café dragonflies quickly shed worn skin"
END = "</s>"
BEGIN = "<s>"
TRANSCRIPT = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content | trim }}\n\n{% endfor %}"
    "Assistant:"
)


def small_backend(*, texts: tuple[str, ...] = (SENTENCE * 3,), vocab_size: int = 320) -> Tokenizer:
    """A byte-level BPE that was trained on `texts`, with <s> in front of every text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=[BEGIN, END], show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, backend.token_to_id(BEGIN))]
    )
    return backend


class NoPool:
    """Of a model that reads no keys and values."""

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        pass


class RecitingModel:
    """Says `tokens` once, whatever it is asked, and then `end`. Waits for `gate` in every pass, as for
    weights.
    """

    def __init__(self, tokens: list[int], end: int, vocab_size: int) -> None:
        self.config = SimpleNamespace(max_context=128, vocab_size=vocab_size)
        self.gate = threading.Event()
        self.gate.set()
        self._first = tokens[0]
        self._next = dict(zip(tokens, [*tokens[1:], end], strict=True))
        assert len(self._next) == len(tokens), "a sentence in which each token comes once"

    def kv_block_bytes(self, block_size: int) -> int:
        return 1

    def new_kv(self, num_blocks: int, block_size: int) -> NoPool:
        return NoPool()

    def forward(self, batch: Any, kv: Any, *, on_layer: Any = None) -> np.ndarray:
        self.gate.wait()
        logits = np.zeros((len(batch.logit_rows), self.config.vocab_size), np.float32)
        for row, index in enumerate(batch.logit_rows.tolist()):
            logits[row, self._next.get(int(batch.tokens[index]), self._first)] = 100.0
        return logits


class CountingModel:
    """Embeds a text as (its number of tokens, its first token). Waits for `gate`, as for weights."""

    def __init__(self, vocab_size: int) -> None:
        self.config = SimpleNamespace(max_tokens=16, vocab_size=vocab_size)
        self.gate = threading.Event()
        self.gate.set()

    def embed(self, token_lists: Sequence[Sequence[int]], type_lists: object = None) -> np.ndarray:
        self.gate.wait()
        return np.array([[len(tokens), tokens[0]] for tokens in token_lists], np.float32)


class SmallHost:
    """What a `Context` needs of an instance. The futures are pending until `arrive`."""

    model_name = "small"

    def __init__(self) -> None:
        self.config = ServeConfig(model="unused")
        backend = small_backend()
        end = backend.token_to_id(END)
        settings = TextSettings({"bos_token": BEGIN, "eos_token": END}, {}, frozenset())
        self.text_tokenizer = TextTokenizer(
            LocalBackend(backend, settings.special_tokens),
            settings,
            chat_template=ChatTemplate(
                {"default": TRANSCRIPT}, settings.special_tokens
            ),  # starts when it is needed
        )
        self.model = RecitingModel(
            self.text_tokenizer.encode(SENTENCE, add_special_tokens=False), end, backend.get_vocab_size()
        )
        self.real_engine = Engine(
            self.model,
            self.text_tokenizer,
            options=EngineOptions(max_running=2, max_queued=2, kv_bytes=64),
            eos_token_ids=frozenset({end}),
            make_backend=host_backend,
        )
        self.encoder = CountingModel(backend.get_vocab_size())
        self.real_embedder = Embedder(self.encoder)
        self.tokenizer: Future[TextTokenizer] = Future()
        self.engine: Future[Engine] = Future()
        self.embedder: Future[Embedder] = Future()
        self.kind: Future[str] = Future()
        self.onnx: Future[Any] = Future()

    def arrive(self) -> None:
        self.tokenizer.set_result(self.text_tokenizer)
        self.engine.set_result(self.real_engine)
        self.embedder.set_result(self.real_embedder)
        self.kind.set_result("encoder")
        self.onnx.set_exception(ModelError("small takes texts, and no tensors"))


@contextmanager
def small_host(*, arrived: bool = True) -> Iterator[SmallHost]:
    host = SmallHost()
    host.real_engine.start()
    host.real_embedder.start()
    if arrived:
        host.arrive()
    try:
        yield host
    finally:
        host.model.gate.set()
        host.encoder.gate.set()
        stopped = host.real_engine.stop(timeout_s=10) and host.real_embedder.stop(timeout_s=10)
        host.text_tokenizer.close()
        host.real_engine.check_integrity()
        assert stopped, "the threads of engine and embedder ended"
