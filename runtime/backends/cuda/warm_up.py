"""What a device needs once before it computes, done while weights are on their way.

Each takes from milliseconds to seconds, none needs a weight, and each is a span of its own on the timeline: the
context, cuBLAS with its workspace; and, once it is known which, the kernels' binaries, or the compiler in their place.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ....loader.timeline import Timeline
from .launch import BinaryLauncher, Driver, Launcher, Source
from .library import open_library

WARM_UP_SIZE = 256
# Of a prompt that torch's attention computes: 64 rows are the least that it is used for (`decoder.py`). Its kernels are
# made for a number of heads' numbers, of which most models have one of two.
PROMPT_ROWS = 64
PROMPT_HEAD_DIMS = (64, 128)


def open_launcher(device: torch.device, folder: Path | None) -> tuple[Launcher, str]:
    """For this device, and in words what it launches. ImportError or OSError where there is nothing to launch."""
    major, minor = torch.cuda.get_device_capability(device)
    sources: list[Source] = []
    told: list[str] = []
    if folder is not None:
        library, found = open_library(folder, (major, minor))
        sources += [library] if library is not None else []
        told.append(found)
    if find_spec("triton") is not None:  # imported only if something is missing
        from .compile import Compiler

        sources.append(Compiler(major * 10 + minor))
        told.append("what is missing is compiled by Triton")
    if not sources:
        raise ImportError("; ".join([*told, "Triton is not installed"]))
    return BinaryLauncher(sources, Driver(device), device), "; ".join(told)


def warm_up(device: torch.device, dtype: torch.dtype, *, timeline: Timeline | None = None) -> None:
    """Blocks until all of it is done. Raises what the driver raises."""
    use_flash_attention()
    with span(timeline, "CUDA context"):
        _context(device)
    with span(timeline, "cuBLAS"):
        _products(device, dtype)
    with span(timeline, "a prompt's attention"):
        _prompt(device, dtype)


def use_flash_attention() -> None:
    """cuDNN's attention makes a plan for each new length of a prompt, 23 to 37 ms each: torch's own needs none."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def start_warm_up(
    device: torch.device, dtype: torch.dtype, *, timeline: Timeline | None = None
) -> threading.Thread:
    """The same in a thread of its own. A failure is left to whoever computes first, who meets it again."""

    def work() -> None:
        try:
            warm_up(device, dtype, timeline=timeline)
        except Exception as error:  # noqa: BLE001 - told on the timeline; nothing waits for this
            if timeline is not None:
                timeline.mark("device", "warm-up failed", error=str(error)[:200])

    thread = threading.Thread(target=work, name="teneral-warm-up", daemon=True)
    thread.start()
    return thread


def _context(device: torch.device) -> None:
    torch.cuda.set_device(device)
    torch.empty(1, device=device).zero_()
    torch.cuda.synchronize(device)


def _products(device: torch.device, dtype: torch.dtype) -> None:
    """Of many rows, of a short prompt's and of a single one, for which libraries use other code."""
    with torch.inference_mode():
        weight = torch.zeros((WARM_UP_SIZE, WARM_UP_SIZE), dtype=dtype, device=device)
        for num_rows in (WARM_UP_SIZE, PROMPT_ROWS, 1):
            torch.nn.functional.linear(weight[:num_rows], weight)
        torch.cuda.synchronize(device)


def _prompt(device: torch.device, dtype: torch.dtype) -> None:
    """As `DeviceStep` computes a whole prompt."""
    with torch.inference_mode():
        for head_dim in PROMPT_HEAD_DIMS:
            heads = torch.zeros((1, 6, PROMPT_ROWS, head_dim), dtype=dtype, device=device)
            queries, keys, values = heads.split_with_sizes([4, 1, 1], dim=1)
            torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=True
            )
        torch.cuda.synchronize(device)


def span(timeline: Timeline | None, name: str) -> AbstractContextManager[Any]:
    return nullcontext() if timeline is None else timeline.span("device", name)
