"""A decoder and its forward passes: weights behind their gates, stages, and the executor that computes them.

Rows of several sequences come back to back, without padding; keys and values live in a paged pool of the executor's.
Building reads no tensor's content, and neither does a forward pass before it needs it: it begins with those rows of
the embeddings that its tokens have, and each layer first waits at its own gate, so computing follows the weights as
they arrive. It does not know where weights come from, how they are computed with, nor what a request is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...loader.format.manifest import Tier
from ..dtypes import DType
from ..errors import ModelError
from ..kv.kinds import KVKind
from ..step.backend import OnLayer
from ..step.batch import Int64s, StepBatch, join, select
from ..step.logprobs import rows_at_once
from ..tensors import Tensor
from ..weights import Gate, Weights
from .decoder_config import DecoderConfig, Experts
from .executor import ComputeDtype, Executor
from .matrices import DecoderLayerWeights, DecoderWeights, ExpertWeights
from .parameters import Parameters, check_computable
from .projections import take_embeddings, take_linear, take_stacked
from .spec import DecoderSpec

if TYPE_CHECKING:
    from .adapter import Adapter  # of the few servers that have some


_LAYER = re.compile(r"(?:model\.)?layers\.[0-9]+\.")
# What some checkpoints have and models compute by themselves, or not at all: scales are of keys and values in 8 bits.
_WITHOUT_EFFECT = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")


class Decoder:
    """A model and its weights. One forward pass at a time; the caller sees to it."""

    def __init__(
        self,
        config: DecoderConfig,
        spec: DecoderSpec,
        weights: DecoderWeights,
        executor: Executor,
        computes: ComputeDtype,
    ) -> None:
        self.config = config
        self.spec = spec
        self.computes = computes
        self.weights = weights
        self.executor = executor
        self.num_layers = spec.num_layers
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
    def is_exact(self) -> bool:
        """True if all weights hold their exact values, as they then do for good. Raises the load's error."""
        self._is_exact = self._is_exact or self.weights.all_gate.opens(0.0)
        return self._is_exact

    def new_kv(self, num_blocks: int, block_size: int, *, kind: KVKind = KVKind.MODEL) -> Any:
        """Empty storage of the right shape; `num_blocks` times `kv_block_bytes`."""
        return self.executor.new_kv(num_blocks, block_size, kind)

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
    """A step under way, which can be left after any layer and taken up again: `stage` is what comes next, 0 being the
    embeddings, 1 to num_layers the layers, and num_layers + 1 the head.

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
        """True if the next stage's weights hold the tier, now or within this time. Raises the load's error."""
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
        """True if all adapters of the rows have the next stage's layer. Raises what their loads failed with."""
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


def take_decoder(config: DecoderConfig, weights: Weights) -> tuple[DecoderWeights, DType]:
    """All of the decoder's weights, and what those of them that are no integers are stored in. Raises `ModelError` when
    a tensor is missing or does not fit `config`.
    """
    root = "" if "embed_tokens.weight" in weights else "model."
    stored = _stored_dtype(config, weights, f"{root}embed_tokens")

    made: list[Parameters] = []

    def parameters(prefix: str) -> Parameters:
        made.append(Parameters(weights, prefix, stored, config.quantization))
        return made[-1]

    entry = parameters(root)
    embeddings = take_embeddings(entry, "embed_tokens", config.vocab_size, config.hidden_size)
    entry_gate = entry.row_gate("embed_tokens.weight")
    layers = tuple(
        _take_layer(config, index, parameters(f"{root}layers.{index}.")) for index in range(config.num_layers)
    )
    final = parameters("")
    norm = final.take_norm(f"{root}norm.weight", config.hidden_size)
    head_name = _head_name(config, weights, f"{root}embed_tokens")
    head = take_linear(final, head_name, config.hidden_size, config.vocab_size, bias=False)
    if config.quantization is not None and config.quantization.method != "teneral":
        _check_none_left(weights, made)
    taken = DecoderWeights(
        embeddings=embeddings,
        layers=layers,
        norm=norm,
        head=head,
        entry_gate=entry_gate,
        head_gate=final.gate(),
        all_gate=weights.gate(weights.names()),
        size_bytes=sum(weights.tensor(name).size_bytes for name in weights.names()),
    )
    return taken, stored


