"""ONNX Runtime's sessions over a load's weights: of segments, while they arrive, and of the whole
model, once all is there.

A segment's session is made over memory that is still empty: its initialisers are given as values
that lie in the load's slabs, nothing is copied, and neither a graph optimisation nor prepacking
reads them (decision 0033). It computes right once its groups' gates are open, and not before. The
whole model's session is made as any program makes one: its optimisations and prepacking copy the
weights, and the load's memory is not needed any more.

ONNX Runtime refuses external initialisers without a file, so a temporary folder holds one while
sessions are made: empty, sparse, and as long as the largest of them. Imports onnxruntime: import
this for ONNX models only.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import onnxruntime as ort

from ...loader.errors import TeneralError
from ...loader.process.scratch import ScratchFolder, remove_abandoned
from ...loader.timeline import Timeline
from ..errors import CancelledError, ModelError, RequestError
from .spec import PLACEHOLDER_NAME, WHOLE_NAME, OnnxSpec, SegmentSpec

if TYPE_CHECKING:
    from ...loader.load.base import AnyLoad
    from ..files import ModelFiles

    Arrays = Mapping[str, np.ndarray[Any, Any]]

PLACEHOLDER_PREFIX = "teneral-onnx-"  # of temporary folders
FOLDER_KEY = "session.model_external_initializers_file_folder_path"
CPU_PROVIDER = "CPUExecutionProvider"
# As users name them, in ONNX Runtime's words.
PROVIDERS = {
    "cpu": CPU_PROVIDER,
    "openvino": "OpenVINOExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
MAX_SEGMENT_THREADS = 8  # each session has threads of its own, and there are some 20 sessions
GATE_STEP_S = 0.05  # between two looks at whether the caller is still there, while weights arrive
EXIT_WAIT_S = 30.0  # for a session that is being made when the process ends
NUM_TIMED_RUNS = 3  # of which the timeline shows each segment

# What numpy has no dtype for is handed over as these bits, with ONNX's number of the type.
_BITS_TYPES = {"BF16": ("<u2", 16), "F8_E4M3": ("u1", 17), "F8_E5M2": ("u1", 19)}
_TYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip


class Run:
    """One run, which any thread may cancel: it ends at the next node, or while it waits for
    weights.
    """

    def __init__(self, deadline_s: float | None = None) -> None:
        """A wait for weights ends at `deadline_s` on `time.monotonic()`'s clock."""
        self.options = ort.RunOptions()
        self._deadline_s = deadline_s
        self._reason: TeneralError | None = None

    def cancel(self, reason: TeneralError | None = None) -> None:
        """Cancel the run, which then raises `reason`, by default `CancelledError`."""
        self._reason = self._reason or reason or CancelledError("the request was cancelled")
        self.options.terminate = True

    def check(self) -> None:
        """Raise the reason if the run was cancelled, or its deadline has passed."""
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            self.cancel()
        if self._reason is not None:
            raise self._reason.with_traceback(None)


class CallsAtExit:
    """Calls of ONNX Runtime, which the interpreter's exit waits for: a daemon thread that comes
    back from one while the interpreter is taken apart aborts the process. Thread-safe.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_calls = 0
        self._is_exiting = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Counts as a call inside. Raises `CancelledError` once the interpreter exits."""
        with self._changed:
            if self._is_exiting:
                raise CancelledError("the process ends")
            self._num_calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def wait(self) -> None:
        """Let no other call begin, and block until those under way have ended, for a limited time."""
        with self._changed:
            self._is_exiting = True
            self._changed.wait_for(lambda: self._num_calls == 0, EXIT_WAIT_S)


_calls = CallsAtExit()
atexit.register(_calls.wait)


