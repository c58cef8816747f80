"""The contract of every device, tried on each kind: the simulated one everywhere, CUDA where there
is one.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
from tests.support.artifacts import build_artifact
from tests.support.cupy_on_cpu import NAMES, CupyOnCpu, ZstdOnCpu
from tests.support.device_parts import CodedTensors, code_tensors, weights_like
from tests.support.kernels_on_cpu import KernelsOnCpu, compiler
from tests.support.simulated_device import SimulatedDevice

from teneral.loader.device import ring as device_pieces
from teneral.loader.device.base import Device, Placed, Ticket
from teneral.loader.device.image import PartImage, plan_image, slab_starts
from teneral.loader.device.sink import fill_image
from teneral.loader.errors import InsufficientMemoryError, LoadError
from teneral.loader.format.manifest import FRAME_ELEMENTS, Part, Tier, align
from teneral.loader.load.device_load import DeviceLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.memory.arena import map_bytes
from teneral.loader.timeline import Timeline

RING_BYTES = 4 << 20
HAS_CUDA = os.path.exists("/dev/nvidiactl")


class Bench(Protocol):
    """A device, and a reader that computes on a stream of its own."""

    device: Device

    def stream(self) -> int: ...

    def read(self, stream: int, begin: int, end: int) -> Callable[[], np.ndarray]:
        """Launch a read of the weights on the stream; gives what waits for it and returns what was read."""

    def busy(self, stream: int) -> Callable[[], None]:
        """Keep the stream busy until the function that this gives is called, or for long."""

    def close(self) -> None: ...


class SimulatedBench:
    def __init__(self) -> None:
        self.device = SimulatedDevice(memory_bytes=1 << 30, decompresses=True)

    def stream(self) -> int:
        return self.device.new_stream()

    def read(self, stream: int, begin: int, end: int) -> Callable[[], np.ndarray]:
        out = np.empty(end - begin, np.uint8)
        self.device.launch(stream, lambda: np.copyto(out, self.device.weights()[begin:end]))
        done = self.device.record(stream)
        return lambda: (done.wait(), out)[1]

    def busy(self, stream: int) -> Callable[[], None]:
        free = threading.Event()
        self.device.launch(stream, lambda: (free.wait(), None)[1])
        return free.set

    def close(self) -> None:
        self.device.close()


class CudaOnCpuBench:
    """The code for CUDA, every line of it, with a CuPy that is none."""

    def __init__(self, *, pins: bool = True, decompresses: bool = True, max_percent: int = 100) -> None:
        from teneral.loader.device import cuda

        self.cupy = CupyOnCpu(_kernels_on_cpu(), pins=pins)
        decompressor = ZstdOnCpu(self.cupy, fails=not decompresses)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "cupy", self.cupy)
            patch.setattr(cuda, "_find_decompressor", lambda timeline: decompressor)
            patch.setattr(cuda, "cubin_for", lambda architecture, folders: ("kernels.cubin", False))
            self.device = cuda.CudaDevice(0, timeline=Timeline(), max_percent=max_percent)

    def stream(self) -> int:
        return self.cupy.new_stream()

    def read(self, stream: int, begin: int, end: int) -> Callable[[], np.ndarray]:
        out, done = np.empty(end - begin, np.uint8), threading.Event()
        weights = self.device.weights()
        self.cupy.launch(stream, lambda: (np.copyto(out, weights[begin:end]), done.set())[0])
        return lambda: (done.wait(), out)[1]

    def busy(self, stream: int) -> Callable[[], None]:
        free = threading.Event()
        self.cupy.launch(stream, lambda: (free.wait(), None)[1])
        return free.set

    def close(self) -> None:
        self.device.close()
        assert not self.cupy.pinned, "pages are left pinned"
        self.cupy.close()


@functools.cache
def _kernels_on_cpu() -> KernelsOnCpu:
    if compiler() is None:
        pytest.skip("there is no C++ compiler to run the kernels' source on the CPU with")
    with tempfile.TemporaryDirectory() as folder:  # the library stays loaded
        return KernelsOnCpu(Path(folder))


class CudaBench:
    def __init__(self) -> None:
        import cupy

        from teneral.loader.device.cuda import CudaDevice

        self.cupy = cupy
        self.device = CudaDevice(0, timeline=Timeline())
        self.streams: list[Any] = []

    def stream(self) -> int:
        self.streams.append(self.cupy.cuda.Stream(non_blocking=True))
        return int(self.streams[-1].ptr)

    def read(self, stream: int, begin: int, end: int) -> Callable[[], np.ndarray]:
        mine = next(each for each in self.streams if each.ptr == stream)
        with mine:
            copied = self.device.weights()[begin:end].copy()
        return lambda: (mine.synchronize(), copied.get())[1]

    def busy(self, stream: int) -> Callable[[], None]:
        spin = self.cupy.RawKernel(
            'extern "C" __global__ void spin(long long n) { long long b = clock64(); while (clock64() - b < n); }',
            "spin",
        )
        with next(each for each in self.streams if each.ptr == stream):
            spin((1,), (1,), (np.int64(2_000_000_000),))  # a second
        return lambda: None

    def close(self) -> None:
        self.device.close()


@pytest.fixture(
    params=[
        pytest.param(SimulatedBench, id="simulated"),
        pytest.param(CudaOnCpuBench, id="cuda on cpu"),
        pytest.param(
            CudaBench,
            id="cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="there is no CUDA device")],
        ),
    ]
)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = request.param()
    yield made
    made.close()


class Loaded:
    """Coded tensors, and a device that has room for them."""

    def __init__(self, device: Device, coded: CodedTensors) -> None:
        self.device, self.coded = device, coded
        self.starts, self.weights_bytes = slab_starts(coded.manifest.groups)
        self.ring = map_bytes(RING_BYTES, what="a test's ring")
        self.at = 0
        device.reserve(self.weights_bytes, self.ring)

    def fill(self, part: Part, *, coded: bool = False) -> tuple[PartImage, int]:
        image = plan_image(self.coded.manifest, part, self.starts, coded=coded)
        begin, self.at = self.at, self.at + align(image.size_bytes, 4096)
        assert self.at <= RING_BYTES
        stored = memoryview(self.coded.stored[part.index])
        fill_image(
            image, self.coded.manifest, part, self.starts, stored, self.ring[begin : begin + image.size_bytes]
        )
        return image, begin

    def place(self, tier: Tier, after: tuple[Ticket, ...] = (), *, coded: bool = False) -> Ticket:
        """The tier's one part."""
        part = next(part for part in self.coded.manifest.parts if part.tier is tier)
        return self.device.place([Placed(*self.fill(part, coded=coded))], after)


