"""One step of a decoder under way: stage by stage, each behind the gate of its weights.

It runs in one go once all weights have arrived, and follows them before that: the caller may check whether the next
stage's weights are exact, and do other work meanwhile. It does not know sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...loader.format.manifest import Tier
from ..step.backend import OnLayer
from ..step.batch import StepBatch, join, select
from ..step.logprobs import rows_at_once
from ..weights import Gate

if TYPE_CHECKING:
    from .adapter import Adapter
    from .decoder import Decoder


class ForwardPass:
    """A step under way, which can be left after any layer and taken up again: `stage` is what comes next, 0 being the
    embeddings, 1 to num_layers the layers, and num_layers + 1 the head.

    Rows that attend to each other's keys and values must keep their order: who depends on
    another pass must stay behind it (see `joined`).
    """

    def __init__(
        self,
        decoder: Decoder,
        batch: StepBatch,
        kv: Any,
        *,
        tier: Tier = Tier.REFINE,
        on_layer: OnLayer | None = None,
    ) -> None:
        self.batch = batch
        self.stage = 0
        self._decoder = decoder
        self._kv = kv
        self._tier = tier
        self._report = on_layer or _ignore
        # Of the rows; most passes have none.
        self._adapters: set[Adapter] = {span.adapter for span in batch.spans} - {None}
        self._step: Any = None  # the executor's
        self._x: Any = None  # the executor's activations, once stage is above 0; the logits in the end

    @property
    def is_done(self) -> bool:
        return self.stage > self._decoder.num_layers + 1

    @property
    def logits(self) -> Any:
        """(R, vocab_size) fp32, of the batch's `logit_rows`, when it is done."""
        assert self.is_done
        assert self._x is not None
        return self._x

    def can_advance(self, timeout_s: float = 0.0) -> bool:
        """Whether the next stage's weights hold the tier, now or within this time. Raises the load's error."""
        decoder = self._decoder
        if self.stage == 0:
            return decoder.weights.entry_gate.opens(self.batch.tokens, timeout_s, self._tier)
        return self._gate().opens(timeout_s, self._tier) and self._opens_adapters(timeout_s)

    def advance(self) -> None:
        """Run the next stage; blocks until its weights are there."""
        decoder, stage = self._decoder, self.stage
        is_exact = self._tier is Tier.REFINE
        if stage == 0:
            gate: Callable[[], None] = partial(decoder.weights.entry_gate, self.batch.tokens)
            use = (
                nullcontext()
                if is_exact
                else decoder.weights.entry_gate.reading(self.batch.tokens, self._tier)
            )
        else:
            gate = self._gate()
            use = nullcontext() if is_exact else self._gate().reading(self._tier)
        if is_exact:
            gate()
        self._opens_adapters(None)
        with use:
            started_s = time.monotonic()
            name = self._run()
            self._report(stage - 1, name, started_s, time.monotonic())

    def joined(self, behind: ForwardPass) -> ForwardPass:
        """This pass and another one at the same stage, whose rows may depend on this one's, as one pass."""
        assert (self.stage, self._tier) == (behind.stage, behind._tier)
        assert not self.is_done
        both = ForwardPass(
            self._decoder, join([self.batch, behind.batch]), self._kv, tier=self._tier, on_layer=self._report
        )
        both.stage = self.stage
        if self._x is not None and behind._x is not None:
            both._x = self._decoder.executor.join([self._x, behind._x])
        return both

    def without(self, numbers: Collection[int]) -> ForwardPass:
        """This pass without these of its batch's spans, by number. Some must be left."""
        batch, rows = select(
            self.batch, [number for number in range(len(self.batch.spans)) if number not in numbers]
        )
        less = ForwardPass(self._decoder, batch, self._kv, tier=self._tier, on_layer=self._report)
        less.stage = self.stage
        if self._x is not None:
            less._x = self._decoder.executor.select(self._x, rows)
        return less

    def _gate(self) -> Gate:
        decoder = self._decoder
        weights = decoder.weights
        return weights.layers[self.stage - 1].gate if self.stage <= decoder.num_layers else weights.head_gate

    def _opens_adapters(self, timeout_s: float | None) -> bool:
        """Whether all adapters of the rows have the next stage's layer. Raises what their loads failed with."""
        layer = self.stage - 1
        is_layer = 0 <= layer < self._decoder.num_layers
        return not is_layer or all(adapter.opens(layer, timeout_s) for adapter in self._adapters)

    def _run(self) -> str:
        """The next stage, or all layers that are left where one call computes them sooner: their weights are there."""
        decoder, stage, executor = self._decoder, self.stage, self._decoder.executor
        self.stage += 1
        if stage == 0:
            self._x = executor.embed(self.batch)
            return "embed"
        assert self._x is not None
        if stage > decoder.num_layers:
            self._score()
            self._x = executor.logits(self._x, self.batch.logit_rows)
            return "head"
        if self._step is None:
            self._step = executor.begin(self.batch, self._kv)
        are_adapters_there = all(adapter.is_complete for adapter in self._adapters)
        if executor.runs_layers_together and decoder.is_exact and are_adapters_there:
            self.stage = decoder.num_layers + 1
        self._x = executor.layers(self._step, stage - 1, self.stage - 1, self._x)
        return f"layers.{stage - 1}" if self.stage == stage + 1 else "layers"

    def _score(self) -> None:
        """The logits of prompts that are asked for, some rows at a time."""
        num_at_once = rows_at_once(self._decoder.spec.vocab_size)
        for scored in self.batch.scored:
            for first in range(0, scored.length, num_at_once):
                end = min(scored.length, first + num_at_once)
                rows = np.arange(scored.start + first, scored.start + end)
                scored.scores.add(scored.position + first, self._decoder.executor.logits(self._x, rows))


def _ignore(index: int, name: str, start_s: float, end_s: float) -> None:
    pass
