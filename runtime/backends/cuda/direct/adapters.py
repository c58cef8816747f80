"""Low-rank adapters on the device: their copies, the tables that rows find them by, and their launches.

An adapter in use has a slot, and a copy of its arrays, layer by layer as they are needed. What is
least recently used leaves for others; what is freed on the host is freed here before the next step
with adapters. So copies never take more than what bounds adapters on the host, but for padding. All
copies are queued on the device's stream.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from .....loader.device.driver.base import KernelLaunch
from ....models.adapter import MAX_RANK, Adapter, AdapterPlace, AdapterSite, AdapterWeights
from ....step.batch import SequenceSpan
from ....tensors import Tensor
from . import arguments
from .device import DirectDevice
from .memory import ALIGNMENT_BYTES, Array
from .products import WEIGHT_KINDS
from .program import Kernels
from .sources import ROWS

NO_ADAPTER = 0xFFFFFFFF
SITE_PARTS = 3  # queries, keys and values
_LOW_STRIDE = SITE_PARTS * MAX_RANK
_LOW_BLOCKS, _LOW_THREADS, _THREADS = 8, 128, 256


class _Copy:
    """One adapter's arrays on the device."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.address = 0  # none
        self.size_bytes = 0
        self.layers: set[int] = set()  # that are there
        self.offsets: list[int] = []  # of each layer, from the address


