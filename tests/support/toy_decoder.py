"""A decoder small enough to know its every answer, and that notices when its KV pool was mishandled.

The pool stores each token and its position. A forward pass reads a sequence's whole history back through its
block table and refuses to go on unless its positions are whole; the logits are a function of that history
alone. So a wrong slot, a block given to two sequences, or a lost recomputation raises or changes the tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from teneral.runtime.step.batch import SequenceSpan, StepBatch

NUM_CONTEXTS = 509  # rows of the table of logits; a history picks one
UNWRITTEN = -1


@dataclass(frozen=True)
class ToyConfig:
    max_context: int = 128
    vocab_size: int = 64


class ToyPool:
    """Tokens and positions, block by block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.data = np.full((2, num_blocks, block_size), UNWRITTEN)

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        self.data[:, target, :num_tokens] = self.data[:, source, :num_tokens]


class ToyDecoder:
    """`gate` is waited for like weights. `before_forward` gets the number of each pass and may raise."""

    def __init__(self, *, max_context: int = 128, vocab_size: int = 64, seed: int = 0) -> None:
        self.config = ToyConfig(max_context, vocab_size)
        generator = np.random.default_rng(seed)
        table = generator.standard_normal((NUM_CONTEXTS, vocab_size), dtype=np.float32)
        self._table = table * np.float32(2.0)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()  # a pass has begun, and may be waiting at the gate
        self.before_forward: Callable[[int], None] = lambda number: None
        self.num_passes = 0
        self.batch_sizes: list[int] = []  # sequences of each pass
        self.batch_tokens: list[int] = []

    def kv_block_bytes(self, block_size: int) -> int:
        return block_size * 2 * 8

    def new_kv(self, num_blocks: int, block_size: int) -> ToyPool:
        return ToyPool(num_blocks, block_size)

    def forward(
        self,
        batch: StepBatch,
        pool: ToyPool,
        *,
        on_layer: Callable[[int, str, float, float], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        number, self.num_passes = self.num_passes, self.num_passes + 1
        self.batch_sizes.append(len(batch.spans))
        self.batch_tokens.append(len(batch.tokens))
        self.entered.set()
        self.gate.wait()
        self.before_forward(number)
        if on_layer is not None:
            on_layer(0, "layers.0", 1.0, 2.0)
        kv = pool.data
        flat = kv.reshape(2, -1)
        assert len(set(batch.slots.tolist())) == len(batch.slots), "two tokens go to one slot"
        flat[0, batch.slots] = batch.tokens
        flat[1, batch.slots] = batch.positions
        logits = {}
        block_size = kv.shape[2]
        written: set[int] = set()
        for span in batch.spans:
            own = set(span.blocks[(span.context_len - span.length) // block_size :])
            assert not written & own, "two sequences write to one block"
            written |= own
            self._check_span(span, batch, kv)
            history = kv[0, list(span.blocks)].flatten()[: span.context_len]
            for row in batch.logit_rows.tolist():
                if span.start <= row < span.start + span.length:
                    logits[row] = self.logits_after(history[: int(batch.positions[row]) + 1].tolist())
            for scored in batch.scored:
                if span.start <= scored.start < span.start + span.length:
                    ends = range(scored.position + 1, scored.position + scored.length + 1)
                    scored.scores.add(
                        scored.position, np.stack([self.logits_after(history[:end].tolist()) for end in ends])
                    )
        rows = [logits[row] for row in batch.logit_rows.tolist()]
        return np.stack(rows) if rows else np.empty((0, self.config.vocab_size), np.float32)

    def logits_after(self, history: Sequence[int]) -> npt.NDArray[np.float32]:
        """What the model says (vocab,) after these tokens, without any KV pool."""
        key = 7
        for token in history:
            key = (key * 131 + token + 1) % 1_000_003
        return self._table[key % NUM_CONTEXTS]

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """The greedy continuation, as it has to be."""
        history = list(prompt)
        for _ in range(num_tokens):
            history.append(int(self.logits_after(history).argmax()))
        return tuple(history[len(prompt) :])

    def _check_span(self, span: SequenceSpan, batch: StepBatch, kv: npt.NDArray[np.int64]) -> None:
        block_size = kv.shape[2]
        assert span.context_len <= len(span.blocks) * block_size, "too few blocks"
        positions = kv[1, list(span.blocks)].flatten()[: span.context_len]
        assert positions.tolist() == list(range(span.context_len)), "the pool does not hold the sequence"
        rows = slice(span.start, span.start + span.length)
        first = span.context_len - span.length
        assert batch.positions[rows].tolist() == list(range(first, span.context_len))
        written = [
            span.blocks[position // block_size] * block_size + position % block_size
            for position in range(first, span.context_len)
        ]
        assert batch.slots[rows].tolist() == written, "a token goes to a slot that is not its own"


class ToyTokenizer:
    """A letter a token."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("A") + token) for token in tokens)
