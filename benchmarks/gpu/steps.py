"""The steps of `scripts/gpu-check`: three calls of nine minutes, each with its steps in order."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

GPU_TESTS = ("tests/loader/device", "tests/runtime/backends/cuda", "tests/runtime/test_instance_on_device.py")
DIRECT = "tests/runtime/backends/cuda/direct"
NEWEST = (f"{DIRECT}/test_latent.py", f"{DIRECT}/test_encoders.py")
ONE_LOAD = "tests/loader/device/test_cuda_load.py"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`command` runs in the repository's root. In it '{json}' is where the step writes what it has measured so far, and
    '{junit}' where tests report. `dry` is what shows without a device that the command can begin.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    dry: tuple[str, ...]
    in_background: bool = False  # from the call's start to its end; steps that need it wait
    waits: bool = False  # for what runs in the background


def _benchmark(name: str, limit_s: float, *options: str, module: str = "", waits: bool = False) -> StepPlan:
    program = (sys.executable, "-m", f"benchmarks.gpu.{module or name}")
    return StepPlan(
        name, (*program, *options, "--json", "{json}"), limit_s, (*program, "--help"), waits=waits
    )


def _tests(name: str, limit_s: float, *paths: str, under: tuple[str, ...] = ()) -> StepPlan:
    # A machine's own plugins and libraries may warn of what is not ours.
    quiet = ("-W", "default", "-p", "no:cacheprovider", "-p", "no:benchmark")
    pytest = (sys.executable, "-m", "pytest", "-q", "-m", "gpu", *quiet, *paths)
    return StepPlan(name, (*under, *pytest, "--junitxml", "{junit}"), limit_s, (*pytest, "--collect-only"))


def _direct_tests(name: str, limit_s: float, *paths: str) -> StepPlan:
    """Tests of the path without torch, on the device in place of the CPU."""
    plan = _tests(name, limit_s, *paths)
    command, dry = (
        tuple("not slow" if part == "gpu" else part for part in own) for own in (plan.command, plan.dry)
    )
    return replace(plan, command=("env", "TENERAL_TEST_CUDA=1", *command), dry=dry)


MODEL = _benchmark("model", 500.0, module="prepare")
MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all")

CALLS: dict[str, tuple[StepPlan, ...]] = {
    "A": (
        _direct_tests("newest_tests", 90.0, *NEWEST),
        _benchmark("ceilings", 60.0),
        _tests("tests", 180.0, *GPU_TESTS),
        _direct_tests("direct_tests", 90.0, DIRECT, *(f"--ignore={path}" for path in NEWEST)),
        _tests("memcheck", 60.0, ONE_LOAD, "-k", "bf16 or exact", under=MEMCHECK),
        _benchmark("stored", 60.0),
        _benchmark("merge", 40.0),
        _benchmark("stream", 50.0),
    ),
    "B": (
        replace(MODEL, in_background=True),
        _benchmark("direct", 60.0),
        _benchmark("decode", 100.0),
        _benchmark("decode_int4", 50.0, "--bits", "4", module="decode"),
        _benchmark("attention", 70.0),
        _benchmark("products", 40.0),
        _benchmark("first_tokens", 70.0),
        _benchmark("prefix", 50.0),
        _benchmark("decode_threads", 60.0, waits=True),
    ),
    "C": (
        replace(MODEL, in_background=True),
        _benchmark("cold_start", 280.0, "--rounds", "3", waits=True),
        _benchmark("load_only", 200.0, waits=True),
    ),
}
