"""`teneral tune`: measures a model's products on this machine, and keeps what it finds beside the artifact.

The model is loaded as a server without helpers loads it, and nobody is served meanwhile. It writes nothing but
`tuning.json` (`tuning.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...loader.artifact import open_artifact
from ...loader.errors import UsageError
from ...loader.format.manifest import Manifest
from ...loader.host import available_cores
from ...loader.sources.base import Store
from ...loader.stream.load import WeightLoad
from ...loader.stream.options import LoadOptions
from ...loader.tools.progress_bar import TransferProgress
from ..errors import ModelError
from ..files import ModelFiles
from ..models.build import build_model
from ..models.compute_dtype import ComputePolicy
from ..models.decoder import Decoder
from ..weights import StreamedWeights
from .choice import Figures, LinearBackend, Times
from .kinds import kind_of_layer
from .packing import Packing
from .prepare import compile_elsewhere, keep_somewhere, measure_layer
from .tuning import FILE_NAME, MAX_THREADS, NONE, Entry, Machine, keep_figures, read_entries

TRIALS_S = 0.5  # for a number of rows; nobody waits

logger = logging.getLogger(__name__)

OnProgress = Callable[[TransferProgress], None]


@dataclass(frozen=True, slots=True)
class TuningReport:
    """What was measured, and where it is kept."""

    url: str
    entry: Entry
    num_entries: int  # machines that are kept there now, with this one

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": asdict(self.entry.machine),
            "times_ns": {kind: dict(by_size) for kind, by_size in self.entry.figures.items()},
            "entries": self.num_entries,
        }

    def render(self) -> str:
        lines = []
        for kind, by_size in self.entry.figures.items():
            lines.append(kind)
            lines += [f"  {size:>4} rows  {_row(times)}" for size, times in by_size.items()]
        machine = self.entry.machine
        libraries = "" if machine.libraries == NONE else f", {machine.libraries}"
        lines.append(
            f"kept in {self.url.rstrip('/')}/{FILE_NAME} for {machine.cpu}, {machine.threads} threads, "
            f"torch {machine.torch}{libraries}; entries in all: {self.num_entries}"
        )
        return "\n".join(lines)


def tune(
    store: Store,
    *,
    digest: bytes | None = None,
    threads: int | None = None,
    progress: OnProgress | None = None,
) -> TuningReport:
    """Measure what servers of this model with so many threads (default: the cores at hand) would measure, and keep it.

    Blocks; torch computes in so many threads from then on. Raises `UsageError` for a number of threads that cannot be
    meant, `ModelError` for what has no choice, `TuningError` where a file is there that is none, and the errors of
    loading and of the store.
    """
    threads = available_cores() if threads is None else threads
    if not 1 <= threads <= MAX_THREADS:
        raise UsageError(f"threads must be from 1 to {MAX_THREADS}, not {threads}", key="threads")
    read_entries(store)  # what could not be replaced in the end
    torch.set_num_threads(threads)
    manifest = open_artifact(store, digest=digest)
    with WeightLoad(store, manifest, options=LoadOptions()) as load:
        model = build_model(
            ModelFiles(store, manifest, LoadOptions()).json("config.json", required=True),
            StreamedWeights(load),
            policy=ComputePolicy.of_this_machine("auto"),
        )
        if not isinstance(model, Decoder):
            raise ModelError(f"{store.url} makes embeddings: torch computes them, and there is no choice")
        load.start()
        _follow(load, manifest, progress)
        figures = _measure(model, threads)
    if not figures:
        raise ModelError(
            f"there is no choice for {store.url} here: only torch computes it",
            hint="Compiled kernels need pip install 'teneral[cpu]'; they and oneDNN's packed weights compute in bf16. "
            "Integers have libraries, too: pip install 'teneral[onnxruntime]' or 'teneral[openvino]'.",
        )
    entry = Entry(Machine.here(threads), figures)
    return TuningReport(store.url, entry, keep_figures(store, entry))


def _follow(load: WeightLoad, manifest: Manifest, progress: OnProgress | None) -> None:
    """Until all weights are exact."""
    for group in range(len(manifest.groups)):
        load.wait(group)
        if progress is not None:
            now = load.progress()
            progress(TransferProgress(now.fetched_bytes, now.stored_bytes_total))


def _measure(model: Decoder, threads: int) -> Figures:
    figures: dict[str, Mapping[int, Times]] = {}
    layer_times = _measure_kernels(model, threads)
    if layer_times:
        figures[kind_of_layer(model.layers[0])] = layer_times
    packing = Packing(model, limit_bytes=1 << 50, num_threads=threads)  # what is free bounds it
    for kind in packing.candidates:
        if times := packing.measure(kind, trials_s=TRIALS_S):
            figures[kind] = times
        packing.forget(kind)
    for (kind, backend), why in packing.left_out.items():
        logger.warning("%s is left out for %s: %s", backend, kind, why)
    return figures


def _measure_kernels(model: Decoder, threads: int) -> Mapping[int, Times]:
    """Empty where there are none for such a model, or no numba. Otherwise the model has them, as a server's has when it
    measures: torch's products of integers are faster with them.
    """
    keep_somewhere()
    try:
        from .compile import missing  # an extra
        from .decoder import DecoderKernels, NotCompiledError
    except ImportError:
        return {}
    try:
        kernels = DecoderKernels(model, num_threads=threads)
        compile_elsewhere(missing(kernels.kinds), threading.Event())
        kernels.install()
        return measure_layer(kernels)
    except NotCompiledError as error:
        logger.warning("%s", error)
        return {}


def _row(times: Times) -> str:
    order = [backend for backend in LinearBackend if backend in times]
    return "  ".join(f"{backend} {times[backend] / 1e6:8.3f} ms" for backend in order)
