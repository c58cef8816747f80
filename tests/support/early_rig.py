"""An engine over a real packed model whose refine tier a test holds back, group by group.

In fp32: in bf16 the same row rounds differently in passes of different sizes, which decides between logits that nearly
tie, and the logits of tiny random models often do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tests.support.decoding import oracle_greedy
from tests.support.load import patience_s
from tests.support.models import DictWeights, build_model
from tests.support.paced import PacedSource, reads_of
from tests.support.tiny_models import config_json, save_tiny, tensors_of, tiny_model
from tests.support.toy_decoder import ToyTokenizer

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.format.manifest import Tier
from teneral.loader.load import link as sizing
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.timeline import Timeline
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.runtime.engine.arrival import LoadArrival
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.engine.generation import Generation, OnEvent
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.step.backend import MakeBackend, host_backend
from teneral.runtime.step.requests import FirstToken, GenerationRequest, SamplingParams
from teneral.runtime.weights import StreamedWeights, Weights

TIMEOUT_S = patience_s(60)
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0)
SHAPE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3}


def packed_tiny(
    folder: Path,
    family: str = "llama",
    *,
    tiers: TierOptions | None = None,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """A tiny model, packed; the folder of the artifact."""
    plain = save_tiny(family, folder / "plain", dtype=dtype, **{**SHAPE, **overrides})
    pack(open_source(str(plain)), open_store(str(folder / "packed")), tiers=tiers)
    return folder / "packed"


class SlowArrival(LoadArrival):
    """An arrival that seems to the engine to last as long as a test wants drafting to go on."""

    def __init__(self, load: WeightLoad) -> None:
        super().__init__(load)
        self.has_time = True

    def left_s(self) -> float:
        return 1e6 if self.has_time and not self.is_exact() else 0.0


class EarlyRig:
    """A context manager. The draft tier comes at once, unless it is held; the refine tier when `refine` lets it."""

    def __init__(
        self,
        artifact: Path,
        *,
        order: Order = Order.DRAFT_FIRST,
        num_blocks: int = 400,
        holds_draft: bool = False,
        prefix_seed: bytes | None = None,
        make_backend: MakeBackend = host_backend,
        backends: Any = None,
        make_weights: Callable[[WeightLoad], Weights] = StreamedWeights,
        make_adapters: Callable[[Any], Any] = lambda config: None,
        **options: Any,
    ) -> None:
        self.source = PacedSource(open_source(str(artifact)))
        manifest = open_artifact(self.source)
        self.groups = [group.index for group in manifest.groups]
        self._holds = {
            group: self.source.hold(reads_of(manifest, *manifest.parts_of(group, Tier.REFINE)))
            for group in self.groups
        }
        late = [part for group in self.groups for part in manifest.parts_of(group, Tier.DRAFT)]
        self.draft_hold = self.source.hold(reads_of(manifest, *late))
        if not holds_draft:
            self.draft_hold.release()
        # All of them from the beginning: eight could all be held back, and then nothing that is asked for comes.
        with patch.object(sizing, "FIRST_CONNECTIONS", 64):
            self.load = WeightLoad(
                self.source, manifest, options=LoadOptions(order=order, connections=64, decode_threads=2)
            )
        self.arrival = SlowArrival(self.load)
        self.timeline = Timeline()
        config = json.loads(read_file(self.source, manifest, "config.json"))
        self.model: Decoder = build_model(config, make_weights(self.load), backends=backends)
        self.engine = Engine(
            self.model,
            ToyTokenizer(),
            options=EngineOptions(
                kv_bytes=num_blocks * self.model.kv_block_bytes(BLOCK_SIZE), block_size=BLOCK_SIZE, **options
            ),
            timeline=self.timeline,
            arrival=self.arrival,
            prefix_seed=prefix_seed,
            make_backend=make_backend,
            adapters=make_adapters(self.model.config),
        )

    def start(self) -> None:
        self.load.start()
        self.engine.start()

    def submit(
        self,
        prompt: tuple[int, ...] = (1, 2, 3, 4, 5),
        *,
        sampling: SamplingParams = GREEDY,
        first_token: FirstToken = FirstToken.EXACT,
        max_tokens: int = 24,
        on_event: OnEvent | None = None,
        **fields: Any,
    ) -> Generation:
        request = GenerationRequest(
            "r", prompt, max_tokens, sampling=sampling, first_token=first_token, **fields
        )
        return self.engine.submit(request, on_event)

    def refine(self, *groups: int) -> None:
        """Let the refine parts of these groups come, or of all."""
        for group in groups or self.groups:
            self._holds[group].release()

    def __enter__(self) -> EarlyRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.draft_hold.release()
        self.refine()
        self.load.close()
        assert self.engine.stop(TIMEOUT_S), "the thread has not ended"
        self.engine.check_integrity()
        statistics = self.engine.statistics()
        assert statistics.free_blocks == statistics.num_blocks
        self.source.close()


def exact_tokens(
    prompt: tuple[int, ...], num_tokens: int, family: str = "llama", **overrides: Any
) -> tuple[int, ...]:
    """What transformers says, greedily."""
    with torch.no_grad():
        oracle = tiny_model(family, dtype=torch.float32, **{**SHAPE, **overrides})
        return tuple(oracle_greedy(oracle, prompt, num_tokens))


def exact_engine(family: str = "llama", *, prefix_seed: bytes | None = None, **overrides: Any) -> Engine:
    """An engine over the same model, all of it there."""
    oracle = tiny_model(family, dtype=torch.float32, **{**SHAPE, **overrides})
    decoder = build_model(config_json(oracle), DictWeights(tensors_of(oracle)))
    options = EngineOptions(kv_bytes=400 * decoder.kv_block_bytes(BLOCK_SIZE), block_size=BLOCK_SIZE)
    engine = Engine(
        decoder, ToyTokenizer(), options=options, prefix_seed=prefix_seed, make_backend=host_backend
    )
    engine.start()
    return engine