MIXED = {
    "q": ("BF16", "bf16.3", weights_like("BF16", 2 * FRAME_ELEMENTS + 1001)),
    "norm": ("BF16", "whole", weights_like("BF16", 777)),
    "half": ("F16", "f16.3", weights_like("F16", FRAME_ELEMENTS + 13)),
    "codes": ("I8", "bytes", weights_like("I8", 70_000)),
    "steps": ("I64", "bytes", weights_like("I64", 999)),
}
WITH_SKETCH = {
    "q": ("BF16", "bf16.1.4", weights_like("BF16", FRAME_ELEMENTS + 1001)),
    "norm": ("F32", "whole.sketch", weights_like("F32", 777)),
}


@pytest.mark.parametrize("tensors", [MIXED, WITH_SKETCH], ids=["two tiers", "three tiers"])
def test_weights_are_what_the_decoder_makes_of_them_tier_by_tier(
    bench: Bench, tensors: dict[str, Any]
) -> None:
    loaded = Loaded(bench.device, code_tensors(tensors))
    for part in loaded.coded.manifest.parts:
        loaded.place(part.tier).wait()
        got = bench.device.read_back(0, loaded.weights_bytes)
        for tensor in loaded.coded.manifest.tensors:  # bytes between them belong to no tensor
            stretch = slice(tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes)
            if tensor.encoding.tiers[0] <= part.tier:
                assert np.array_equal(got[stretch], loaded.coded.expected(part.tier)[stretch]), tensor.name


