"""CUDA's errors: memory that ran out ends one request, a step that failed its own, and a lost device the instance."""

from __future__ import annotations

import contextlib
import ctypes

import pytest
import torch
from tests.support.device_engine import TIMEOUT_S, DeviceRig, decoder_of
from tests.support.reference_kernels import ReferenceKernels

from teneral.cli_report import exit_code
from teneral.runtime.backends.cuda.guarded import GuardedBackend, is_out_of_memory
from teneral.runtime.backends.cuda.launch import Driver, LaunchError
from teneral.runtime.backends.cuda.library import Binary
from teneral.runtime.engine.engine import Engine
from teneral.runtime.errors import CapacityError, DeviceLostError, ModelError

PROMPTS = [(7, 11, 13), tuple(range(20, 29))]
LOST = RuntimeError("CUDA error: an illegal memory access was encountered")
NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: out of memory"),
    LaunchError("launching x: out of memory (2)", result=2),
]


class Breaking(ReferenceKernels):
    """Raises these errors, one a launch, and works otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[Exception] = []

    def __call__(self, *arguments):
        if self.errors:
            raise self.errors.pop(0)
        super().__call__(*arguments)


class GuardedRig(DeviceRig):
    """An engine whose device answers probes as the test says."""

    def __init__(self, answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost: list[DeviceLostError] = []
        self.num_probes = 0
        launch = Breaking()
        build = Engine.__init__

        def probe(device: torch.device) -> bool:
            self.num_probes += 1
            return answers

        def guarded(engine, *arguments, make_backend, **options):
            def make(*given):
                return GuardedBackend(make_backend(*given), torch.device("cpu"), probe=probe)

            build(engine, *arguments, make_backend=make, on_device_lost=self.lost.append, **options)

        monkeypatch.setattr(Engine, "__init__", guarded)
        super().__init__(decoder_of("mistral"), launch)
        self.engine.start()


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_allocations_that_fail_in_a_library_end_one_request_and_not_the_engine(monkeypatch, error):
    with GuardedRig(False, monkeypatch) as rig:
        (expected,) = rig.say(PROMPTS[:1], 4)
        rig.launch.errors.append(error)
        (victim,) = rig.submit(PROMPTS[:1], 4)
        with pytest.raises(CapacityError):
            victim.result(TIMEOUT_S)
        assert rig.say(PROMPTS[:1], 4) == [expected]
        assert (rig.num_probes, rig.lost) == (0, [])
    assert is_out_of_memory(error)


def test_an_error_after_which_the_device_computes_ends_its_step(monkeypatch):
    with GuardedRig(True, monkeypatch) as rig:
        (expected,) = rig.say(PROMPTS[:1], 4)
        rig.launch.errors.append(LaunchError("launching x: invalid argument (1)", result=1))
        (victim,) = rig.submit(PROMPTS[:1], 4)
        with pytest.raises(ModelError):
            victim.result(TIMEOUT_S)
        assert rig.say(PROMPTS[:1], 4) == [expected]
        assert (rig.num_probes, rig.lost) == (1, [])


def test_a_lost_device_ends_the_engine_and_says_so_once(monkeypatch):
    """Readiness and the exit code follow: `Instance` takes it for its failure."""
    with GuardedRig(False, monkeypatch) as rig:
        rig.launch.errors.append(LOST)
        victims = []
        # The engine may have ended before the last ones are there.
        with contextlib.suppress(DeviceLostError):
            for prompt in PROMPTS:
                victims += rig.submit([prompt], 4)
        assert victims
        for victim in victims:
            with pytest.raises(DeviceLostError, match="illegal memory access"):
                victim.result(TIMEOUT_S)
        with pytest.raises(DeviceLostError):
            rig.submit(PROMPTS, 4)[0].result(TIMEOUT_S)
        (failure,) = rig.lost
        assert exit_code(failure) == 18


def test_a_handle_that_cublas_cannot_make_is_memory_where_the_device_still_computes():
    error = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")

    class Raising:
        def work_when_idle(self):
            raise error

    for answers, expected in ((True, torch.OutOfMemoryError), (False, DeviceLostError)):
        backend = GuardedBackend(
            Raising(), torch.device("cpu"), probe=lambda device, answers=answers: answers
        )
        with pytest.raises(expected):
            backend.work_when_idle()


def test_an_error_of_ours_asks_the_device_nothing():
    class Raising:
        def work_when_idle(self):
            raise ValueError("a bug")

    def probe(device):
        raise AssertionError("probed")

    with pytest.raises(ValueError, match="a bug"):
        GuardedBackend(Raising(), torch.device("cpu"), probe=probe).work_when_idle()


class FakeCuda:
    """The driver's functions that loading a module takes; every call is noted."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == "cuDevicePrimaryCtxRetain":
                arguments[0]._obj.value = 7
            return 0

        call.argtypes = ()
        setattr(self, name, call)
        return call


def test_loading_modules_waits_for_nothing_that_the_device_does(monkeypatch):
    """A load's streams are at work meanwhile."""
    cuda = FakeCuda()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: cuda)
    for name in ("synchronize", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("the device was waited for"))
    driver = Driver(torch.device("cuda:0"))
    for name in ("a", "b"):
        driver.load(b"", Binary(name, name, ("*bf16",), 1, 4, 60_000))
    assert cuda.calls.count("cuModuleLoadData") == 2
    assert cuda.calls.count("cuCtxSetCurrent") == 2  # where the thread has none; the fake's never has
    assert not [name for name in cuda.calls if "Synchronize" in name]