class DeviceAdapters:
    """The adapters of one executor. Not thread-safe; `close` frees all."""

    def __init__(self, device: DirectDevice, num_layers: int, *, num_slots: int, num_rows: int) -> None:
        """Raises `CudaError` where the memory is not there."""
        self._device = device
        self._num_slots = num_slots
        self._num_sites = num_layers * len(AdapterPlace)
        self._copies: OrderedDict[weakref.ref[Adapter], _Copy] = OrderedDict()  # the one used last is last
        self._taken: list[int] = []
        self.size_bytes = 0  # of tables, low numbers and copies
        sizes = self.table_bytes(num_layers, num_slots=num_slots, num_rows=num_rows)
        self._sites, self._parts, self._low = map(self._take, sizes)

    @staticmethod
    def table_bytes(num_layers: int, *, num_slots: int, num_rows: int) -> tuple[int, int, int]:
        """The memory besides copies: of sites, of their parts, and of low numbers."""
        num = num_slots * num_layers * len(AdapterPlace)
        size_bytes, part_bytes = map(
            ctypes.sizeof, (arguments.DeviceAdapterSite, arguments.DeviceAdapterPart)
        )
        return num * size_bytes, num * SITE_PARTS * part_bytes, 4 * num_rows * _LOW_STRIDE

    def slots(self, spans: Iterable[SequenceSpan]) -> list[int]:
        """The slot of each span's adapter, NO_ADAPTER of those without. Their content may be missing."""
        self._free([ref for ref in self._copies if ref() is None])
        adapters = [span.adapter for span in spans]
        for adapter in adapters:  # none of the step's own leaves for another of them
            if adapter is not None and weakref.ref(adapter) in self._copies:
                self._copies.move_to_end(weakref.ref(adapter))
        return [NO_ADAPTER if each is None else self._copy_of(weakref.ref(each)).slot for each in adapters]

    def upload(self, spans: Iterable[SequenceSpan], first: int, end: int) -> None:
        """Have the layers [first, end) of these spans' adapters on the device; they are open. Blocks if some are
        missing there. Raises `CudaError`.
        """
        for adapter in dict.fromkeys(span.adapter for span in spans if span.adapter is not None):
            copy = self._copies[weakref.ref(adapter)]
            for layer in range(first, end):
                if layer not in copy.layers:
                    self._upload(copy, adapter.weights, layer)

    def drop(self) -> None:
        """Free all copies; they are made again as steps need them. No step may run."""
        self._free(list(self._copies))

    def close(self) -> None:
        self.drop()
        for address in self._taken:
            self._device.driver.free(address)
        self._taken.clear()

    def launches(
        self, kernels: Kernels, slots: int, x: Array, out: Array, counts: Array, bucket: int, site: int
    ) -> list[KernelLaunch]:
        """Add to the rows of `out` what adapters make of those of x, at this site of `AdapterPlace`s of layers; `slots`
        (rows,) is an address.
        """
        adapt = arguments.Adapt(
            sites=self._sites,
            parts=self._parts,
            slots=slots,
            x=x.address,
            low=self._low,
            out=out.address,
            counts=counts.address,
            num_sites=self._num_sites,
            site=site,
            num_in=x.shape[1],
            num_out=out.shape[1],
            low_stride=_LOW_STRIDE,
        )
        columns = -(-out.shape[1] // _THREADS)
        return [
            kernels.launch(ROWS, "adapter_low", (bucket, _LOW_BLOCKS), _LOW_THREADS, adapt),
            kernels.launch(ROWS, "adapter_add", (bucket, columns), _THREADS, adapt),
        ]

    def _take(self, size_bytes: int) -> int:
        self._taken.append(self._device.driver.alloc(size_bytes))
        self.size_bytes += size_bytes
        return self._taken[-1]

    def _copy_of(self, ref: weakref.ref[Adapter]) -> _Copy:
        """The copy, which is empty if there was none; then the one used longest ago makes room."""
        found = self._copies.get(ref)
        if found is None:
            if len(self._copies) == self._num_slots:
                self._free([next(iter(self._copies))])
            free = set(range(self._num_slots)) - {copy.slot for copy in self._copies.values()}
            found = self._copies[ref] = _Copy(min(free))
        return found

    def _free(self, refs: Sequence[weakref.ref[Adapter]]) -> None:
        if refs:
            self._device.driver.synchronize_stream(self._device.stream)
        for ref in refs:
            copy = self._copies.pop(ref)
            if copy.address:
                self._device.driver.free(copy.address)
                self.size_bytes -= copy.size_bytes

    def _upload(self, copy: _Copy, weights: AdapterWeights, layer: int) -> None:
        """The layer's arrays, and its rows of the tables."""
        if not copy.address:
            sizes = [_size_of(sites.values()) for sites in weights.layers]
            copy.offsets = [sum(sizes[:number]) for number in range(len(sizes))]
            copy.size_bytes = max(1, sum(sizes))
            copy.address = self._device.driver.alloc(copy.size_bytes)
            self.size_bytes += copy.size_bytes
        num = len(AdapterPlace)
        sites = (arguments.DeviceAdapterSite * num)()
        parts = (arguments.DeviceAdapterPart * (num * SITE_PARTS))()
        address = copy.address + copy.offsets[layer]
        for place, site in weights.layers[layer].items():
            assert len(site.parts) <= SITE_PARTS
            sites[place] = arguments.DeviceAdapterSite(
                a=address,
                num_low=site.a.shape[0],
                num_parts=len(site.parts),
                a_kind=WEIGHT_KINDS[site.a.dtype],
                b_kind=WEIGHT_KINDS[site.parts[0].b.dtype],
            )
            address = self._put(site.a, address)
            for number, part in enumerate(site.parts):
                parts[place * SITE_PARTS + number] = arguments.DeviceAdapterPart(
                    b=address, first=part.first, num_out=part.num_out, rank=part.rank, factor=part.factor
                )
                address = self._put(part.b, address)
        first = copy.slot * self._num_sites + layer * num
        for table, rows in ((self._sites, sites), (self._parts, parts)):
            size_bytes = ctypes.sizeof(rows)
            self._copy_in(table + first * size_bytes // num, ctypes.addressof(rows), size_bytes)
        self._device.driver.synchronize_stream(self._device.stream)  # before what was read may be freed
        copy.layers.add(layer)

    def _put(self, tensor: Tensor, address: int) -> int:
        """Returns the next address."""
        array = tensor.array
        assert array.flags.c_contiguous
        self._copy_in(address, array.ctypes.data, array.nbytes)
        return address + _padded(array.nbytes)

    def _copy_in(self, to: int, source: int, size_bytes: int) -> None:
        self._device.driver.copy_in(to, source, size_bytes, self._device.stream)


def _size_of(sites: Iterable[AdapterSite]) -> int:
    tensors = [tensor for site in sites for tensor in (site.a, *(part.b for part in site.parts))]
    return sum(_padded(tensor.size_bytes) for tensor in tensors)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