class SegmentedModel:
    """The model in its segments, which run as their weights arrive. One thread runs at a time."""

    name = "segments"

    def __init__(
        self,
        spec: OnnxSpec,
        files: ModelFiles,
        load: AnyLoad,
        *,
        threads: int,
        timeline: Timeline,
        on_wait: Callable[[], object] = lambda: None,
    ) -> None:
        """Sessions are made as runs come to them, or by `prepare`. `on_wait` is called when a run
        waits for weights. Raises `ModelError` for weights on a device.
        """
        if load.place != "host":
            raise ModelError(
                "ONNX models are loaded into the host's memory", hint="Start it with --device cpu."
            )
        self._spec = spec
        self._files = files
        self._load = load
        self._threads = min(threads, MAX_SEGMENT_THREADS)
        self._timeline = timeline
        self._on_wait = on_wait
        self._num_runs = 0
        self._sessions: dict[int, ort.InferenceSession] = {}
        self._values: dict[str, ort.OrtValue] = {}
        self._placeholder: Placeholder | None = None  # while sessions are being made
        self._making = threading.Lock()  # over sessions, which another thread may make ahead
        self._closed = False
        self._last_use = {
            name: number for number, segment in enumerate(spec.segments) for name in segment.inputs
        }

    def run(self, inputs: Arrays, run: Run) -> dict[str, np.ndarray[Any, Any]]:
        """All outputs by name. Blocks until each segment's weights are there. Raises
        `CancelledError`, the load's error, `RequestError` for inputs that the model refuses, and
        `ModelError` for what fails in it.
        """
        values: dict[str, np.ndarray[Any, Any]] = dict(inputs)
        wanted = {value.name for value in self._spec.outputs}
        for number, segment in enumerate(self._spec.segments):
            session = self._session(number)
            self._wait(segment, run)
            run.check()
            begin_s = self._timeline.now_s()
            made = _run(session, segment.outputs, {name: values[name] for name in segment.inputs}, run)
            values.update(zip(segment.outputs, made, strict=True))
            if self._num_runs < NUM_TIMED_RUNS:
                self._timeline.add("execute", f"segment {number}", begin_s, self._timeline.now_s())
            for name in segment.inputs:  # what no later segment takes need not stay in memory
                if self._last_use[name] == number and name not in wanted:
                    del values[name]
        self._num_runs += 1
        return {value.name: values[value.name] for value in self._spec.outputs}

    def prepare(self) -> None:
        """Make all sessions, in order: in a thread of its own, so that their files come early.
        Raises nothing: errors are raised by runs.
        """
        with suppress(TeneralError):
            for number in range(len(self._spec.segments)):
                self._session(number)

    def close(self) -> None:
        """Free the sessions. Idempotent."""
        with self._making:
            self._closed = True
            self._sessions.clear()
            self._values.clear()
            self._remove_placeholder()

    def _wait(self, segment: SegmentSpec, run: Run) -> None:
        by_name = self._load.manifest.by_name
        for group in sorted({by_name[name].group for name in segment.weights}):
            while not self._load.is_ready(group):
                self._on_wait()
                run.check()
                with suppress(TimeoutError):
                    self._load.wait(group, timeout_s=GATE_STEP_S)

    def _session(self, number: int) -> ort.InferenceSession:
        with self._making:
            if self._closed:
                raise CancelledError("the model was closed")
            return self._made(number)

    def _made(self, number: int) -> ort.InferenceSession:
        if number not in self._sessions:
            segment = self._spec.segments[number]
            options = _options(self._threads)
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.add_session_config_entry("session.disable_prepacking", "1")
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            for name in segment.weights:
                if name not in self._values:
                    self._values[name] = _value(self._load, name)
                options.add_initializer(name, self._values[name])
            if self._placeholder is None:
                self._placeholder = Placeholder.of(self._spec, self._load)
            options.add_session_config_entry(FOLDER_KEY, self._placeholder.path)
            self._sessions[number] = _make_session(self._files, segment.file, options, [CPU_PROVIDER])
            if len(self._sessions) == len(self._spec.segments):
                self._remove_placeholder()  # a session looks for the file once
        return self._sessions[number]

    def _remove_placeholder(self) -> None:
        if self._placeholder is not None:
            self._placeholder.remove()
            self._placeholder = None


class WholeModel:
    """The model in one session, optimised and prepacked. One thread at a time."""

    name = "whole"

    def __init__(
        self, spec: OnnxSpec, files: ModelFiles, load: AnyLoad, *, threads: int, providers: Sequence[str]
    ) -> None:
        """Blocks while the weights, which must be exact, are copied and prepacked. The load's
        memory is not used afterwards. Raises `ModelError`.
        """
        options = _options(threads)
        by_name = load.manifest.by_name
        if any(by_name[name].dtype == "F16" for name in spec.weights):
            # In the packed graph fp16 products have their casts, so this one would move a scale behind a sum. A session
            # of the original file casts after it, and leaves the scale where it is.
            options.add_session_config_entry("optimization.disable_specified_optimizers", "MatMulScaleFusion")
        remove_abandoned(PLACEHOLDER_PREFIX)  # here, where no request waits for it
        with Placeholder.of(spec, load) as folder:
            options.add_session_config_entry(FOLDER_KEY, folder.path)
            names = list(spec.weights)
            if names:
                options.add_external_initializers(names, [_value(load, name) for name in names])
            self._session = _make_session(files, WHOLE_NAME, options, providers)
        self._outputs = [value.name for value in spec.outputs]

    @property
    def providers(self) -> list[str]:
        """The active execution providers, by ONNX Runtime's names."""
        return list(self._session.get_providers())

    def run(self, inputs: Arrays, run: Run) -> dict[str, np.ndarray[Any, Any]]:
        run.check()
        made = _run(self._session, self._outputs, inputs, run)
        return dict(zip(self._outputs, made, strict=True))

    def close(self) -> None:
        """Does nothing: the session is freed with its last reference."""