@pytest.mark.parametrize("tensors", [MIXED, WITH_SKETCH], ids=["two tiers", "three tiers"])
def test_what_the_device_decompresses_is_the_same(bench: Bench, tensors: dict[str, Any]) -> None:
    if not bench.device.decompresses:
        pytest.skip("the device does not decompress: nvCOMP is not installed")
    loaded = Loaded(bench.device, code_tensors(tensors))
    for part in loaded.coded.manifest.parts:
        image, host_image = (
            plan_image(loaded.coded.manifest, part, loaded.starts, coded=coded) for coded in (True, False)
        )
        is_first = part.tier is loaded.coded.manifest.parts[0].tier  # whose exponents are coded
        assert (image.chunks is not None) == is_first
        assert image.sent_bytes < host_image.sent_bytes or not is_first
        loaded.place(part.tier, coded=True).wait()
    for tensor in loaded.coded.manifest.tensors:
        got = bench.device.read_back(tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes)
        assert np.array_equal(got, loaded.coded.contents[tensor.name]), tensor.name


@pytest.mark.parametrize("coded", [False, True], ids=["host", "device"])
def test_images_of_a_parts_pieces_are_placed_together(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, coded: bool
) -> None:
    """One ticket for all, and one launch of the decompressor."""
    if coded and not bench.device.decompresses:
        pytest.skip("the device does not decompress: nvCOMP is not installed")
    monkeypatch.setattr(device_pieces, "MAX_PIECE_BYTES", 100_000)
    loaded = Loaded(bench.device, code_tensors(MIXED))
    manifest = loaded.coded.manifest
    for part in manifest.parts:
        stored = memoryview(loaded.coded.stored[part.index])
        pieces = device_pieces.with_stored(manifest, device_pieces.cut_part(manifest, part), part, stored)
        assert len(pieces) > 2 or part.tier is not Tier.DRAFT
        bench.device.place([Placed(*loaded.fill(piece, coded=coded)) for piece in pieces]).wait()
        got = bench.device.read_back(0, loaded.weights_bytes)
        for tensor in manifest.tensors:
            stretch = slice(tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes)
            if tensor.encoding.tiers[0] <= part.tier:
                assert np.array_equal(got[stretch], loaded.coded.expected(part.tier)[stretch]), tensor.name


def test_a_part_of_many_small_tensors_is_placed(bench: Bench) -> None:
    tensors = {
        f"v{number}": ("F32", "whole", weights_like("F32", 1 + number, number)) for number in range(300)
    }
    loaded = Loaded(bench.device, code_tensors(tensors))
    loaded.place(Tier.DRAFT).wait()
    for tensor in loaded.coded.manifest.tensors:
        begin, end = tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes
        assert np.array_equal(bench.device.read_back(begin, end), loaded.coded.contents[tensor.name])


def test_a_computation_behind_a_ticket_sees_what_was_placed(bench: Bench) -> None:
    loaded = Loaded(bench.device, code_tensors({"q": MIXED["q"]}))
    stream = bench.stream()
    size_bytes = loaded.coded.contents["q"].size
    for tier in (Tier.DRAFT, Tier.REFINE):
        bench.device.order_after(loaded.place(tier), stream)
        seen = bench.read(stream, 0, size_bytes)
        assert np.array_equal(seen(), loaded.coded.expected(tier)[:size_bytes]), tier.name


def test_what_is_in_use_is_replaced_only_behind_its_use(bench: Bench) -> None:
    """A stream that is busy reads draft weights later; refining them was asked for before it does."""
    loaded = Loaded(bench.device, code_tensors({"q": MIXED["q"]}))
    stream = bench.stream()
    size_bytes = loaded.coded.contents["q"].size
    bench.device.order_after(loaded.place(Tier.DRAFT), stream)
    go_on = bench.busy(stream)
    seen = bench.read(stream, 0, size_bytes)
    refined = loaded.place(Tier.REFINE, after=(bench.device.record(stream),))
    assert not refined.is_done()
    go_on()
    assert np.array_equal(seen(), loaded.coded.expected(Tier.DRAFT)[:size_bytes])
    refined.wait()
    assert np.array_equal(bench.device.read_back(0, size_bytes), loaded.coded.contents["q"])


