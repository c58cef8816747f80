"""An ONNX model's start: from its files and a load under way to a runner, and the whole session afterwards."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ...loader.errors import CheckpointError, TeneralError
from ...loader.process.cpu import available_cores
from ..errors import ModelError
from .spec import FILE_NAME, NO_TELEMETRY, parse_spec

if TYPE_CHECKING:
    from ...loader.load.base import AnyLoad
    from ...loader.timeline import Timeline
    from ..config import ServeConfig
    from ..files import ModelFiles
    from .runner import OnnxRunner

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"


def import_ahead(timeline: Timeline) -> None:
    """Import what decoding and a runner need. Raises nothing: `open_runner` says what is missing.

    Changes the process: ONNX Runtime sends no telemetry, unless the environment says otherwise.
    """
    os.environ.setdefault(NO_TELEMETRY, "1")
    with timeline.span("process", "import onnxruntime"), suppress(ImportError):
        from ...loader.format import codec  # noqa: F401
        from . import runner, sessions  # noqa: F401


def open_runner(
    files: ModelFiles,
    load: AnyLoad,
    config: ServeConfig,
    timeline: Timeline,
    *,
    on_wait: Callable[[], object],
) -> tuple[OnnxRunner, Callable[[], bool]]:
    """A runner over weights that are still arriving, and a function that makes the whole session of them, once all are
    exact, and has the runner use it; it says whether it did. `on_wait` is called when a run waits for weights. Raises
    `ModelError` and `CheckpointError`.
    """
    if "onnxruntime" not in sys.modules:
        import_ahead(timeline)
    try:
        from .runner import OnnxRunner
        from .sessions import SegmentedModel, WholeModel, check_providers
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "onnxruntime":
            raise
        raise ModelError(
            "this is an ONNX model, and onnxruntime is not installed",
            hint="Install it: pip install 'teneral[onnx]'",
        ) from error
    data = files.read(FILE_NAME)
    if data is None:
        raise CheckpointError(f"the artifact has no {FILE_NAME}", where=FILE_NAME)
    spec = parse_spec(data, load.manifest)
    providers = (
        check_providers(config.ort_providers.split(",")) if config.ort_providers else check_providers([])
    )
    threads = config.threads or available_cores()
    # The first segment's weights come first, whatever their shapes: rows of them are never asked for.
    load.want_parts([part.index for part in load.manifest.parts if part.group == 0])
    segments = SegmentedModel(spec, files, load, threads=threads, timeline=timeline, on_wait=on_wait)
    threading.Thread(target=segments.prepare, name="teneral-onnx-sessions", daemon=True).start()
    runner = OnnxRunner(
        spec,
        segments,
        labels=_labels(files),
        max_queued=config.max_calls - 1,
        max_batch=config.ort_batch,
    )

    def exchange() -> bool:
        with timeline.span("model", "whole session") as detail:

            def make() -> WholeModel:
                whole = WholeModel(spec, files, load, threads=threads, providers=providers)
                detail["providers"] = ", ".join(whole.providers)
                return whole

            try:
                return runner.exchange(make, load.manifest.weight_bytes)
            except TeneralError as error:  # of its file in the store, too
                if config.ort_providers is not None:  # the segments are not what was asked for
                    raise
                logger.error("the model stays in segments: %s", error)
                return False

    return runner, exchange


def _labels(files: ModelFiles) -> tuple[str, ...]:
    """The names of a classifier's outputs, by its config.json; () where that has none."""
    data = files.read(CONFIG_NAME)
    if data is None:
        return ()
    with suppress(ValueError, RecursionError, AttributeError, TypeError, KeyError):
        by_number = {int(key): str(name) for key, name in json.loads(data)["id2label"].items()}
        return tuple(by_number[number] for number in range(len(by_number)))
    return ()
