"""Models and engines on the direct path, over the driver and the kernels on the CPU. Imports no torch by itself."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tests.support.direct_kernels import open_device
from tests.support.load import patience_s
from tests.support.simulated_device import SimulatedDevice, SimulatedTicket
from tests.support.toy_decoder import ToyTokenizer

from teneral.loader.device.base import Ticket
from teneral.runtime.backends.cuda.direct.backend import DirectBackend
from teneral.runtime.backends.cuda.direct.device import DirectDevice
from teneral.runtime.backends.cuda.direct.executor import DirectExecutor, DirectModelBackend
from teneral.runtime.backends.cuda.direct.weights import tensor_at
from teneral.runtime.backends.cuda.direct.workspace import WorkspaceLimits
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.engine.generation import Generation
from teneral.runtime.kv.storage import KVKind
from teneral.runtime.models.build import build_model
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.step.backend import BackendOptions
from teneral.runtime.step.batch import SequenceSpan, StepBatch
from teneral.runtime.step.requests import GenerationRequest, SamplingParams
from teneral.runtime.tensors import Tensor
from teneral.runtime.weights import DictWeights

BLOCK_SIZE, NUM_BLOCKS, MAX_CONTEXT = 4, 400, 500
TEXT = [int(token) for token in np.random.default_rng(0).integers(0, 320, MAX_CONTEXT)]
TIMEOUT_S = patience_s(100)
# Overrides for mixtures of experts, of whose sizes the kernels take multiples of 32 and `tiny_models` has others.
_WIDE = {"moe_intermediate_size": 64}
LATENTS: dict[str, dict[str, Any]] = {
    family: {**_WIDE, "qk_nope_head_dim": 32} for family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "olmoe": {},
    "qwen3_moe": _WIDE,
    "qwen2_moe": _WIDE,
    "ernie4_5_moe": _WIDE,
    "glm4_moe": _WIDE,
    "granitemoehybrid": {"layer_types": ["full_attention"] * 3, "intermediate_size": 64},
    **LATENTS,
}
NEAR = 0.05  # of logits, whose neighbours are some tenths apart
ALIGNMENT_BYTES = 64  # of tensors in a slab


class OrderedDevice(SimulatedDevice):
    """Its weights are in the memory of the driver on the CPU, whose stream it is ordered with."""

    def __init__(self, device: DirectDevice) -> None:
        super().__init__()
        self._direct = device
        self.num_ordered = self.num_recorded = 0

    def order_after(self, ticket: Ticket, stream: int) -> None:
        assert stream == self._direct.stream
        self.num_ordered += 1
        ticket.wait()

    def record(self, stream: int) -> Ticket:
        assert stream == self._direct.stream
        self.num_recorded += 1
        self._direct.driver.synchronize_stream(stream)
        ticket = SimulatedTicket()
        ticket.finish(None)
        return ticket


class DirectModel:
    """A model on the device. Frees its memory when it is closed."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, dtype: str = "auto", **files: Any
    ) -> None:
        """`tensors` on the host; `files` as `build_model` takes them."""
        self.device = open_device()
        self._taken: list[int] = []
        backend, weights = DirectModelBackend(self.device, dtype), DictWeights(self._put(tensors))
        self.model: Any = build_model(config, weights, [backend], **files)
        self.executor: Any = self.model.executor

    @property
    def decoder(self) -> Decoder:
        assert isinstance(self.model, Decoder)
        return self.model

    @classmethod
    def of(cls, oracle: Any) -> DirectModel:
        """A model of transformers."""
        from tests.support.models import arrays_of
        from tests.support.tiny_models import config_json, tensors_of

        return cls(config_json(oracle), arrays_of(tensors_of(oracle)))

    def _put(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All in one slab, in their order."""
        places, total = dict[str, int](), 0
        for name, tensor in tensors.items():
            places[name] = total
            total += -(-tensor.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        slab = self.device.driver.alloc(total)
        self._taken.append(slab)
        return {name: self._put_at(tensor, slab + places[name]) for name, tensor in tensors.items()}

    def put(self, tensor: Tensor) -> Tensor:
        """One more tensor, in memory of its own."""
        self._taken.append(self.device.driver.alloc(tensor.size_bytes))
        return self._put_at(tensor, self._taken[-1])

    def _put_at(self, tensor: Tensor, address: int) -> Tensor:
        host = np.ascontiguousarray(tensor.array)
        self.device.driver.copy_in(address, host.ctypes.data, host.nbytes, self.device.stream)
        self.device.driver.synchronize_stream(self.device.stream)
        return tensor_at(self.device, address, tensor.shape, tensor.dtype)

    def close(self) -> None:
        self.executor.close()
        for address in self._taken:
            self.device.driver.free(address)


class DirectRig:
    """An engine that computes on the device. A context manager."""

    def __init__(self, model: DirectModel, *, num_blocks: int = 100, **options: Any) -> None:
        options = {
            "block_size": BLOCK_SIZE,
            "max_context": 96,
            "max_running": 8,
            "max_step_tokens": 64,
            **options,
        }
        self.model = model
        self.backend: Any = None

        def make_backend(decoder: Any, kv: Any, chosen: BackendOptions, timeline: Any) -> DirectBackend:
            self.kv = kv
            self.backend = DirectBackend(decoder, kv, chosen)
            return self.backend

        kv_bytes = num_blocks * model.decoder.kv_block_bytes(options["block_size"])
        self.engine = Engine(
            model.decoder,
            ToyTokenizer(),
            options=EngineOptions(kv_bytes=kv_bytes, **options),
            make_backend=make_backend,
        )

    def submit(self, prompts: Sequence[Sequence[int]], num_tokens: int, **fields: Any) -> list[Generation]:
        fields.setdefault("sampling", SamplingParams(temperature=0))
        return [
            self.engine.submit(GenerationRequest(str(number), tuple(prompt), num_tokens, **fields))
            for number, prompt in enumerate(prompts)
        ]

    def say(self, prompts: Sequence[Sequence[int]], num_tokens: int, **fields: Any) -> list[tuple[int, ...]]:
        """Their tokens, when they run together."""
        return [each.result(TIMEOUT_S).tokens for each in self.submit(prompts, num_tokens, **fields)]

    def __enter__(self) -> DirectRig:
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.engine.stop(TIMEOUT_S)
        self.engine.check_integrity()
        self.backend.close()
        self.kv.close()


class Stepper:
    """Sequences over an executor, each with blocks of its own that lie anywhere in the pool."""

    def __init__(
        self,
        model: DirectModel,
        executor: DirectExecutor | None = None,
        *,
        adapters: Mapping[str, Any] | None = None,
        max_spans: int = 16,
        kind: KVKind = KVKind.MODEL,
    ) -> None:
        """`adapters` are those of sequences with these names."""
        self.adapters = dict(adapters or {})
        self.executor = executor or model.executor
        self.kv = self.executor.new_kv(NUM_BLOCKS, BLOCK_SIZE, kind)
        self.executor.open(
            self.kv,
            WorkspaceLimits(
                max_rows=512, max_spans=max_spans, max_context=MAX_CONTEXT, block_size=BLOCK_SIZE
            ),
        )
        self._free = [int(block) for block in np.random.default_rng(1).permutation(NUM_BLOCKS)]
        self._blocks: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def batch(self, work: dict[str, Sequence[int]]) -> StepBatch:
        """These new tokens of each sequence, all rows scored."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[SequenceSpan] = []
        for name, new in work.items():
            cached = self._lengths.get(name, 0)
            end = self._lengths[name] = cached + len(new)
            blocks = self._blocks.setdefault(name, [])
            while len(blocks) * BLOCK_SIZE < end:
                blocks.append(self._free.pop())
            spans.append(SequenceSpan(len(tokens), len(new), end, tuple(blocks), self.adapters.get(name)))
            tokens += new
            positions += range(cached, end)
            slots += [blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(cached, end)]
        numbers = [np.array(each, np.int64) for each in (tokens, positions, slots, range(len(tokens)))]
        return StepBatch(numbers[0], numbers[1], numbers[2], tuple(spans), numbers[3])

    def run(self, work: dict[str, Sequence[int]]) -> dict[str, np.ndarray]:
        """Logits of all their rows, by one call."""
        batch = self.batch(work)
        return self.by_name(work, batch, self.executor.run(batch).numpy())

    def by_name(
        self, work: dict[str, Sequence[int]], batch: StepBatch, logits: np.ndarray
    ) -> dict[str, np.ndarray]:
        return {
            name: logits[span.start : span.start + span.length]
            for name, span in zip(work, batch.spans, strict=True)
        }

    def close(self) -> None:
        self.executor.close()
        self.kv.close()


def greedy(oracle: Any, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """transformers' own tokens, computed in fp32 with the weights as they are stored."""
    import torch

    wide = copy.deepcopy(oracle).float()
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = wide(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tuple(tokens[len(prompt) :])


def assert_greedy(oracle: Any, prompts: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> None:
    """The answers are `greedy`'s, up to a token that its model prefers by next to nothing; most are wholly."""
    import torch

    wide, num_whole = copy.deepcopy(oracle).float(), 0
    for prompt, answer in zip(prompts, found, strict=True):
        expected = greedy(oracle, prompt, len(answer))
        num_whole += tuple(answer) == expected
        for place, (token, other) in enumerate(zip(answer, expected, strict=True)):
            if token != other:
                with torch.no_grad():
                    logits = wide(torch.tensor([[*prompt, *expected[:place]]])).logits[0, -1]
                assert float(logits[other] - logits[token]) < NEAR, f"{prompt}: {answer}, not {expected}"
                break
    assert 2 * num_whole > len(prompts)


def prompts_of(num: int, *, seed: int = 0, longest: int = 30) -> list[tuple[int, ...]]:
    random = np.random.default_rng(seed)
    return [tuple(map(int, random.integers(0, 250, random.integers(1, longest)))) for _ in range(num)]


def check_company(model: DirectModel, text: Sequence[int], *, kind: KVKind = KVKind.MODEL) -> None:
    """The logits of a text of more than 260 tokens have the same bits in chunks, in company, and as a graph."""
    end = len(text)
    stepper = Stepper(model, kind=kind)
    whole = stepper.run({"text": text})["text"].copy()
    for name, cuts in {"a": (0, 2 * end // 3, end), "b": (0, 1, 17, 64, 255, 258, end - 1, end)}.items():
        found = [stepper.run({name: text[first:last]})[name] for first, last in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(found), whole)
    stepper.close()
    stepper = Stepper(model, kind=kind)
    before = stepper.executor.num_graph_steps
    stepper.run({"long": text[: end - 10], "short": text[:30]})
    for at in range(10):
        other, long, short = ([text[begin + at]] for begin in (50, end - 10, 30))
        logits = stepper.run({"other": other, "long": long, "short": short})
        np.testing.assert_array_equal(logits["long"][0], whole[end - 10 + at])
        np.testing.assert_array_equal(logits["short"][0], whole[30 + at])
    assert stepper.executor.num_graph_steps == before + 3
    stepper.close()
