"""Making a decoder's kernels beside the serving, once its weights are exact.

Compiling takes seconds where nothing was compiled before, and milliseconds where it was: what numba has compiled it
keeps in a folder. Nobody waits for it: until the kernels are there torch computes everything, and where they cannot be
made it goes on doing so.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...loader.timeline import Timeline

if TYPE_CHECKING:
    from ..models.decoder import Decoder

MAX_COMPILE_S = 300.0
POLL_S = 0.1

logger = logging.getLogger(__name__)


def prepare_kernels(
    decoder: Decoder, *, num_threads: int, timeline: Timeline, ended: threading.Event | None = None
) -> bool:
    """Gives the decoder its kernels. False, and a word on the timeline, when it goes on without them.

    Blocks for as long as compiling takes, which `ended` cuts short; the weights must be exact.
    """
    ended = ended or threading.Event()
    with timeline.span("process", "compile kernels") as said:
        _keep_somewhere()
        try:
            from .compile import missing
            from .decoder import SIZES, DecoderKernels, NotCompiledError
        except ImportError:
            said["outcome"] = "numba is not installed: pip install 'teneral[cpu]'"
            return False
        try:
            kernels = DecoderKernels(decoder, num_threads=num_threads)
            _compile_elsewhere(missing(kernels.kinds), ended)
            if ended.is_set():
                said["outcome"] = "the model was closed before"
                return False
            for num_rows in SIZES:
                kernels_s, torch_s = kernels.measure(num_rows)
                said[f"{num_rows} rows, ms a layer"] = f"{kernels_s * 1e3:.2f}, torch {torch_s * 1e3:.2f}"
        except NotCompiledError as error:
            said["outcome"] = str(error)
            return False
        except Exception as error:  # of a compiler, on a processor that we may not know: torch can do it all
            logger.exception("the kernels could not be made; torch computes everything")
            said["outcome"] = f"{type(error).__name__}: {error}"[:200]
            return False
        said["outcome"] = "used where they are faster"
        kernels.install()
        return True


def _compile_elsewhere(kinds: list[str], ended: threading.Event) -> None:
    """In a process of its own, for compiling holds Python up; what fails there fails here, too, and is told then."""
    if kinds:
        command = [sys.executable, "-m", "teneral.runtime.kernels.compile", *kinds]
        none, give_up_s = subprocess.DEVNULL, time.monotonic() + MAX_COMPILE_S
        with subprocess.Popen(command, stdin=none, stdout=none, stderr=none) as process:
            while process.poll() is None:
                if ended.wait(POLL_S) or time.monotonic() > give_up_s:
                    process.kill()
                    break


def _keep_somewhere() -> None:
    """Give numba a folder that it may write to: without one it compiles nothing, and reads nothing that it once kept.

    What an image brings along (`NUMBA_CACHE_DIR`) is copied if it cannot be written to: some MiB.
    """
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
