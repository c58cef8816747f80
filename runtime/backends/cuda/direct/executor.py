"""The executor of decoders on a device, without torch: steps are programs over fixed addresses.

Activations of a pass are the workspace's rows. Where several passes are under way, as while weights
arrive, those of the others are kept in memory of their own meanwhile. What a request's tokens give
depends on nothing that else is in the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from ....errors import ModelError
from ....kv.storage import KVKind
from ....models.encoder_weights import EncoderWeights
from ....models.executor import ComputeDtype, Floats
from ....models.matrices import DecoderWeights
from ....models.spec import DecoderSpec, EncoderSpec
from ....step.batch import Int64s, StepBatch
from ....tensors import DType, to_float32
from .adapters import DeviceAdapters
from .device import NAME, DirectDevice, memory_errors
from .encoder import DirectEncoder
from .latent import copied_layers
from .launches import DecoderLaunches, modules_of
from .memory import Array, DeviceArena
from .program import MIN_GRAPH_STEPS, Graph, Program
from .refusals import ordered_matrices, refusal, refusal_of_encoder
from .storage import DirectInt8KVStorage, DirectKVStorage, DirectPool
from .tables import ProgramKey, bucket_of, slots_of
from .workspace import StepArrays, Workspace, WorkspaceLimits, size_of

AUTO = "auto"
_POOLS: dict[KVKind, type[DirectKVStorage | DirectInt8KVStorage]] = {
    KVKind.MODEL: DirectKVStorage,
    KVKind.INT8: DirectInt8KVStorage,
}
# Of the kernels' arithmetic: raised when a change of theirs changes a bit of a result.
VERSION = 1


class Activations:
    """Rows of a pass: the workspace's, or in memory of their own."""

    __slots__ = ("__weakref__", "address", "device", "num_rows")

    def __init__(self, device: DirectDevice, num_rows: int) -> None:
        self.device = device
        self.num_rows = num_rows
        self.address = 0  # 0: in the workspace

    def __del__(self) -> None:
        if self.address:  # what reads it was queued before
            self.device.driver.synchronize_stream(self.device.stream)
            self.device.driver.free(self.address)


class Logits:
    """Rows of logits (R, vocab) fp32 on the device, valid until the next step."""

    def __init__(self, device: DirectDevice, array: Array) -> None:
        self.array = array
        self._device = device

    def __len__(self) -> int:
        return self.array.shape[0]

    def __getitem__(self, rows: slice) -> Logits:
        first, end, step = rows.indices(len(self))
        assert step == 1
        shape = (max(0, end - first), *self.array.shape[1:])
        return Logits(self._device, Array(self.array.row(first), shape, self.array.dtype))

    def cpu(self) -> Logits:
        """Itself, so that `PromptScores` reads it as it reads tensors."""
        return self

    def numpy(self) -> npt.NDArray[np.float32]:
        """A copy on the host. Blocks."""
        numbers = np.empty(self.array.shape, np.float32)
        self._device.read(self.array, numbers.ctypes.data)
        return numbers


class DirectStep(Struct, frozen=True, eq=False):
    """The state that all layers share in one pass."""

    batch: StepBatch


