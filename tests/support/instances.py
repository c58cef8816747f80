"""Instances for tests of the layers above them: real parts around a tiny model, arriving when the test
says so.

`TinyParts` is a tiny decoder with its tokenizer, loaded once; `StagedInstance` is a real `Instance` without
its threads, into which a test lets the parts; `SteeredModel` is the real model, held, slowed or broken at its
next step.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tests.support.models import DictWeights, build_model

from teneral.loader.errors import TeneralError
from teneral.runtime.config import ServeConfig
from teneral.runtime.engine.embedder import Embedder
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.errors import ModelError
from teneral.runtime.instance.instance import Instance
from teneral.runtime.state import Forecast
from teneral.runtime.step.backend import host_backend
from teneral.runtime.text.settings import TextSettings
from teneral.runtime.text.tokenizer import TextTokenizer

from .tiny_models import config_json, save_tiny, tiny_model

MODEL_NAME = "tiny/model"
NO_SETTINGS = TextSettings({}, {}, frozenset())  # of a model without special tokens or chat templates
HELD_S = 40.0  # a test that holds a model longer has failed


@dataclass(frozen=True)
class TinyParts:
    model: Any
    tokenizer: TextTokenizer
    settings: TextSettings = NO_SETTINGS

    @classmethod
    def make(cls, family: str, directory: Path) -> TinyParts:
        save_tiny(family, directory)
        return cls.read(directory, tiny_model(family))

    @classmethod
    def read(cls, directory: Path, model: Any) -> TinyParts:
        """Those of a folder with this model's weights."""

        def files(name: str) -> bytes | None:
            return path.read_bytes() if (path := directory / name).exists() else None

        return cls(
            model=build_model(config_json(model), DictWeights(load_file(directory / "model.safetensors"))),
            tokenizer=TextTokenizer.from_files(files),
            settings=TextSettings.read(files),
        )


class SteeredModel:
    """The model, with `hold` to stop it before its next step, `step_s` to slow it down, and `failure` to
    break it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._open = threading.Event()
        self._open.set()
        self.step_s = 0.0
        self.failure: Exception | None = None

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._open.wait(HELD_S):
            raise TimeoutError("the model was held and not released: did the test fail before?")
        time.sleep(self.step_s)
        if self.failure is not None:
            raise self.failure
        return self._model.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class StagedInstance(Instance):
    """An instance that loads nothing by itself: `let_in` or `fail` says how its load ended."""

    def __init__(self, parts: TinyParts, **settings: Any) -> None:
        super().__init__(ServeConfig(model="unused", name=MODEL_NAME, **settings))
        self.parts = parts
        self.text_settings.set_result(parts.settings)
        self.model = SteeredModel(parts.model)
        self.fraction = 0.0
        self.expected: Forecast | None = None

    def start(self) -> StagedInstance:
        return self

    def progress(self) -> dict[str, Any]:
        return {"stored_bytes": 1000, "fetched_bytes": int(1000 * self.fraction), "fraction": self.fraction}

    def forecast(self) -> Forecast | None:
        return self.expected

    def let_in(self) -> StagedInstance:
        """The load ends well: the tokenizer is there, and the engine or the embedder."""
        self.fraction = 1.0
        self.tokenizer.set_result(self.parts.tokenizer)
        if hasattr(self.parts.model, "embed"):
            self.engine.set_exception(ModelError(f"{self.model_name} generates no text"))
            self.kind.set_result("encoder")
            embedder = Embedder(self.parts.model)
            embedder.start()
            self.embedder.set_result(embedder)
        else:
            self.embedder.set_exception(ModelError(f"{self.model_name} makes no embeddings"))
            self.kind.set_result("decoder")
            engine = self._make_engine()
            engine.start()
            self.engine.set_result(engine)
        return self

    def _make_engine(self) -> Engine:
        return Engine(
            self.model,
            self.parts.tokenizer,
            options=EngineOptions(
                kv_bytes=4 << 20,
                max_running=self.config.max_running,
                max_queued=self.config.max_queued,
                max_wait_s=self.config.max_wait_s,
                max_queued_per_tenant=self.config.max_queued_per_tenant,
                session_kv_bytes=self.config.session_kv_bytes,
                session_idle_s=self.config.session_idle_s,
                # How much it proposes depends on times, and a response's usage shows it.
                look_ahead=0,
            ),
            timeline=self.timeline,
            eos_token_ids=self.parts.tokenizer.eos_token_ids,
            make_backend=host_backend,
        )

    def fail(self, error: TeneralError) -> None:
        """The load ends with this error."""
        self._fail(error)

    def _all_exact(self) -> bool:
        return self.fraction >= 1.0

    def close(self) -> None:
        self.model.release()
        super().close()