def test_a_part_waits_for_no_use_of_another(bench: Bench) -> None:
    loaded = Loaded(bench.device, code_tensors({"q": MIXED["q"]}))
    stream = bench.stream()
    go_on = bench.busy(stream)
    loaded.place(Tier.DRAFT).wait()  # hangs when it waits for the stream
    go_on()


def test_tickets_are_done_in_the_order_in_which_parts_were_placed(bench: Bench) -> None:
    loaded = Loaded(bench.device, code_tensors(MIXED))
    tickets = [loaded.place(tier) for tier in (Tier.DRAFT, Tier.REFINE)]
    tickets[1].wait()
    assert all(ticket.is_done() for ticket in tickets)


def test_a_part_that_is_placed_again_changes_nothing(bench: Bench) -> None:
    loaded = Loaded(bench.device, code_tensors({"q": MIXED["q"]}))
    for tier in (Tier.DRAFT, Tier.DRAFT, Tier.REFINE, Tier.REFINE):
        loaded.place(tier).wait()
    size_bytes = loaded.coded.contents["q"].size
    assert np.array_equal(bench.device.read_back(0, size_bytes), loaded.coded.contents["q"])


def test_the_image_is_the_devices_until_its_ticket_is_done_and_not_longer(bench: Bench) -> None:
    loaded = Loaded(bench.device, code_tensors({"q": MIXED["q"]}))
    loaded.place(Tier.DRAFT).wait()
    loaded.ring[:] = b"\x5a" * len(loaded.ring)
    size_bytes = loaded.coded.contents["q"].size
    assert np.array_equal(
        bench.device.read_back(0, size_bytes), loaded.coded.expected(Tier.DRAFT)[:size_bytes]
    )


def test_the_weights_are_seen_by_torch_where_they_lie(bench: Bench) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    loaded = Loaded(bench.device, code_tensors({"q": MIXED["q"]}))
    weights = torch.from_dlpack(bench.device.weights())
    words = weights[: loaded.coded.contents["q"].size].view(torch.bfloat16)
    loaded.place(Tier.DRAFT).wait()
    loaded.place(Tier.REFINE).wait()
    assert np.array_equal(words.view(torch.int16).cpu().numpy().view(np.uint8), loaded.coded.contents["q"])


def test_the_weights_outlive_the_device(bench: Bench) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    loaded = Loaded(bench.device, code_tensors({"q": MIXED["q"]}))
    weights = torch.from_dlpack(bench.device.weights())
    loaded.place(Tier.DRAFT)
    bench.device.close()
    bench.device.close()
    size_bytes = loaded.coded.contents["q"].size
    assert np.array_equal(weights[:size_bytes].cpu().numpy(), loaded.coded.expected(Tier.DRAFT)[:size_bytes])


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(bench: Bench) -> None:
    free_bytes = bench.device.free_bytes()
    with pytest.raises(InsufficientMemoryError) as caught:
        bench.device.reserve(free_bytes, map_bytes(4096, what="a test's ring"))
    assert caught.value.needed_bytes > free_bytes >= (caught.value.available_bytes or 0)
    assert bench.device.name in caught.value.message
    assert "--device cpu" in caught.value.hint


def test_statistics_count_planes_and_not_weights(bench: Bench) -> None:
    loaded = Loaded(bench.device, code_tensors({"q": MIXED["q"]}))
    for tier in (Tier.DRAFT, Tier.REFINE):
        loaded.place(tier).wait()
    figures, elements = bench.device.statistics(), loaded.coded.contents["q"].size // 2
    assert figures.num_images == figures.num_launches == 2
    assert 2 * elements <= figures.sent_bytes < 2.01 * elements  # an exponent and two nibbles each
    assert figures.written_bytes == 4 * elements  # both tiers
    assert figures.weights_bytes == loaded.weights_bytes
    assert figures.ring_bytes == RING_BYTES


