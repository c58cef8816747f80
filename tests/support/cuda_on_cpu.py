"""The bodies of benchmarks for GPUs, on the CPU: torch's calls for a device are made there, and the kernels are the
references of the tests. Their times mean nothing; that they run is what is shown.

    python -m tests.support.cuda_on_cpu CASES FOLDER

CASES, as JSON: by "NAME OPTIONS …" the constants of the module to replace, whose lists become tuples. Each leaves its
results in the folder. For a process of its own: it changes torch and threads for good.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.gpu import model_8b
from tests.support.device_engine import Repeater
from tests.support.reference_kernels import ReferenceKernels
from torch.overrides import TorchFunctionMode

from teneral.runtime.backends import choose
from teneral.runtime.backends.cuda import backend, warm_up

MEMORY_BYTES = 80 << 30
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 2048,
}


class OnCpu(TorchFunctionMode):
    """Functions get the CPU where they were to use a device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: _cpu(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = tuple(_cpu(value) if isinstance(value, str | torch.device) else value for value in args)
        return function(*args, **named)


def _cpu(value: Any) -> Any:
    return torch.device("cpu") if str(value).startswith("cuda") else value


class Event:
    def __init__(self, **_: Any) -> None:
        self.at_s = 0.0

    def record(self, *_: Any) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return (later.at_s - self.at_s) * 1e3 + 1e-3


class Recorder(Repeater):
    """The stand-in for `CudaRecorder`."""

    def __init__(self, _: torch.device) -> None:
        super().__init__()


def install() -> None:
    """For all threads, and for good."""
    cuda: Any = torch.cuda
    cuda.Event = Event
    cuda.is_available = lambda: True
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    cuda.mem_get_info = lambda *_: (MEMORY_BYTES, MEMORY_BYTES)
    cuda.memory_allocated = cuda.memory_reserved = lambda *_: 0
    run = threading.Thread.run

    def run_on_cpu(thread: threading.Thread) -> None:
        with OnCpu():
            run(thread)

    threading.Thread.run = run_on_cpu  # type: ignore[method-assign]
    model_8b.CONFIG.update(SMALL)
    model_8b.copy_bytes_s = lambda: 1e9
    model_8b.recorded = lambda work: work
    model_8b.device_s = _took_s
    warm_up.open_launcher = backend.open_launcher = lambda *_: (ReferenceKernels(), "references")
    backend.CudaRecorder = Recorder  # type: ignore[misc,assignment]
    choose.step_backend = backend.cuda_backend


def _took_s(work: Callable[[], object], *, num: int = 0) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s + 1e-9


def main() -> int:
    cases, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    install()
    for number, (case, settings) in enumerate(cases.items()):
        name, *options = case.split()
        print(f"== {case}")
        sys.argv[1:] = [*options, "--json", str(folder / f"{number}.json")]
        module: Any = import_module(f"benchmarks.gpu.{name}")
        for constant, value in settings.items():
            setattr(module, constant, _tuples(value))
        with OnCpu():
            if status := module.main():
                return int(status)
    return 0


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    raise SystemExit(main())
