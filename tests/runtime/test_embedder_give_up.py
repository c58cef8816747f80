"""An abandoned call costs no more than the current batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from tests.support.load import patience_s

from teneral.runtime.engine.embedder import Embedder
from teneral.runtime.errors import CancelledError


class HeldModel:
    """Embeds a text as its length, a batch at a time, each when it is let."""

    config = SimpleNamespace(max_tokens=8, vocab_size=10)

    def __init__(self) -> None:
        self.may_go = threading.Semaphore(0)
        self.began = threading.Semaphore(0)
        self.texts: list[int] = []

    def embed(self, token_lists: Sequence[Sequence[int]], type_lists: object = None) -> np.ndarray:
        self.began.release()
        self.may_go.acquire()
        self.texts.append(len(token_lists))
        return np.array([[float(len(tokens))] for tokens in token_lists], np.float32)


def test_what_is_left_of_a_call_is_not_computed() -> None:
    model = HeldModel()
    embedder = Embedder(model, max_batch_tokens=8)
    embedder.start()
    try:
        left = embedder.embed([[1, 2, 3, 4]] * 10)  # two texts a batch
        waiting = embedder.embed([[1]])
        model.began.acquire()
        embedder.give_up(left)
        embedder.give_up(left)
        with pytest.raises(CancelledError):
            left.result(patience_s(10))
        for _ in range(2):
            model.may_go.release()
        assert waiting.result(patience_s(10)).tolist() == [[1.0]]
        assert model.texts == [2, 1]
        assert embedder.statistics().queued == 0
    finally:
        for _ in range(20):
            model.may_go.release()
        embedder.stop()


def test_a_call_that_is_done_or_not_begun_can_be_given_up_too() -> None:
    model = HeldModel()
    embedder = Embedder(model)
    never = embedder.embed([[1]])
    embedder.give_up(never)
    assert never.cancelled()
    embedder.start()
    model.may_go.release()
    done = embedder.embed([[1, 2]])
    assert done.result(patience_s(10)).tolist() == [[2.0]]
    embedder.give_up(done)
    assert done.result().tolist() == [[2.0]]
    embedder.stop()
