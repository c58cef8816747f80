"""Making a decoder faster beside the serving, once its weights are exact: its kernels, and what is packed.

Compiling takes seconds where nothing was compiled before, and milliseconds where it was: what numba has compiled it
keeps in a folder. Nobody waits for it: until the kernels are there torch computes everything, and where they cannot be
made it goes on doing so.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...loader.host import available_cores
from ...loader.timeline import Timeline
from ..models.quantized import QuantizedLinear
from .choice import SIZES, Figures, LinearBackend, covers, kernel_sizes
from .kinds import kind_of_layer, products_of

if TYPE_CHECKING:
    from ...loader.sources.base import Source
    from ..config import ServeConfig
    from ..models.decoder import Decoder
    from .decoder import DecoderKernels

MAX_COMPILE_S = 300.0
POLL_S = 0.1
QUIET_S, MAX_BUSY_S = 0.3, 5.0

logger = logging.getLogger(__name__)


def prepare_backends(
    decoder: Decoder,
    config: ServeConfig,
    source: Source,
    *,
    pool_bytes: int,
    is_awaited: Callable[[], bool],
    timeline: Timeline,
    ended: threading.Event,
) -> None:
    """Whatever makes this decoder faster than plain torch, as `config` has it: compiled kernels, and second copies of
    its weights (`prepack.py`) beside a KV pool of `pool_bytes`, whose memory may be promised more than taken. What
    `source` keeps of measurements is read when the first of them is due. Nothing begins while a first token
    `is_awaited`: those who woke this container are to have theirs before. Blocks; the weights must be exact.
    """
    _wait_until_quiet(is_awaited, ended)
    num_threads = config.threads or available_cores()
    kept = functools.cache(functools.partial(_read_kept, source, num_threads))
    layers = None
    if config.kernels:
        layers = prepare_kernels(decoder, num_threads=num_threads, timeline=timeline, ended=ended, kept=kept)
    if config.prepack_bytes and not ended.is_set():
        from .prepack import prepack  # few want it

        prepack(
            decoder,
            limit_bytes=config.prepack_bytes,
            num_threads=num_threads,
            reserved_bytes=pool_bytes + (config.kv_host_bytes or 0),
            layers=layers,
            kept=kept,
            timeline=timeline,
            ended=ended,
        )


def _wait_until_quiet(is_awaited: Callable[[], bool], ended: threading.Event) -> None:
    """Until nobody has waited for a while; not for ever, since all answers are faster afterwards."""
    begun_s = busy_s = time.monotonic()
    while (now_s := time.monotonic()) < min(busy_s + QUIET_S, begun_s + MAX_BUSY_S) and not ended.wait(
        POLL_S
    ):
        if is_awaited():
            busy_s = now_s


def _read_kept(source: Source, num_threads: int) -> Figures:
    from .tuning import Machine, read_figures  # nobody needs it before

    return read_figures(source, Machine.here(num_threads))


def prepare_kernels(
    decoder: Decoder,
    *,
    num_threads: int,
    timeline: Timeline,
    ended: threading.Event | None = None,
    kept: Callable[[], Figures] = dict,
) -> Figures | None:
    """Gives the decoder its kernels, and returns what a layer takes with them and without. None, and a word on the
    timeline, when it goes on without them.

    Blocks for as long as compiling takes, which `ended` cuts short; the weights must be exact. Where `kept` has figures
    of such layers nothing is measured.
    """
    ended = ended or threading.Event()
    with timeline.span("process", "compile kernels") as said:
        keep_somewhere()
        try:
            from .compile import missing
            from .decoder import DecoderKernels, NotCompiledError
        except ImportError:
            said["outcome"] = "numba is not installed: pip install 'teneral[cpu]'"
            return None
        try:
            kernels = DecoderKernels(decoder, num_threads=num_threads)
            compile_elsewhere(missing(kernels.kinds), ended)
            if ended.is_set():
                said["outcome"] = "the model was closed before"
                return None
            _try_expanding(decoder)
            # No step is computed with them yet, but from here on torch's products of integers are those that it will be
            # left with, so these are what is measured.
            kernels.install()
            layer = kind_of_layer(decoder.layers[0])
            figures = kept()
            is_kept = covers(figures, layer, SIZES, (LinearBackend.TORCH, LinearBackend.KERNELS))
            if is_kept:
                for num_rows in SIZES:
                    kernels.warm(num_rows)
            else:
                figures = {layer: measure_layer(kernels)}
            said["choice"] = "kept beside the model" if is_kept else "measured"
            for num_rows, times in figures[layer].items():
                kernels_ms, torch_ms = (
                    times[backend] / 1e6 for backend in (LinearBackend.KERNELS, LinearBackend.TORCH)
                )
                said[f"{num_rows} rows, ms a layer"] = f"{kernels_ms:.2f}, torch {torch_ms:.2f}"
        except NotCompiledError as error:
            decoder.kernels = None
            said["outcome"] = str(error)
            return None
        except Exception as error:  # of a compiler, on a processor that we may not know: torch can do it all
            logger.exception("the kernels could not be made; torch computes everything")
            decoder.kernels = None
            said["outcome"] = f"{type(error).__name__}: {error}"[:200]
            return None
        said["outcome"] = "used where they are faster"
        kernels.use_at(kernel_sizes(figures, layer))
        return {layer: figures[layer]}


def _try_expanding(decoder: Decoder) -> None:
    """Have what expands integers for torch's products compiled, or read from where it was kept, and fail here if it
    must: in a server's steps it is to do neither.
    """
    from .projection import Scratch, expander  # imports numba, which is there

    scratch = Scratch()
    linears = [each.linear for each in products_of(decoder)]
    integers = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    for linear in {(each.bits, each.scale.dtype, each.zero is None): each for each in integers}.values():
        expander(linear, scratch)(0, 1)


def measure_layer(kernels: DecoderKernels) -> dict[int, dict[LinearBackend, int]]:
    """What a layer takes, by number of rows."""
    times_ns = {}
    for num_rows in SIZES:
        kernels_s, torch_s = kernels.measure(num_rows)
        times_ns[num_rows] = {
            LinearBackend.KERNELS: max(1, int(kernels_s * 1e9)),
            LinearBackend.TORCH: max(1, int(torch_s * 1e9)),
        }
    return times_ns


def compile_elsewhere(kinds: list[str], ended: threading.Event) -> None:
    """In a process of its own, for compiling holds Python up; what fails there fails here, too, and is told then."""
    if kinds:
        command = [sys.executable, "-m", "teneral.runtime.kernels.compile", *kinds]
        none, give_up_s = subprocess.DEVNULL, time.monotonic() + MAX_COMPILE_S
        with subprocess.Popen(command, stdin=none, stdout=none, stderr=none) as process:
            while process.poll() is None:
                if ended.wait(POLL_S) or time.monotonic() > give_up_s:
                    process.kill()
                    break


def keep_somewhere() -> None:
    """Give numba a folder that it may write to: without one it compiles nothing, and reads nothing that it once kept.
    And have it start OpenMP's threads, if there are any (`_prefer_openmp`).

    What an image brings along (`NUMBA_CACHE_DIR`) is copied if it cannot be written to: some MiB.
    """
    _prefer_openmp()
    brought = os.environ.get("NUMBA_CACHE_DIR")
    here = Path(__file__).parent
    beside_the_source = here / "__pycache__"
    place = Path(brought or (beside_the_source if beside_the_source.exists() else here))
    if os.access(place, os.W_OK) or (brought and not place.exists()):
        return
    own = tempfile.mkdtemp(prefix="teneral-kernels-")
    if brought:
        shutil.copytree(place, own, dirs_exist_ok=True)
        for folder in (Path(own), *(each for each in Path(own).rglob("*") if each.is_dir())):
            folder.chmod(0o700)  # copied, too: that it could not be written to
    os.environ["NUMBA_CACHE_DIR"] = own


def _prefer_openmp() -> None:
    """Else numba takes TBB's threads where it finds some, as OpenVINO brings them along: of those a kernel's team does
    not come together.
    """
    order = os.environ.setdefault("NUMBA_THREADING_LAYER_PRIORITY", "omp tbb workqueue").split()
    config = getattr(sys.modules.get("numba"), "config", None)
    if config is not None:  # it has read the environment already
        config.THREADING_LAYER_PRIORITY = order
