"""A device's one-time preparations, which run while weights are loading.

Each takes from milliseconds to seconds, needs no weight, and has a span of its own on the timeline:
the context, cuBLAS with its workspace; and, once the model is known, the kernels' binaries, or the
compiler in their place.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ....loader.timeline import Timeline
from .launch import BinaryLauncher, BinarySource, Driver, Launcher
from .library import open_library

WARM_UP_SIZE = 256
# Rows of a prompt that torch's attention computes: 64 is the minimum for it (`decoder.py`). Its
# kernels depend on head_dim, which is one of two values in most models.
PROMPT_ROWS = 64
PROMPT_HEAD_DIMS = (64, 128)


def open_launcher(device: torch.device, folder: Path | None) -> tuple[Launcher, str]:
    """The launcher for this device, and a description of its binaries for logs.

    Raises ImportError or OSError without any source of kernels.
    """
    major, minor = torch.cuda.get_device_capability(device)
    sources: list[BinarySource] = []
    descriptions: list[str] = []
    if folder is not None:
        library, found = open_library(folder, (major, minor))
        sources += [library] if library is not None else []
        descriptions.append(found)
    if find_spec("triton") is not None:  # imported only if a binary is missing
        from .compile import Compiler

        sources.append(Compiler(major * 10 + minor))
        descriptions.append("Triton compiles missing kernels")
    if not sources:
        raise ImportError("; ".join([*descriptions, "Triton is not installed"]))
    return BinaryLauncher(sources, Driver(device), device), "; ".join(descriptions)


def warm_up(device: torch.device, dtype: torch.dtype, *, timeline: Timeline | None = None) -> None:
    """Prepare the device. Blocks until done. Raises the driver's errors."""
    use_flash_attention()
    with span(timeline, "CUDA context"):
        _context(device)
    with span(timeline, "cuBLAS"):
        _products(device, dtype)
    with span(timeline, "a prompt's attention"):
        _prompt(device, dtype)


def use_flash_attention() -> None:
    """Prefer torch's own attention to cuDNN's, which makes a plan for each new prompt length, 23 to
    37 ms each.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def start_warm_up(
    device: torch.device, dtype: torch.dtype, *, timeline: Timeline | None = None
) -> threading.Thread:
    """Run `warm_up` in a thread of its own. Its errors are ignored: the first computation meets
    them again.
    """

    def work() -> None:
        try:
            warm_up(device, dtype, timeline=timeline)
        except Exception as error:  # noqa: BLE001 - recorded on the timeline; no thread waits for this one
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
    """Products of many rows, of a short prompt's and of a single one, for which libraries use
    different code.
    """
    with torch.inference_mode():
        weight = torch.zeros((WARM_UP_SIZE, WARM_UP_SIZE), dtype=dtype, device=device)
        for num_rows in (WARM_UP_SIZE, PROMPT_ROWS, 1):
            torch.nn.functional.linear(weight[:num_rows], weight)
        torch.cuda.synchronize(device)


def _prompt(device: torch.device, dtype: torch.dtype) -> None:
    """A whole prompt's attention, as in `DeviceStep`."""
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