class DirectExecutor:
    """See `models.executor.Executor`."""

    name = NAME
    is_direct = True
    is_batch_invariant = True
    runs_layers_together = True
    takes_adapters = True
    routes_apart = False
    scores_in_strips = False

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights, device: DirectDevice) -> None:
        self.spec = spec
        self.device = device
        self._weights = weights
        self._to_check = ordered_matrices(weights)  # before they are first used
        self._copied_layers = copied_layers(weights, spec.dtype)
        self._to_copy: list[int] = []  # of these, whose copies are none of exact weights yet
        self._kernels = device.kernels(spec.dtype)
        self._kv: DirectPool | None = None
        self._is_opened_alone = False  # without an engine
        self._workspace: Workspace | None = None
        self._launches: DecoderLaunches | None = None
        self._adapters: DeviceAdapters | None = None  # from the first step on that has some
        self._programs: dict[ProgramKey, Program] = {}
        self._heads: dict[int, Program] = {}
        self._graphs: dict[ProgramKey, Graph] = {}
        self._num_uses: dict[ProgramKey, int] = {}
        self._in_workspace: weakref.ref[Activations] | None = None
        self.num_graph_steps = 0
        self.num_eager_steps = 0

    @property
    def numerics(self) -> str:
        return f"{NAME}/{VERSION}/sm_{self.device.architecture}"

    @property
    def modules(self) -> tuple[str, ...]:
        """The kernels' modules that the model and its pool need."""
        is_int8 = isinstance(self._kv, DirectInt8KVStorage)
        return modules_of(self.spec, self._weights, of_int8=is_int8)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def workspace_bytes(self) -> int:
        return 0 if self._workspace is None else self._workspace.size_bytes

    @property
    def adapter_bytes(self) -> int:
        return 0 if self._adapters is None else self._adapters.size_bytes

    def open(self, kv: DirectPool, limits: WorkspaceLimits) -> None:
        """Take the memory for steps over this pool. Raises `CudaError` where it is not there."""
        self.close()
        self._kv = kv
        self._is_opened_alone = False
        self._kernels.load(self.modules)
        self._workspace = Workspace(self.device, self.spec, self._with_copies(limits), kv)
        self._to_copy = list(self._copied_layers)
        self._launches = DecoderLaunches(self._kernels, self._weights, self._workspace, kv)

    def step_bytes(self, max_running: int, adapters_bytes: int = 0) -> int:
        """The memory that `open` takes for this many sequences, of any length, and that of their adapters, which are
        `adapters_bytes` on the host at most.
        """
        limits = WorkspaceLimits(max_spans=max_running, max_context=self.spec.max_context)
        size_bytes = self._arrays_bytes(limits)
        if adapters_bytes:
            num_layers, num_rows = self.spec.num_layers, limits.max_rows
            tables = DeviceAdapters.table_bytes(num_layers, num_slots=max_running, num_rows=num_rows)
            size_bytes += sum(tables) + adapters_bytes
        return size_bytes

    def batch_bytes(self, max_tokens: int) -> int:
        """The memory of the largest batch of texts of up to `max_tokens`, without an engine: keys and values, too."""
        limits = WorkspaceLimits.alone(self.spec)
        num_blocks = max(limits.max_spans, -(-max_tokens // limits.block_size))
        of_pool = num_blocks * self.kv_block_bytes(limits.block_size, KVKind.MODEL)
        return self._arrays_bytes(limits) + of_pool

    def close(self) -> None:
        """Free what `open` took, once the device is done with it. Idempotent."""
        if self._workspace is None:
            return
        self.device.driver.synchronize_stream(self.device.stream)
        self.drop_graphs()
        self._programs.clear()
        self._heads.clear()
        self._workspace.close()
        if self._adapters is not None:
            self._adapters.close()
        self._workspace = self._launches = self._adapters = None

    def drop_graphs(self) -> None:
        """Free the graphs; they are made again as steps come. None may run."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._num_uses.clear()

    def drop_adapters(self) -> None:
        """Free the copies of adapters; they are made again as steps need them. No step may run."""
        if self._adapters is not None:
            self._adapters.drop()
            self._opened().forget()

    # -- a pass, stage by stage ------------------------------------------------------------------------------

    @memory_errors()
    def embed(self, batch: StepBatch) -> Activations:
        workspace = self._opened()
        self._evict()
        key = self._load(batch)
        self._program(key).launch(self.device.stream, 0, 1)
        x = Activations(self.device, len(batch.tokens))
        self._in_workspace = weakref.ref(x)
        assert x.num_rows <= workspace.limits.max_rows
        return x

    def begin(self, batch: StepBatch, kv: Any) -> DirectStep:
        assert kv is self._kv, "the executor was opened for another pool"
        return DirectStep(batch)

    @memory_errors()
    def layers(self, step: DirectStep, first: int, end: int, x: Activations) -> Activations:
        self._check(first, end)
        self._fetch(x)
        key = self._load(step.batch)
        if self._adapters is not None and key.is_adapted:
            self._adapters.upload(step.batch.spans, first, end)
        self._copy_matrices(first, end)
        self._program(key).launch(self.device.stream, first + 1, end + 1)
        return x

    @memory_errors()
    def logits(self, x: Activations, rows: Int64s) -> Logits:
        """Valid until the next call."""
        workspace = self._opened()
        logits = workspace.arrays.logits
        shape = (len(rows), logits.shape[1])
        if len(rows) > logits.shape[0]:
            raise ModelError(f"{len(rows)} rows of logits are more than the {logits.shape[0]} that have room")
        if len(rows):
            self._check(self.spec.num_layers, self.spec.num_layers + 1)
            self._fetch(x)
            workspace.load_logit_rows(rows)
            self._head(len(rows)).launch(self.device.stream)
        return Logits(self.device, Array(logits.address, shape, logits.dtype))

    @memory_errors()
    def states(self, x: Activations, rows: Int64s) -> Floats:
        """Blocks until the device is done."""
        workspace, dtype = self._opened(), self.spec.dtype
        scored = workspace.arrays.scored
        found = np.empty((len(rows), scored.shape[1]), np.float32)
        for first in range(0, len(rows), scored.shape[0]):
            some = rows[first : first + scored.shape[0]]
            self._fetch(x)
            workspace.load_logit_rows(some)
            self._head(len(some)).launch(self.device.stream, 0, 1)
            numbers = np.empty((len(some), scored.shape[1]), dtype.numpy)
            self.device.read(Array(scored.address, numbers.shape, dtype), numbers.ctypes.data)
            found[first : first + len(some)] = to_float32(numbers, dtype)
        return found

    def join(self, parts: Sequence[Activations]) -> Activations:
        """Takes memory of its own."""
        return self._gathered([(part, 0, part.num_rows) for part in parts])

    def select(self, x: Activations, rows: Int64s) -> Activations:
        """Takes memory of its own."""
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        runs = [run for run in np.split(rows, cuts) if len(run)]
        return self._gathered([(x, int(run[0]), len(run)) for run in runs])

    # -- a whole step ----------------------------------------------------------------------------------------

    def run(self, batch: StepBatch) -> Logits:
        """All stages of a pass whose weights are all there, as one graph where its like came often.
        Raises `CudaError` and `ModelError`.
        """
        workspace, stream = self._opened(), self.device.stream
        self._check(0, self.spec.num_layers + 1)
        self._evict()
        key = self._load(batch)
        if self._adapters is not None and key.is_adapted:
            self._adapters.upload(batch.spans, 0, self.spec.num_layers)
        self._copy_matrices(0, self.spec.num_layers)
        num_logits = len(batch.logit_rows)
        graph = self._graph(key, num_logits)
        if graph is not None:
            self.num_graph_steps += 1
            graph.launch(stream)
        else:
            self.num_eager_steps += 1
            self._program(key).launch(stream)
            if num_logits:
                self._head(num_logits).launch(stream)
        logits = workspace.arrays.logits
        shape = (num_logits, logits.shape[1])
        return Logits(self.device, Array(logits.address, shape, logits.dtype))

    # -- keys and values -------------------------------------------------------------------------------------

    @memory_errors()
    def new_kv(self, num_blocks: int, block_size: int, kind: KVKind) -> DirectPool:
        """Closes the pool before it, whose content is lost; without an engine, it is that one again where it has the
        room. Raises `OutOfMemoryError` and `CudaError`.
        """
        held = self._kv
        if held is not None and self._is_opened_alone and held.is_open:
            is_alike = type(held) is _POOLS[kind] and held.block_size == block_size
            if is_alike and held.num_blocks >= num_blocks:
                return held
        self.close()
        if held is not None:
            held.close()
        self._kv = None
        self._kv = _POOLS[kind](self.spec.kv_shape(num_blocks, block_size), self.device)
        return self._kv

    def kv_block_bytes(self, block_size: int, kind: KVKind) -> int:
        return _POOLS[kind].block_bytes(self.spec.kv_shape(1, block_size))

    # -- inside ----------------------------------------------------------------------------------------------

    def _opened(self) -> Workspace:
        """The workspace; for passes without an engine, where `open` has named no limits."""
        if self._workspace is None:
            assert self._kv is not None, "the executor has no pool"
            self.open(self._kv, WorkspaceLimits.alone(self.spec, self._kv.block_size))
            self._is_opened_alone = True
        assert self._workspace is not None
        return self._workspace

    def _with_copies(self, limits: WorkspaceLimits) -> WorkspaceLimits:
        return replace(limits, num_latent_copies=len(self._copied_layers))

    def _arrays_bytes(self, limits: WorkspaceLimits) -> int:
        limits = self._with_copies(limits)
        return DeviceArena.measure(lambda arena: StepArrays(arena, self.spec, limits))

    def _check(self, first: int, end: int) -> None:
        """Check what the content of these layers must be, once. Raises `ModelError`."""
        for number in [number for number in self._to_check if first <= number < end]:
            for matrix in self._to_check[number]:
                matrix.check_order()
            del self._to_check[number]

    def _copy_matrices(self, first: int, end: int) -> None:
        """Have copies of what these layers' matrices of latents are now: the last ones once they are exact."""
        for number in [number for number in self._to_copy if first <= number < end]:
            assert self._launches is not None
            assert self._launches.latents is not None
            layer = self._weights.layers[number]
            is_exact = (layer.router_gate or layer.gate).opens(0.0)
            for launch in self._launches.latents.copy(number):
                self.device.driver.launch(launch, self.device.stream)
            if is_exact:
                self._to_copy.remove(number)

    def _load(self, batch: StepBatch) -> ProgramKey:
        workspace = self._opened()
        adapters: Sequence[int] = ()
        if any(span.adapter is not None for span in batch.spans):
            adapters = self._opened_adapters().slots(batch.spans)
        plan = workspace.load(batch, adapters)
        rows = bucket_of(len(batch.tokens), workspace.limits.max_rows)
        return ProgramKey(rows, plan.many, slots_of(plan.num_slots), is_adapted=bool(adapters))

    def _opened_adapters(self) -> DeviceAdapters:
        if self._adapters is None:
            limits, num_layers = self._opened().limits, self.spec.num_layers
            self._adapters = DeviceAdapters(
                self.device, num_layers, num_slots=limits.max_spans, num_rows=limits.max_rows
            )
            assert self._launches is not None
            self._launches.adapters = self._adapters
        return self._adapters

    def _program(self, key: ProgramKey) -> Program:
        if key not in self._programs:
            assert self._launches is not None
            self._programs[key] = self._launches.program(key)
        return self._programs[key]

    def _head(self, num_logits: int) -> Program:
        bucket = bucket_of(num_logits, self._opened().arrays.scored.shape[0])
        if bucket not in self._heads:
            assert self._launches is not None
            self._heads[bucket] = self._launches.head(bucket)
        return self._heads[bucket]

    def _graph(self, key: ProgramKey, num_logits: int) -> Graph | None:
        """The graph of a step in which every row is scored; None: launch it kernel by kernel."""
        bucket = bucket_of(num_logits, self._opened().arrays.logits.shape[0])
        if key.many or bucket != key.rows:
            return None
        if key not in self._graphs:
            self._num_uses[key] = self._num_uses.get(key, 0) + 1
            if self._num_uses[key] < MIN_GRAPH_STEPS:
                return None
            stages = [*self._program(key).stages, *self._head(num_logits).stages]
            self._graphs[key] = Program(self.device.driver, stages).graph()
        return self._graphs[key]

    def _evict(self) -> None:
        """Make room in the workspace: move the rows of a pass under way to memory of their own."""
        x = None if self._in_workspace is None else self._in_workspace()
        self._in_workspace = None
        if x is not None:
            rows = self._opened().arrays.x
            x.address = self.device.driver.alloc(size_of(rows, max(1, x.num_rows)))
            self._copy(x.address, rows.address, x.num_rows)

    def _fetch(self, x: Activations) -> None:
        """Have these rows in the workspace."""
        if not x.address:
            assert self._in_workspace is not None
            assert self._in_workspace() is x
            return
        self._evict()
        self._copy(self._opened().arrays.x.address, x.address, x.num_rows)
        self.device.driver.synchronize_stream(self.device.stream)
        self.device.driver.free(x.address)
        x.address = 0
        self._in_workspace = weakref.ref(x)

    def _gathered(self, runs: Sequence[tuple[Activations, int, int]]) -> Activations:
        """Rows [first, first + num) of each, one behind the other."""
        rows = self._opened().arrays.x
        row_bytes = size_of(rows, 1)
        made = Activations(self.device, sum(num for _, _, num in runs))
        made.address = self.device.driver.alloc(row_bytes * max(1, made.num_rows))
        at = made.address
        for x, first, num in runs:
            self._copy(at, (x.address or rows.address) + first * row_bytes, num)
            at += num * row_bytes
        return made

    def _copy(self, to: int, source: int, num_rows: int) -> None:
        if num_rows:
            size_bytes = size_of(self._opened().arrays.x, num_rows)
            self.device.driver.copy(to, source, size_bytes, self.device.stream)


class DirectModelBackend:
    """An `ExecutorFactory` for weights on a device, which computes in 16 bits."""

    name = NAME

    def __init__(self, device: DirectDevice, asked: str = AUTO) -> None:
        """`asked` is AUTO, or the name of a dtype to compute in."""
        self._device = device
        self._asked = asked

    def compute_dtype(self, stored: DType, *, is_quantised: bool, is_encoder: bool = False) -> ComputeDtype:
        """The stored dtype; of fp32, fp16 for encoders, whose numbers fit, and bf16 for decoders."""
        if self._asked != AUTO:
            return ComputeDtype(stored, DType.of_label(self._asked), "it was requested")
        if stored is not DType.F32:
            return ComputeDtype(stored, stored, "as stored")
        dtype = DType.F16 if is_encoder else DType.BF16
        return ComputeDtype(stored, dtype, "a device's matrix instruction takes 16 bits")

    def refuses_decoder(self, spec: DecoderSpec, weights: DecoderWeights) -> str | None:
        return refusal(spec, weights)

    def refuses_encoder(self, spec: EncoderSpec, weights: EncoderWeights) -> str | None:
        return refusal_of_encoder(spec, weights)

    def decoder(self, spec: DecoderSpec, weights: DecoderWeights) -> DirectExecutor:
        return DirectExecutor(spec, weights, self._device)

    def encoder(self, spec: EncoderSpec, weights: EncoderWeights) -> DirectEncoder:
        return DirectEncoder(spec, weights, self._device)
