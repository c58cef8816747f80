"""A device's way of computing, on the CPU: the same backend, tables and pool, with kernels that the test brings.

`Repeater` stands for CUDA's graphs: it calls what was recorded again, so a replay reads what a graph would read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.support.load import patience_s
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model
from tests.support.toy_decoder import ToyTokenizer

from teneral.runtime.backends.cuda.backend import CudaBackend
from teneral.runtime.backends.cuda.decoder import DeviceKernels
from teneral.runtime.backends.cuda.executor import CudaModelBackend
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.engine.generation import Generation
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.step.backend import BackendOptions
from teneral.runtime.step.requests import GenerationRequest, SamplingParams

BLOCK_SIZE = 4
TIMEOUT_S = patience_s(60)


class Repeater:
    """A `Recorder`."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0
        self.memory_bytes = 0

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        result = work()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            result.copy_(work())

        return replay, result


def decoder_of(family: str, **overrides: Any) -> Decoder:
    oracle = tiny_model(family, **overrides)
    decoder = build_model(config_json(oracle), DictWeights(tensors_of(oracle)), backends=[CudaModelBackend()])
    assert isinstance(decoder, Decoder)
    return decoder


def use_row_products(decoder: Decoder) -> None:
    """Compute by `Products`'s kernel all products of one row with plain matrices, as on a late device."""
    executor: Any = decoder.executor
    executor.kernels.products.rows_by_kernel = True


class DeviceRig:
    """An engine that computes as on a device. A context manager."""

    def __init__(
        self,
        decoder: Decoder,
        launch: Any,
        *,
        num_blocks: int = 200,
        recorder: Any = None,
        num_processors: int = 8,
        **options: Any,
    ) -> None:
        options = {"block_size": BLOCK_SIZE, "max_context": 96, **options}
        self.launch = launch
        kernels = DeviceKernels(
            decoder.executor,
            launch,
            block_size=options["block_size"],
            max_context=options["max_context"],
            num_processors=num_processors,
        )
        self.backend: Any = None

        def make_backend(model: Any, kv: Any, chosen: BackendOptions, timeline: Any) -> CudaBackend:
            self.backend = CudaBackend(model, kv, chosen, kernels, recorder=recorder, timeline=timeline)
            return self.backend

        kv_bytes = num_blocks * decoder.kv_block_bytes(options["block_size"])
        self.engine = Engine(
            decoder,
            ToyTokenizer(),
            options=EngineOptions(kv_bytes=kv_bytes, **options),
            make_backend=make_backend,
        )

    def submit(self, prompts: Sequence[Sequence[int]], num_tokens: int, **fields: Any) -> list[Generation]:
        fields.setdefault("sampling", SamplingParams(temperature=0))
        on_event = fields.pop("on_event", None)
        return [
            self.engine.submit(GenerationRequest(str(number), tuple(prompt), num_tokens, **fields), on_event)
            for number, prompt in enumerate(prompts)
        ]

    def say(self, prompts: Sequence[Sequence[int]], num_tokens: int, **fields: Any) -> list[tuple[int, ...]]:
        """Their tokens, when they run together."""
        generations = self.submit(prompts, num_tokens, **fields)
        return [generation.result(TIMEOUT_S).tokens for generation in generations]

    def __enter__(self) -> DeviceRig:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.engine.stop(TIMEOUT_S)
        self.engine.check_integrity()
        statistics = self.engine.statistics()
        assert statistics.free_blocks == statistics.num_blocks