def test_the_cupy_that_is_none_has_only_names_that_cupy_has() -> None:
    real = pytest.importorskip("cupy", reason="CuPy is not installed")
    for name in NAMES:
        found = real
        for part in name.split("."):
            assert hasattr(found, part), f"CuPy has no {name}"
            found = getattr(found, part)


@pytest.mark.parametrize("order", [Order.EXACT, Order.DRAFT_FIRST])
@pytest.mark.parametrize("as_stored", [False, True], ids=["planes", "as stored"])
def test_a_whole_load_goes_through_the_code_for_cuda(order: Order, as_stored: bool) -> None:
    """Two threads, events, a stream of torch's: everything but the device."""
    bench = CudaOnCpuBench()
    layout = [
        (f"layers.{number}", {f"w{number}": ("BF16", (300, 301)), f"n{number}": ("BF16", (300,))})
        for number in range(4)
    ]
    built = build_artifact(layout, sketch_bits=1, draft_elements=65_536, refine_elements=65_536)
    stream = bench.stream()
    with DeviceLoad.in_threads(
        built.store,
        built.manifest,
        lambda: bench.device,
        options=LoadOptions(order=order),
        as_stored=as_stored,
    ) as load:
        starts, _ = slab_starts(built.manifest.groups)
        for tensor in built.manifest.tensors:
            load.wait(tensor.group, Tier.SKETCH)
            with load.reading(tensor.group, stream):  # whatever is there by now
                bench.read(stream, 0, 64)
            load.wait(tensor.group)
            load.order_after([tensor.group], stream)
            begin = starts[tensor.group] + tensor.offset_bytes
            seen = bench.read(stream, begin, begin + tensor.size_bytes)
            assert seen().tobytes() == built.originals[tensor.name].tobytes(), tensor.name
        assert load.wait_done()
        assert not bench.cupy.pinned
    bench.close()


def test_frames_that_the_device_cannot_decompress_fail_the_waiting_readers() -> None:
    bench = CudaOnCpuBench(decompresses=False)
    loaded = Loaded(bench.device, code_tensors({"q": MIXED["q"]}))
    with pytest.raises(LoadError, match="could not decompress 3 of 3 frames"):
        loaded.place(Tier.DRAFT, coded=True).wait()
    bench.close()


def test_a_ring_that_cannot_be_pinned_is_used_as_it_is() -> None:
    bench = CudaOnCpuBench(pins=False)
    loaded = Loaded(bench.device, code_tensors({"q": MIXED["q"]}))
    assert not bench.device.statistics().is_pinned
    loaded.place(Tier.DRAFT).wait()
    size_bytes = loaded.coded.contents["q"].size
    assert np.array_equal(
        bench.device.read_back(0, size_bytes), loaded.coded.expected(Tier.DRAFT)[:size_bytes]
    )
    bench.close()


def test_a_share_of_a_device_is_all_that_it_has() -> None:
    bench = CudaOnCpuBench(max_percent=25)
    assert bench.device.free_bytes() == bench.cupy.memory_bytes // 4
    with pytest.raises(InsufficientMemoryError, match="256 MiB are free") as caught:
        bench.device.reserve(bench.cupy.memory_bytes // 3, map_bytes(4096, what="a test's ring"))
    assert "--device-percent" in caught.value.hint
    bench.close()


def test_memory_that_cuda_refuses_is_an_error_that_says_what_to_do() -> None:
    bench = CudaOnCpuBench()
    bench.cupy.memory_bytes = 1 << 20  # another process was faster
    bench.device.free_bytes = lambda: 1 << 40
    with pytest.raises(InsufficientMemoryError, match="it gave less") as caught:
        bench.device.reserve(1 << 30, map_bytes(4096, what="a test's ring"))
    assert "--device cpu" in caught.value.hint
    bench.close()


def test_an_unsupported_operation_of_the_simulated_device_fails_the_waiting_readers() -> None:
    device = SimulatedDevice(fail_at_image=1)
    loaded = Loaded(device, code_tensors({"q": MIXED["q"]}))
    loaded.place(Tier.DRAFT).wait()
    with pytest.raises(LoadError, match="set to fail"):
        loaded.place(Tier.REFINE).wait()
    device.close()
