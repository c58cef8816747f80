"""A decoder and its forward passes: weights behind their gates, stages, and the executor that computes them.

Rows of several sequences come back to back, without padding; keys and values live in a paged pool of the executor's.
Building reads no tensor's content, and neither does a forward pass before it needs it: it begins with those rows of
the embeddings that its tokens have, and each layer first waits at its own gate, so computing follows the weights as
they arrive. It does not know where weights come from, how they are computed with, nor what a request is.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from ...loader.format.manifest import Tier
from ..kv.storage import KVKind
from ..step.backend import EXPERT_WAIT, OnLayer
from ..step.batch import Int64s, StepBatch, join, select
from ..step.logprobs import rows_at_once
from ..tensors import DType
from ..weights import Gate
from .decoder_config import DecoderConfig
from .executor import ComputeDtype, Executor, Floats, RoutingExecutor, StatefulExecutor, StripExecutor
from .matrices import DecoderLayerWeights, DecoderWeights, ExpertWeights
from .spec import DecoderSpec

if TYPE_CHECKING:
    from ..weights import ExpertGate
    from .adapter import Adapter  # of the few servers that have some
    from .speech import SpeechTower  # of the few models that have one
    from .vision import VisionTower  # likewise

REPORTED_WAIT_S = 1e-3  # for experts; less is no wait


class Work(enum.Enum):
    """The work of a stage."""

    EMBED = "embed"
    LAYER = "layer"
    ROUTE = "route"  # of a layer with a mixture: attention and the router, which asks for experts
    EXPERTS = "experts"  # and the rest of it
    STRIP = "strip"  # some rows of the head, as they arrive
    HEAD = "head"


class Stage(NamedTuple):
    """A piece of a forward pass, behind a gate of its own."""

    work: Work
    layer: int  # -1 for the embeddings, num_layers for the head
    strip: int = 0  # of the head, by number

    @property
    def name(self) -> str:
        """Its name on the timeline."""
        if self.work is Work.EMBED:
            return "embed"
        return "head" if self.work in (Work.STRIP, Work.HEAD) else f"layers.{self.layer}"


class Decoder:
    """A model and its weights. One forward pass at a time; the caller sees to it."""

    def __init__(
        self,
        config: DecoderConfig,
        spec: DecoderSpec,
        weights: DecoderWeights,
        executor: Executor,
        computes: ComputeDtype,
        vision: VisionTower | SpeechTower | None = None,
    ) -> None:
        """`vision` makes the rows of images or sound, where the model takes them."""
        self.config = config
        self.spec = spec
        self.computes = computes
        self.weights = weights
        self.executor = executor
        self.vision = vision
        self.num_layers = spec.num_layers
        strips = weights.head_strips if executor.scores_in_strips else ()
        self.stages = tuple(_stages(weights.layers, len(strips), routes_apart=executor.routes_apart))
        self._is_exact = False

    @property
    def dtype(self) -> DType:
        """Of activations, keys and values."""
        return self.spec.dtype

    @property
    def numerics(self) -> str:
        """Of the executor. Keys and values of a stretched context are no others': their rotary tables differ."""
        own = self.executor.numerics
        return f"{own} context {self.config.max_context}" if self.config.is_stretched else own

    @property
    def device(self) -> str:
        """The device of the weights, and so of everything that is computed with them."""
        return self.weights.device

    @property
    def is_batch_invariant(self) -> bool:
        """True if the executor gives the same bits in any batch."""
        return self.executor.is_batch_invariant

    @property
    def routes_apart(self) -> bool:
        """True if no stage reads all experts of a layer."""
        layers = self.weights.layers
        return not any(stage.work is Work.LAYER and layers[stage.layer].experts for stage in self.stages)

    @property
    def is_exact(self) -> bool:
        """True if all weights hold their exact values, as they then do for good. Raises the load's error."""
        self._is_exact = self._is_exact or self.weights.all_gate.opens(0.0)
        return self._is_exact

    @property
    def state_bytes(self) -> int:
        """The size of a sequence's recurrent state; 0: the model has none."""
        return 4 * self.spec.state_layers()[-1]

    def new_kv(
        self,
        num_blocks: int,
        block_size: int,
        *,
        kind: KVKind = KVKind.MODEL,
        num_states: int | None = None,
    ) -> Any:
        """Empty storage of the right shape; `num_blocks` times `kv_block_bytes`, and states of models that have some:
        by default as many as blocks.
        """
        if num_states is None or not self.state_bytes:
            return self.executor.new_kv(num_blocks, block_size, kind)
        return cast("StatefulExecutor", self.executor).new_kv(num_blocks, block_size, kind, num_states)

    def kv_block_bytes(self, block_size: int, *, kind: KVKind = KVKind.MODEL) -> int:
        """The size of one block in what `new_kv` makes."""
        return self.executor.kv_block_bytes(block_size, kind)

    def forward(
        self,
        batch: StepBatch,
        kv: Any,
        *,
        tier: Tier = Tier.REFINE,
        on_layer: OnLayer | None = None,
    ) -> Any:
        """One step: writes the rows' keys and values into `kv`; returns logits (R, vocab_size) fp32.

        Blocks until the weights are there, layer by layer, and raises the load's error if they will not
        be; `kv` then holds the keys and values of the layers that did run. Token ids must be below
        vocab_size. `tier` is the least that the weights must hold: below REFINE each layer is used as it is by then,
        between two refinements.
        """
        under_way = self.begin(batch, kv, tier=tier, on_layer=on_layer)
        while not under_way.is_done:
            under_way.advance()
        return under_way.logits

    def begin(
        self,
        batch: StepBatch,
        kv: Any,
        *,
        tier: Tier = Tier.REFINE,
        on_layer: OnLayer | None = None,
    ) -> ForwardPass:
        """The same step, to be taken layer by layer as the weights come."""
        return ForwardPass(self, batch, kv, tier=tier, on_layer=on_layer)

    def want(self, tokens: Int64s, tier: Tier) -> None:
        """Have what a forward pass over these tokens begins with sent for, up to this tier. Returns at once."""
        self.weights.entry_gate.want(tokens, tier)