class Placeholder:
    """A folder with the file that skeletons name, which takes no room. A context manager, or until
    `remove`.
    """

    def __init__(self, size_bytes: int) -> None:
        try:
            self._folder = ScratchFolder(PLACEHOLDER_PREFIX)
            try:
                with open(self._folder.path / PLACEHOLDER_NAME, "wb") as file:
                    file.truncate(size_bytes)
            except OSError:
                self.remove()
                raise
        except OSError as error:
            raise ModelError(
                f"no temporary folder can be made for ONNX Runtime: {error.strerror}",
                hint="Name a folder that can be written, in TMPDIR. It takes no room there.",
            ) from error
        self.path = str(self._folder.path)

    @classmethod
    def of(cls, spec: OnnxSpec, load: AnyLoad) -> Self:
        """A buffer as long as the largest weight. Raises `ModelError`."""
        by_name = load.manifest.by_name
        return cls(max((by_name[name].size_bytes for name in spec.weights), default=0))

    def remove(self) -> None:
        """Idempotent."""
        self._folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def check_providers(names: Sequence[str]) -> list[str]:
    """Providers by ONNX Runtime's names, the CPU's last. Raises `ModelError` for one that this
    installation lacks.
    """
    wanted = [PROVIDERS[name] for name in names]
    there = ort.get_available_providers()
    for name, provider in zip(names, wanted, strict=True):
        if provider not in there:
            raise ModelError(
                f"the installed onnxruntime has no provider for {name!r}; it has {', '.join(there)}",
                hint="Install onnxruntime-openvino or onnxruntime-gpu in place of onnxruntime.",
            )
    return [*dict.fromkeys((*wanted, CPU_PROVIDER))]


def _options(threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return options


def _value(load: AnyLoad, name: str) -> ort.OrtValue:
    """A tensor where it lies in the load's memory, filled or not."""
    tensor = load.manifest.by_name[name]
    assert load.place == "host"
    data = load.slab(tensor.group)[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
    if tensor.dtype in _BITS_TYPES:
        bits, number = _BITS_TYPES[tensor.dtype]
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(data.view(bits).reshape(tensor.shape), number)
    if tensor.dtype not in _TYPES:
        raise ModelError(f"tensor {name} has dtype {tensor.dtype}, which ONNX Runtime is not given")
    return ort.OrtValue.ortvalue_from_numpy(data.view(_TYPES[tensor.dtype]).reshape(tensor.shape))


def _make_session(
    files: ModelFiles, name: str, options: ort.SessionOptions, providers: Sequence[str]
) -> ort.InferenceSession:
    skeleton = files.read(name)
    if skeleton is None:
        raise ModelError(f"the artifact has no {name}")
    try:
        with _calls.call():
            return ort.InferenceSession(skeleton, options, providers=list(providers))
    except CancelledError:
        raise
    except Exception as error:  # ONNX Runtime's own classes have no base but this one
        raise ModelError(
            f"ONNX Runtime {ort.__version__} refuses {name}: {_text_of(error)}",
            hint="Pack the model again, with the version of onnxruntime that serves it.",
        ) from error


def _run(
    session: ort.InferenceSession, outputs: Sequence[str], inputs: Arrays, run: Run
) -> list[np.ndarray[Any, Any]]:
    try:
        with _calls.call():
            made: list[np.ndarray[Any, Any]] = session.run(list(outputs), dict(inputs), run.options)
        return made
    except TeneralError:
        raise
    except Exception as error:
        run.check()
        detail = _text_of(error)
        if type(error).__name__ == "InvalidArgument":
            raise RequestError(f"the model refuses these inputs: {detail}", param="inputs") from error
        raise ModelError(f"the model failed: {detail}") from error


def _text_of(error: Exception) -> str:
    return str(error).replace("\n", " ")[:500]
