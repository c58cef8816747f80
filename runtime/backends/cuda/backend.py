"""The CUDA backend of the engine.

A step is one copy of numbers to the device, kernel launches or one graph, the choice of tokens on
the device, and one copy back, which is the step's only wait. Graphs are recorded between steps, in
otherwise idle time, once the weights are exact and the first step has run. Where no kernels support
a model, torch computes each sequence's attention separately, and tokens are chosen on the host:
slower, with many waits for the device a step. The timeline records this.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....loader.timeline import Timeline
from ...step.backend import Backend, BackendDeviceStatistics, BackendOptions, HostBackend, OnLayer
from ...step.batch import Rows, StepBatch
from ...step.state import Chosen, SamplingState
from .decoder import DeviceKernels
from .executor import CudaExecutor
from .graphs import CudaRecorder, DecodeGraphs, Recorder, next_to_record
from .guarded import GuardedBackend
from .launch import Launcher
from .sampling import DeviceSampler
from .storage import DeviceKVStorage, activation_bytes
from .tables import StepPacker
from .warm_up import open_launcher, span, use_flash_attention

if TYPE_CHECKING:
    from ...models.decoder import Decoder

logger = logging.getLogger(__name__)

# Steps of one size before its recording may delay the running sequences.
MIN_WANTED = 64


class TorchDeviceBackend(HostBackend):
    """A `HostBackend` whose executor sends a step's numbers to the model's device."""

    def make_room(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class CudaBackend:
    """The backend of one decoder. Installs `DeviceKernels` in the decoder's executor when it is
    made.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: DeviceKVStorage,
        options: BackendOptions,
        kernels: DeviceKernels,
        *,
        recorder: Recorder | None,
        timeline: Timeline | None = None,
    ) -> None:
        """Without a recorder, no graphs are recorded."""
        self._decoder = decoder
        self._kv = kv
        self._options = options
        self._timeline = timeline
        self._device = kv.device
        self._weight_bytes = decoder.weights.size_bytes
        self._kernels = kernels
        assert isinstance(decoder.executor, CudaExecutor)
        decoder.executor.kernels = kernels
        self._packer = StepPacker(kv.device, block_size=options.block_size, group=kernels.group)
        self._sampler = DeviceSampler(kv.device, kernels.launch)
        self._graphs: DecodeGraphs | None = None
        if recorder is not None:
            self._graphs = DecodeGraphs(
                kernels,
                kv,
                self._packer,
                recorder,
                max_rows=options.max_running,
                max_context=options.max_context,
            )
        # Steps that a graph of each size would have served.
        self._missed: Counter[int] = Counter()
        # Size of the graph that computes the batch built last.
        self._next_graph: int | None = None
        self._num_graph_steps = 0
        self._num_eager_steps = 0
        self._num_out_of_memory = 0

    @property
    def returns_early(self) -> bool:
        return True

    @torch.inference_mode()
    def build(self, parts: Sequence[Rows]) -> StepBatch:
        if self._device.type == "cuda":
            # Per thread: kernels are launched without going through torch.
            torch.cuda.set_device(self._device)
        self._next_graph = None
        graphs = self._graphs
        if graphs is not None and all(part.is_next_token for part in parts):
            self._next_graph = graphs.size_for(len(parts))
            if self._next_graph is not None:
                return graphs.batch(list(parts), self._next_graph)
            wanted = next((size for size in graphs.sizes if size >= len(parts)), None)
            if wanted is not None:
                self._missed[wanted] += 1
        return self._packer.batch(parts)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, *, on_layer: OnLayer | None) -> Any:
        size, self._next_graph = self._next_graph, None
        if size is not None and self._graphs is not None:
            self._num_graph_steps += 1
            return self._graphs.run(size, len(batch.spans))
        self._num_eager_steps += 1
        return self._decoder.forward(batch, self._kv, on_layer=on_layer)

    @torch.inference_mode()
    def choose(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Chosen]:
        return self._sampler.choose(logits, states)

    def wants_idle_time(self, *, has_running: bool) -> bool:
        """True if a graph is worth recording now. Never before the first step: a new server's first
        request is likely to arrive soon.
        """
        return self._num_eager_steps > 0 and self._size_to_record(has_running=has_running) is not None

    @torch.inference_mode()
    def work_when_idle(self) -> None:
        """Record one graph."""
        size = self._size_to_record(has_running=False)
        assert size is not None
        assert self._graphs is not None
        start_s = time.monotonic()
        outcome = "recorded" if self._graphs.record(size) else "failed"
        if self._timeline is not None:
            origin_s, end_s = self._timeline.started_at, time.monotonic()
            self._timeline.add(
                "device", f"CUDA graph, {size} rows", start_s - origin_s, end_s - origin_s, outcome=outcome
            )

    def _size_to_record(self, *, has_running: bool) -> int | None:
        graphs = self._graphs
        if graphs is None or not graphs.missing:
            return None
        size = next_to_record(graphs.missing, self._missed, has_running=has_running, min_wanted=MIN_WANTED)
        return size if size is not None and self._decoder.is_exact else None

    def make_room(self) -> None:
        self._num_out_of_memory += 1
        if self._graphs is not None and self._num_out_of_memory > 1:
            # Memory is short even after the allocator's cache was emptied.
            self._graphs.forget()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def statistics(self) -> BackendDeviceStatistics | None:
        graphs = self._graphs
        return BackendDeviceStatistics(
            **device_memory(self._device),
            weight_bytes=self._weight_bytes,
            kv_bytes=self._kv.size_bytes,
            graph_bytes=0 if graphs is None else graphs.memory_bytes,
            activation_bytes=activation_bytes(
                self._decoder.spec,
                self._options.max_step_tokens,
                self._options.max_running,
            ),
            num_graphs=0 if graphs is None else graphs.num_recorded,
            graph_steps_total=self._num_graph_steps,
            eager_steps_total=self._num_eager_steps,
            out_of_memory_total=self._num_out_of_memory,
            narrow_redraws_total=self._sampler.num_redraws,
        )