def _take_layer(config: DecoderConfig, index: int, parameters: Parameters) -> DecoderLayerWeights:
    names = config.names
    hidden_size, inner_size = config.hidden_size, config.intermediate_size
    query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention_norm = _take_norm(parameters, names.attention_norm, hidden_size)
    qkv_sizes = (query_size, key_size, key_size)
    qkv = take_stacked(parameters, _sized(names.qkv, qkv_sizes), hidden_size, bias=config.qkv_bias)
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    if config.qk_norm:
        sizes = (query_size, key_size) if config.joint_qk_norm else (config.head_dim, config.head_dim)
        query_norm = parameters.take_norm("self_attn.q_norm.weight", sizes[0])
        key_norm = parameters.take_norm("self_attn.k_norm.weight", sizes[1])
    output = take_linear(parameters, "self_attn.o_proj", query_size, hidden_size, bias=config.output_bias)
    mixture = config.experts if config.experts is not None and config.experts.layers[index] else None
    own = None if mixture else _take_mlp(config, parameters, inner_size, "", names.gate_up, "mlp.down_proj")
    return DecoderLayerWeights(
        attention_norm=attention_norm,
        qkv=qkv,
        query_norm=query_norm,
        key_norm=key_norm,
        output=output,
        attention_output_norm=_take_norm(parameters, names.attention_output_norm, hidden_size),
        mlp_norm=_take_norm(parameters, names.mlp_norm, hidden_size),
        gate_up=None if own is None else own.gate_up,
        down=None if own is None else own.down,
        router=take_linear(parameters, names.router, hidden_size, mixture.num, bias=mixture.has_bias)
        if mixture
        else None,
        experts=_take_experts(config, mixture, parameters) if mixture else (),
        mlp_output_norm=_take_norm(parameters, names.mlp_output_norm, hidden_size),
        sinks=parameters.take_norm("self_attn.sinks", config.num_heads) if config.has_sinks else None,
        gate=parameters.gate(),
    )


def _take_experts(
    config: DecoderConfig, mixture: Experts, parameters: Parameters
) -> tuple[ExpertWeights, ...]:
    names = config.names
    if names.stacked_experts is not None:
        from .stacked_experts import take_stacked_experts  # of one family

        return take_stacked_experts(parameters, names.stacked_experts, mixture, config.hidden_size)
    return tuple(
        _take_mlp(
            config,
            parameters,
            mixture.size,
            names.expert.format(number),
            names.expert_gate_up,
            names.expert_down,
        )
        for number in range(mixture.num)
    )


def _take_mlp(
    config: DecoderConfig,
    parameters: Parameters,
    inner_size: int,
    prefix: str,
    gate_up: Sequence[str],
    down: str,
) -> ExpertWeights:
    hidden_size, bias = config.hidden_size, config.mlp_bias
    names = _sized([f"{prefix}{name}" for name in gate_up], (inner_size, inner_size))
    return ExpertWeights(
        take_stacked(parameters, names, hidden_size, bias=bias),
        take_linear(parameters, f"{prefix}{down}", inner_size, hidden_size, bias=bias),
    )


def _check_none_left(weights: Weights, taken: Sequence[Parameters]) -> None:
    """Raises `ModelError` for a tensor of a layer that nothing computes with: tools of quantisation move scales into
    tensors of their own, without which the others would mean something else.
    """
    prefixes = {parameters.prefix for parameters in taken if ".layers." in f".{parameters.prefix}"}
    used = {name for parameters in taken for name in parameters.taken}
    for name in sorted(set(weights.names()) - used):
        layer = _LAYER.match(name)
        if layer is not None and layer[0] in prefixes and not name.endswith(_WITHOUT_EFFECT):
            raise ModelError(
                f"the quantised checkpoint has a tensor {name}, which is of no known use",
                hint="Pack the original model with `teneral pack --quantize int8` or `int4`.",
            )


def _take_norm(parameters: Parameters, name: str | None, size: int) -> Tensor | None:
    return None if name is None else parameters.take_norm(f"{name}.weight", size)


def _sized(names: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, int]]:
    """Matrices with their numbers of rows: one that is stored by itself has all of them."""
    return list(zip(names, sizes, strict=True)) if len(names) > 1 else [(names[0], sum(sizes))]


def _stored_dtype(config: DecoderConfig, weights: Weights, embeddings: str) -> DType:
    """That of the embeddings; where these are integers, what config.json says."""
    tensor = weights.tensor(f"{embeddings}.weight")
    if f"{embeddings}.weight_scale" in weights:
        return DType.of_label(config.dtype or "bfloat16")  # a name that was checked
    if tensor.dtype not in (DType.I8, DType.U8):  # of these a better complaint follows
        check_computable(f"{embeddings}.weight", tensor)
    return tensor.dtype


def _head_name(config: DecoderConfig, weights: Weights, embeddings: str) -> str:
    """The head's matrix. Where a config says "tied" and the checkpoint holds another head, that counts, as it does for
    transformers; with equal bytes it makes no difference.
    """
    if not config.tie_word_embeddings:
        return "lm_head"
    own, shared = "lm_head.weight", f"{embeddings}.weight"
    if "lm_head.qweight" in weights:
        return "lm_head"
    if own not in weights or shared not in weights:
        return embeddings
    return embeddings if weights.tensor(own).is_at(weights.tensor(shared)) else "lm_head"