class ForwardPass:
    """A step under way, which can be left after any stage and taken up again: `stage` is the number of the next one in
    the decoder's `stages`.

    Rows that attend to each other's keys and values must keep their order: a pass that
    depends on another stays behind it (see `joined`).
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
        self._chosen: Int64s | None = None  # (T, num_used) between a layer's router and its experts
        self._strips: list[Floats] = []  # (R, columns): the logits as far as the head has come

    @property
    def is_done(self) -> bool:
        return self.stage == len(self._decoder.stages)

    @property
    def logits(self) -> Any:
        """(R, vocab_size) fp32, of the batch's `logit_rows`, when it is done."""
        assert self.is_done
        assert self._x is not None
        return self._x

    @property
    def is_at_head(self) -> bool:
        """True once all layers are done, and no logits yet."""
        return (
            self._decoder.stages[min(self.stage, len(self._decoder.stages) - 1)].layer
            == self._decoder.num_layers
        )

    def states(self, rows: Int64s) -> Floats:
        """The head's inputs, (R, hidden_size) fp32, in place of logits: the pass is at its head. Blocks until the final
        norm is there.
        """
        assert self.is_at_head
        self._decoder.weights.head_gate()
        return self._decoder.executor.states(self._x, rows)

    def can_advance(self, timeout_s: float = 0.0) -> bool:
        """True if the next stage's weights hold the tier, now or within this time. Raises the load's error."""
        work, layer, _ = self._decoder.stages[self.stage]
        weights = self._decoder.weights
        if work is Work.EMBED:
            return weights.entry_gate.opens(self._entry_tokens, timeout_s, self._tier)
        if work is Work.EXPERTS:
            return _expert_gate(weights.layers[layer]).opens(self._experts(), timeout_s, self._tier)
        return self._gate().opens(timeout_s, self._tier) and self._opens_adapters(timeout_s)

    def advance(self, *, is_behind: bool = False) -> None:
        """Run the next stage; blocks until its weights are there. A pass that `is_behind` another one, whose keys and
        values its rows may read, goes no further; others go through all layers at once that are there by then.
        """
        stage, came_s = self._decoder.stages[self.stage], time.monotonic()
        use = self._reading()
        self._opens_adapters(None)
        with use:
            started_s = time.monotonic()
            if stage.work is Work.EXPERTS and started_s - came_s > REPORTED_WAIT_S:
                self._report(stage.layer, EXPERT_WAIT, came_s, started_s)
            name = self._run(is_behind=is_behind)
            self._report(stage.layer, name, started_s, time.monotonic())

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
        if self._chosen is not None and behind._chosen is not None:
            both._chosen = np.concatenate([self._chosen, behind._chosen])
        # At the head, one of them may have come without strips, or with fewer: all of it is computed then.
        if len(self._strips) == len(behind._strips):
            both._strips = [np.concatenate(pair) for pair in zip(self._strips, behind._strips, strict=True)]
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
        if self._chosen is not None:
            less._chosen = self._chosen[rows]
        is_left = np.isin(self.batch.logit_rows, rows)
        less._strips = [strip[is_left] for strip in self._strips]
        return less

    def _gate(self) -> Gate:
        """Of the next stage, which is a layer, one up to its router, the head, or a strip of it."""
        work, layer, strip = self._decoder.stages[self.stage]
        weights = self._decoder.weights
        if work is Work.HEAD:
            return weights.head_gate
        if work is Work.STRIP:
            return weights.head_strips[strip].gate
        own = weights.layers[layer]
        return own.router_gate if work is Work.ROUTE and own.router_gate is not None else own.gate

    def _reading(self) -> AbstractContextManager[Any]:
        """The context in which the next stage reads its weights. Blocks, here or as it is entered, until they are
        there.
        """
        work, layer, _ = self._decoder.stages[self.stage]
        weights, is_exact = self._decoder.weights, self._tier is Tier.REFINE
        if work is Work.EXPERTS:
            return _expert_gate(weights.layers[layer]).reading(self._experts(), self._tier)
        if work is Work.EMBED:
            if not is_exact:
                return weights.entry_gate.reading(self._entry_tokens, self._tier)
            weights.entry_gate(self._entry_tokens)
        elif not is_exact:
            return self._gate().reading(self._tier)
        else:
            self._gate()()
        return nullcontext()

    @property
    def _entry_tokens(self) -> Int64s:
        """Those whose rows of embeddings the pass begins with."""
        inputs, tokens = self._decoder.spec.layer_inputs, self.batch.tokens
        if inputs is None or not (self.batch.images or (tokens >= inputs.vocab_size).any()):
            return tokens
        return np.append(tokens, inputs.default_row)

    def _experts(self) -> Int64s:
        """Those that the rows have chosen, ascending."""
        assert self._chosen is not None
        return np.unique(self._chosen)

    def _opens_adapters(self, timeout_s: float | None) -> bool:
        """True if all adapters of the rows have the next stage's layer. Raises what their loads failed with."""
        layer = self._decoder.stages[self.stage].layer
        is_layer = 0 <= layer < self._decoder.num_layers
        return not is_layer or all(adapter.opens(layer, timeout_s) for adapter in self._adapters)

    def _run(self, *, is_behind: bool) -> str:
        """The next stage, or all layers that are left where one call computes them sooner: their weights are there."""
        decoder, stage, executor = self._decoder, self._decoder.stages[self.stage], self._decoder.executor
        self.stage += 1
        if stage.work is Work.EMBED:
            self._x = executor.embed(self.batch)
            return stage.name
        assert self._x is not None
        if stage.work is Work.STRIP:
            self._score_strip(stage.strip)
            return stage.name
        if stage.work is Work.HEAD:
            self._score()
            if self._strips:
                self._x = np.concatenate(self._strips, axis=1)
            else:
                self._x = executor.logits(self._x, self.batch.logit_rows)
            return stage.name
        if self._step is None:
            self._step = executor.begin(self.batch, self._kv)
        if stage.work is Work.EXPERTS:
            self._x = cast("RoutingExecutor", executor).experts(self._step, stage.layer, self._x)
            self._chosen = None
            return stage.name
        end = stage.layer + 1
        if executor.runs_layers_together and not is_behind and decoder.is_exact:
            self.stage += stage.work is Work.ROUTE
            if all(adapter.is_complete for adapter in self._adapters):
                self.stage, end = len(decoder.stages) - 1, decoder.num_layers
        elif stage.work is Work.ROUTE:
            self._route(stage.layer)
            return stage.name
        self._x = executor.layers(self._step, stage.layer, end, self._x)
        return stage.name if end == stage.layer + 1 else "layers"

    def _score_strip(self, number: int) -> None:
        """The logits of the next rows of the head; of all that are left, where these have come."""
        decoder = self._decoder
        strip, end = decoder.weights.head_strips[number], decoder.spec.vocab_size
        if decoder.is_exact:
            self.stage = len(decoder.stages) - 1
            if not self._strips:
                return  # the head's stage computes all of it
        else:
            end = strip.end
        executor = cast("StripExecutor", decoder.executor)
        self._strips.append(executor.strip(self._x, self.batch.logit_rows, strip.first, end))

    def _route(self, layer: int) -> None:
        """Compute the layer up to its router, and ask for the experts that it chooses."""
        executor = cast("RoutingExecutor", self._decoder.executor)
        self._x, self._chosen = executor.route(self._step, layer, self._x)
        _expert_gate(self._decoder.weights.layers[layer]).want(self._experts(), self._tier)

    def _score(self) -> None:
        """The logits of prompts that are asked for, some rows at a time."""
        num_at_once = rows_at_once(self._decoder.spec.vocab_size)
        for scored in self.batch.scored:
            for first in range(0, scored.length, num_at_once):
                end = min(scored.length, first + num_at_once)
                rows = np.arange(scored.start + first, scored.start + end)
                scored.scores.add(scored.position + first, self._decoder.executor.logits(self._x, rows))


def _stages(layers: Sequence[DecoderLayerWeights], num_strips: int, *, routes_apart: bool) -> Iterator[Stage]:
    yield Stage(Work.EMBED, -1)
    for number, layer in enumerate(layers):
        if routes_apart and layer.expert_gate is not None and _are_stored(layer.experts):
            yield Stage(Work.ROUTE, number)
            yield Stage(Work.EXPERTS, number)
        else:
            yield Stage(Work.LAYER, number)
    for number in range(num_strips):
        yield Stage(Work.STRIP, len(layers), number)
    yield Stage(Work.HEAD, len(layers))


def _are_stored(experts: Sequence[ExpertWeights]) -> bool:
    """True if they are used as they are stored: others are converted, all of a layer at once."""
    return all(expert.gate_up.is_settled and expert.down.is_settled for expert in experts)


def _expert_gate(layer: DecoderLayerWeights) -> ExpertGate:
    assert layer.expert_gate is not None
    return layer.expert_gate


def _ignore(index: int, name: str, start_s: float, end_s: float) -> None:
    pass
