"""Adapters as the core's records of addresses, and a step some of whose rows have them.

The records are checked against the library when the first adapter comes, so that a server without adapters needs
nothing of this.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ....loader.native.library import fields
from ...models.adapter import Adapter, AdapterPlace, AdapterSite, AdapterWeights
from ...step.batch import SequenceSpan
from . import arrays, records
from .products import MatrixRecord, Weight

if TYPE_CHECKING:
    from ....loader.native.library import Library

MAX_RUN_ROWS = 64  # of a chunk: a prompt's rows are several, which threads share

_POINTER, _INT64, _INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class AdapterPartRecord(ctypes.Structure):
    """`tn_adapter_part`"""

    _fields_ = (
        ("b", _POINTER),
        *fields(_INT64, "first num_out rank"),
        ("factor", ctypes.c_float),
        ("dtype", _INT32),
    )


class AdapterSiteRecord(ctypes.Structure):
    """`tn_adapter_site`"""

    _fields_ = (("a", MatrixRecord), ("parts", ctypes.POINTER(AdapterPartRecord)), ("num_parts", _INT64))


class AdapterLayer(ctypes.Structure):
    """`tn_adapter_layer`"""

    _fields_ = (("sites", AdapterSiteRecord * len(AdapterPlace)),)


class AdapterRun(ctypes.Structure):
    """`tn_adapter_run`"""

    _fields_ = (("layers", ctypes.POINTER(AdapterLayer)), ("start", _INT64), ("length", _INT64))


class AdaptedStepArgs(ctypes.Structure):
    """`tn_adapted_step_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("step", ctypes.POINTER(records.DecoderStepArgs)),
        ("runs", ctypes.POINTER(AdapterRun)),
        ("low", _POINTER),
        *fields(_INT64, "num_runs low_stride"),
    )


STRUCTS: Mapping[str, type[ctypes.Structure]] = {
    "tn_adapter_part": AdapterPartRecord,
    "tn_adapter_site": AdapterSiteRecord,
    "tn_adapter_layer": AdapterLayer,
    "tn_adapter_run": AdapterRun,
    "tn_adapted_step_args": AdaptedStepArgs,
}


class AdapterRecords:
    """One adapter's records. Keeps its arrays, whose content may be missing."""

    def __init__(self, weights: AdapterWeights) -> None:
        self.layers = (AdapterLayer * len(weights.layers))()
        self.low_stride = weights.max_low
        self._kept: list[object] = [weights]
        for layer, sites in zip(self.layers, weights.layers, strict=True):
            for place, site in sites.items():
                layer.sites[place] = self._site(site)

    def _site(self, site: AdapterSite) -> AdapterSiteRecord:
        a = Weight(site.a.array)
        parts = (AdapterPartRecord * len(site.parts))(
            *(
                AdapterPartRecord(
                    b=arrays.address(part.b.array),
                    first=part.first,
                    num_out=part.num_out,
                    rank=part.rank,
                    factor=part.factor,
                    dtype=arrays.dtype_of(part.b.array),
                )
                for part in site.parts
            )
        )
        self._kept += [a, parts]
        return AdapterSiteRecord(a.record, parts, len(parts))


class StepRuns:
    """The rows of a step that have adapters."""

    def __init__(self, found: Sequence[tuple[AdapterRecords, int, int]]) -> None:
        self.low_stride = max(records.low_stride for records, _, _ in found)
        self.num = len(found)
        self.records = (AdapterRun * len(found))(
            *(AdapterRun(records.layers, start, length) for records, start, length in found)
        )
        self._kept = [records for records, _, _ in found]


class AdaptedSteps:
    """`tn_adapted_decoder_step` of one library, and the records of the adapters in use. One thread at a time."""

    def __init__(self, library: Library) -> None:
        """Raises `NativeLibraryError` where the library was built from other declarations."""
        for name, declared in STRUCTS.items():
            library.check_struct(name, declared)
        self._step = library.functions.tn_adapted_decoder_step
        self._step.argtypes = [ctypes.POINTER(AdaptedStepArgs)]
        self._records: weakref.WeakKeyDictionary[Adapter, AdapterRecords] = weakref.WeakKeyDictionary()
        self._low = arrays.NativeScratch()

    def runs(self, spans: Sequence[SequenceSpan]) -> StepRuns:
        """Neighbouring rows of one adapter are one run, up to a bound. At least one of the spans has one."""
        found: list[tuple[AdapterRecords, int, int]] = []
        for span in spans:
            if span.adapter is None:
                continue
            own = self._of(span.adapter)
            if found and found[-1][0] is own and sum(found[-1][1:]) == span.start:
                last = found.pop()
                start, end = last[1], span.start + span.length
            else:
                start, end = span.start, span.start + span.length
            found += [
                (own, first, min(MAX_RUN_ROWS, end - first)) for first in range(start, end, MAX_RUN_ROWS)
            ]
        return StepRuns(found)

    def call(self, step: records.DecoderStepArgs, runs: StepRuns, num_rows: int) -> None:
        """The layers of this step, whose arguments the caller has checked."""
        step.size = ctypes.sizeof(step)
        args = AdaptedStepArgs(
            size=ctypes.sizeof(AdaptedStepArgs),
            step=ctypes.pointer(step),
            runs=runs.records,
            low=self._low.address_of(4 * num_rows * runs.low_stride),
            num_runs=runs.num,
            low_stride=runs.low_stride,
        )
        status = self._step(ctypes.byref(args))
        assert status == 0, f"tn_adapted_decoder_step refused: {status}"

    def _of(self, adapter: Adapter) -> AdapterRecords:
        found = self._records.get(adapter)
        if found is None:
            found = self._records[adapter] = AdapterRecords(adapter.weights)
        return found
