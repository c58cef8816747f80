"""An engine over the toy decoder, checked when a test leaves it: no request waits, no block is lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.support.load import patience_s
from tests.support.toy_decoder import ToyDecoder, ToyTokenizer

from teneral.loader.timeline import Timeline
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.engine.generation import Generation, GenerationResult, OnEvent
from teneral.runtime.step.backend import MakeBackend, host_backend
from teneral.runtime.step.requests import GenerationRequest, SamplingParams
from teneral.runtime.text.detokenizer import DetokenizerSource

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0)
TIMEOUT_S = patience_s(30)  # of waits that end at once unless something is broken


class EngineRig:
    """A context manager. `options` are those of the engine."""

    def __init__(
        self,
        *,
        num_blocks: float = 64,
        model: ToyDecoder | None = None,
        start: bool = True,
        eos: Iterable[int] = (),
        timeline: Timeline | None = None,
        make_backend: MakeBackend = host_backend,
        tokenizer: DetokenizerSource | None = None,
        **options: Any,
    ) -> None:
        self.model = model or ToyDecoder()
        options.setdefault("block_size", BLOCK_SIZE)
        kv_bytes = int(num_blocks * self.model.kv_block_bytes(options["block_size"]))
        self.engine = Engine(
            self.model,
            tokenizer or ToyTokenizer(),
            options=EngineOptions(kv_bytes=kv_bytes, **options),
            timeline=timeline,
            eos_token_ids=frozenset(eos),
            make_backend=make_backend,
        )
        if start:
            self.engine.start()

    def submit(
        self,
        prompt: Iterable[int] = (1, 2, 3),
        *,
        on_event: OnEvent | None = None,
        request_id: str = "r",
        **fields: Any,
    ) -> Generation:
        """Greedy by default."""
        fields.setdefault("sampling", GREEDY)
        return self.engine.submit(GenerationRequest(request_id, tuple(prompt), **fields), on_event)

    def expected(self, prompt: Iterable[int], num_tokens: int) -> tuple[int, ...]:
        return self.model.greedy(tuple(prompt), num_tokens)

    def __enter__(self) -> EngineRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.gate.set()
        assert self.engine.stop(TIMEOUT_S), "the thread has not ended"
        self.engine.check_integrity()
        statistics = self.engine.statistics()
        assert statistics.free_blocks == statistics.num_blocks
        assert (statistics.running, statistics.queued) == (0, 0)


def finish(generation: Generation) -> GenerationResult:
    return generation.result(TIMEOUT_S)


def seeded(seed: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, **params)