def device_memory(device: torch.device) -> dict[str, int]:
    """Memory figures from the driver and torch's allocator, in bytes; all 0 on a CPU, where tests
    run.
    """
    if device.type != "cuda":
        return dict.fromkeys(("free_bytes", "total_bytes", "allocated_bytes", "reserved_bytes"), 0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return {
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
        "allocated_bytes": torch.cuda.memory_allocated(device),
        "reserved_bytes": torch.cuda.memory_reserved(device),
    }


def cuda_backend(model: Any, kv: Any, options: BackendOptions, timeline: Timeline | None) -> Backend:
    """Make the backend with kernels where they support this model and pool; otherwise torch
    computes every step.
    """
    try:
        if not isinstance(kv, DeviceKVStorage):
            raise NotImplementedError("the kernels support only keys and values in the model's own dtype")
        device = torch.device(model.device)
        use_flash_attention()
        with span(timeline, "kernels' modules"):
            folder = Path(options.kernel_dir) if options.kernel_dir else None
            launch, description = open_launcher(device, folder)
            kernels = _kernels(model, options, launch)
    except Exception as error:  # noqa: BLE001 - torch can replace kernels after any error of a compiler or a driver
        logger.warning(
            "the CUDA kernels are unavailable, torch computes every step: %s: %s", type(error).__name__, error
        )
        if timeline is not None:
            timeline.mark("process", "no kernels on the device", why=str(error)[:200])
        return GuardedBackend(TorchDeviceBackend(model, kv, options.block_size), torch.device(model.device))
    if timeline is not None:
        timeline.mark("process", "kernels on the device", kernels=description)
    recorder = CudaRecorder(torch.device(model.device))
    backend = CudaBackend(model, kv, options, kernels, recorder=recorder, timeline=timeline)
    return GuardedBackend(backend, torch.device(model.device))


def _kernels(model: Any, options: BackendOptions, launch: Launcher) -> DeviceKernels:
    """Load the kernels of this model. Raises if they do not support it, before any step is
    computed.
    """
    properties = torch.cuda.get_device_properties(torch.device(model.device))
    kernels = DeviceKernels(
        model.executor,
        launch,
        block_size=options.block_size,
        max_context=options.max_context,
        num_processors=properties.multi_processor_count,
        architecture=10 * properties.major + properties.minor,
    )
    launch.prepare(kernels.variants)
    kernels.products.prepare_integers(model.executor)
    return kernels
