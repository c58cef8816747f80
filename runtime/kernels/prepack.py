"""Second copies of a decoder's weights, made beside the serving (`copies.py`): where they pay, as far as memory allows.

They are made one product after the other, by a thread that lets whoever serves go first, and are handed to the decoder
to be taken between two of its steps. The weights themselves stay where they are, and must be exact by now.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ...loader.memory import available_bytes
from ...loader.timeline import Timeline
from ..models.packed import Copy
from .choice import (
    CopyChoice,
    Figures,
    LinearBackend,
    Times,
    choose_copies,
    covers,
    kernel_sizes,
    table_of,
)
from .copies import EXACT, ROUNDING, Libraries
from .kinds import kind_of_layer, products_of_layer
from .packing import Packing

if TYPE_CHECKING:
    from ..models.decoder import Decoder

NICENESS = 10
CLOSED = "the model was closed before"
BY_KERNELS = "compiled kernels compute it"

logger = logging.getLogger(__name__)


def prepack(
    decoder: Decoder,
    *,
    limit_bytes: int,
    num_threads: int,
    reserved_bytes: int = 0,
    layers: Figures | None = None,
    kept: Callable[[], Figures] = dict,
    timeline: Timeline,
    ended: threading.Event,
    exact: Libraries = EXACT,
    rounding: Libraries = ROUNDING,
) -> None:
    """Gives the decoder copies of its weights where products over them are faster and there is room; the timeline says
    what came of it, and which library was left out and why.

    Blocks for as long as it takes, which `ended` cuts short, and leaves this thread with a low priority. `layers` is
    what is known of the decoder's compiled kernels, if it has any: where they are the faster ones no copies are needed,
    and they step back where these are faster. `kept` is what was measured before, asked for once. What is made
    computes in `num_threads` threads.
    """
    with timeline.span("process", "pack weights") as said:
        try:
            packing = Packing(
                decoder,
                limit_bytes=limit_bytes,
                num_threads=num_threads,
                reserved_bytes=reserved_bytes,
                free_bytes=available_bytes,
                exact=exact,
                rounding=rounding,
            )
            if not packing.candidates:
                said["outcome"] = "there is nothing that could be packed here"
                return
            said["outcome"] = _Prepacking(decoder, packing, said, ended).run(layers or {}, kept())
        except Exception as error:  # of libraries that we may not know, without which all goes on as before
            logger.exception("weights could not be packed; they are used as they lie")
            said["outcome"] = f"{type(error).__name__}: {error}"[:200]


class _Prepacking:
    """What is known while it is done, and told."""

    def __init__(
        self, decoder: Decoder, packing: Packing, said: dict[str, object], ended: threading.Event
    ) -> None:
        self._decoder = decoder
        self._packing = packing
        self._said = said
        self._ended = ended
        self._layer = kind_of_layer(decoder.layers[0])
        self._parts = [product.kind for product in products_of_layer(decoder, decoder.layers[0])]

    def run(self, layers: Figures, kept: Figures) -> str:
        """Returns the outcome."""
        packing, said = self._packing, self._said
        figures = self._figures(layers, kept)
        choices = self._choices(figures)
        if self._ended.is_set():
            return CLOSED
        wanted = [number for number, product in enumerate(packing.products) if product.kind in choices]
        # Threads that a library starts with a copy have the priority of who makes it, and keep it: those copies come
        # first, at a thread's usual priority.
        by_pausing = [
            number
            for number in wanted
            if packing.starts_threads(choices[packing.products[number].kind].backend)
        ]
        copied = list(self._copy(by_pausing, choices, pausing=True))
        _stand_back()
        copied += self._copy([number for number in wanted if number not in by_pausing], choices)
        self._tell(choices)
        said["packed"] = f"{len(copied)} of {len(packing.products)} products"
        said["bytes"] = packing.num_bytes
        if self._ended.is_set():
            return CLOSED
        if self._decoder.kernels is not None and copied:
            share = len(copied) / len(wanted)
            left = kernel_sizes(figures, self._layer, self._parts, choices, copied_share=share)
            self._decoder.kernels.keep_to(left)
        if len(copied) < len(wanted):
            return "used where they are faster, as far as there is room"
        return "used where they are faster" if copied else "they would gain nothing here, or do not fit"

    def _figures(self, layers: Figures, kept: Figures) -> Figures:
        """What there is to choose by: `layers`, and of all products what is kept or else is measured now."""
        packing = self._packing
        figures = dict(layers)
        for kind, backends in packing.candidates.items():
            if self._ended.is_set():
                break
            sizes = packing.sizes[kind]
            if set(sizes) <= kernel_sizes(layers, self._layer):
                self._said[kind] = BY_KERNELS
                continue
            is_kept = any(covers(kept, kind, sizes, (LinearBackend.TORCH, backend)) for backend in backends)
            figures[kind] = kept[kind] if is_kept else packing.measure(kind)
            how = "kept beside the model" if is_kept else "measured"
            self._said[kind] = f"{_told(figures[kind])} ({how})"
        return figures

    def _choices(self, figures: Figures) -> dict[str, CopyChoice]:
        """The copies that gain most, of those whose products are what they must be."""
        packing = self._packing
        candidates = {
            kind: list(backends) for kind, backends in packing.candidates.items() if kind in figures
        }
        choices: dict[str, CopyChoice] = {}
        accepted: dict[str, CopyChoice] = {}
        while not self._ended.is_set():
            choices = choose_copies(figures, self._layer, self._parts, candidates)
            unknown = [kind for kind, choice in choices.items() if accepted.get(kind) != choice]
            if not unknown:
                break
            for kind in unknown:
                choice = choices[kind]
                packing.forget(kind, but=choice.backend)
                if packing.accepts(kind, choice.backend, choice.sizes):
                    accepted[kind] = choice
                else:
                    candidates[kind].remove(choice.backend)
        for kind in packing.candidates:
            packing.forget(kind, but=choices[kind].backend if kind in choices else None)
        return choices

    def _copy(
        self, numbers: list[int], choices: Mapping[str, CopyChoice], *, pausing: bool = False
    ) -> Iterator[int]:
        """Make copies of these products and hand them over, and with `pausing` rest after each for as long as it took;
        the numbers of those that fit.
        """
        tables = {kind: table_of(choice.sizes) for kind, choice in choices.items()}
        for number in numbers:
            if self._ended.is_set():
                return
            kind, linear = self._packing.products[number][:2]
            start_s = time.monotonic()
            compute = self._packing.make(number, choices[kind].backend)
            if compute is not None:
                copy = Copy(compute, tables[kind])
                self._decoder.between_steps(partial(setattr, linear, "packed", copy))
                yield number
            if pausing:
                self._ended.wait(time.monotonic() - start_s)

    def _tell(self, choices: Mapping[str, CopyChoice]) -> None:
        """Of what was chosen, and of who was left out."""
        for kind, choice in choices.items():
            sizes = ", ".join(map(str, sorted(choice.sizes)))
            self._said[f"{kind}: chosen"] = f"{choice.backend} for {sizes} rows"
        for (kind, backend), why in self._packing.left_out.items():
            self._said[f"{kind}: {backend}"] = f"left out: {why}"


def _told(by_size: Mapping[int, Times]) -> str:
    """The gains of each copy."""
    gains: dict[LinearBackend, list[str]] = {}
    for size, times in by_size.items():
        for backend, time_ns in times.items():
            if backend is not LinearBackend.TORCH:
                gain = times[LinearBackend.TORCH] / time_ns
                gains.setdefault(backend, []).append(f"{size} rows {gain:.2f}x")
    return (
        "; ".join(f"{backend} {', '.join(each)}" for backend, each in gains.items())
        or "no copy fits, or computes"
    )


def _stand_back() -> None:
    """Let whoever serves go first. Linux has priorities for single threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
