"""Whole loads onto a device that is simulated: in threads and in a process of its own, tier by tier, whatever fails."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.support.artifacts import BuiltArtifact, Layout, build_artifact
from tests.support.checkpoints import llama_contents, model_store
from tests.support.device_parts import assert_exact, seen
from tests.support.inspection import device_speed_of, placed_of, timeline_of
from tests.support.memory_store import MemoryStore
from tests.support.paced import WAIT_S, PacedSource, reads_of
from tests.support.simulated_device import SimulatedDevice

from teneral.loader.device import ring as pieces
from teneral.loader.device import sink
from teneral.loader.device.base import Device
from teneral.loader.device.paths import DeviceSpeed, PathChoice
from teneral.loader.device.paths import Path as ChosenPath
from teneral.loader.device.paths import Path as DecompressionPath
from teneral.loader.device.ring import ring_bytes, stored_ring
from teneral.loader.device.sink import ImageSink
from teneral.loader.errors import (
    InsufficientMemoryError,
    IntegrityError,
    LoadCancelledError,
    LoadError,
)
from teneral.loader.format.manifest import Manifest, Tensor, Tier
from teneral.loader.load import device_load
from teneral.loader.load.accounting import LoadState
from teneral.loader.load.device_load import DeviceLoad
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.loader.tools.pack.prune import PruneOptions

LAYOUT: Layout = [
    ("embed", {"embed": ("BF16", (300, 257)), "steps": ("I64", (4, 300))}),
    ("layers.0", {"norm": ("BF16", (300,)), "up": ("BF16", (301, 301)), "scales": ("F32", (40, 31))}),
    ("layers.1", {"codes": ("I8", (97, 103)), "packed": ("F4", (64, 32)), "down": ("BF16", (257, 300))}),
    ("head", {"mask": ("BOOL", (50, 50)), "wide": ("F64", (11, 13)), "nothing": ("BF16", (0, 8))}),
]


@pytest.fixture(scope="module")
def built() -> BuiltArtifact:
    return build_artifact(LAYOUT, draft_elements=65_536, refine_elements=131_072)


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    made = SimulatedDevice()
    yield made
    made.close()


@contextmanager
def load_in_threads(
    built: BuiltArtifact, device: Device, *, source: object = None, **options: object
) -> Iterator[DeviceLoad]:
    chosen, source = LoadOptions(**options), source or built.store.reopen()
    with DeviceLoad.in_threads(
        source, built.manifest, lambda: device, options=chosen, as_stored=WAYS[-1]
    ) as load:
        yield load


WAYS = [False]  # the last one counts
PLANES_ALONE = pytest.mark.parametrize("as_stored", [False], indirect=True)


@pytest.fixture(params=[False, True], ids=["planes", "as stored"], autouse=True)
def as_stored(request: pytest.FixtureRequest) -> Iterator[bool]:
    """The value of `as_stored`: True sends parts as they are stored."""
    WAYS.append(request.param)
    yield request.param
    WAYS.pop()


def shrink_rings(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have loads of this model take rings with room for its largest image, or part, and no more."""
    smallest, stored = ring_bytes(manifest, 1), stored_ring(manifest, room_bytes=1)
    monkeypatch.setattr(device_load, "ring_bytes", lambda manifest, **_: smallest)
    monkeypatch.setattr(device_load, "stored_ring", lambda manifest, **_: stored)


@pytest.mark.parametrize("order", [Order.EXACT, Order.DRAFT_FIRST])
def test_the_weights_on_the_device_are_exact(
    built: BuiltArtifact, device: SimulatedDevice, order: Order
) -> None:
    with load_in_threads(built, device, order=order) as load:
        assert_exact(load, built.originals)
        assert load.join(WAIT_S)
        assert load.progress().state is LoadState.EXACT
        assert load.progress().groups_exact == len(built.manifest.groups)


def test_a_sketch_a_draft_and_exact_weights_come_in_turn(device: SimulatedDevice) -> None:
    built = build_artifact(LAYOUT, sketch_bits=1, draft_elements=65_536, refine_elements=131_072)
    manifest = built.manifest
    later = [part for part in manifest.parts if part.tier is not Tier.SKETCH]
    source = PacedSource(built.store.reopen())
    refining = source.hold(reads_of(manifest, *[part for part in later if part.tier is Tier.REFINE]))
    drafting = source.hold(reads_of(manifest, *[part for part in later if part.tier is Tier.DRAFT]))
    with load_in_threads(built, device, source=source, order=Order.DRAFT_FIRST) as load:
        for tier, held in ((Tier.SKETCH, drafting), (Tier.DRAFT, refining), (Tier.REFINE, None)):
            for group in manifest.groups:
                load.wait(group.index, tier, timeout_s=WAIT_S)
            for name in built.originals:
                assert seen(load, name) == built.expected(name, tier).tobytes(), (tier.name, name)
            if held is not None:
                held.release()


@pytest.mark.parametrize("sketch_bits", [None, 1])
def test_pruned_weights_come_in_turn_with_their_zeros(
    device: SimulatedDevice, sketch_bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruned matrices next to dense ones, in parts and images that cut them anywhere, against the host's decoder."""
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 100_000)
    contents = llama_contents(hidden=160)
    for name, (dtype, shape, data) in contents.items():
        if "mlp" in name:
            words = np.frombuffer(data, "<u2").copy()
            words[np.random.default_rng(0).random(words.size) < 0.6] &= 0x8000
            contents[name] = (dtype, shape, words.tobytes())
    store = MemoryStore()
    manifest = pack(model_store(contents), store, tiers=TierOptions(sketch_bits=sketch_bits)).manifest
    assert 0 < sum(tensor.encoding.is_sparse for tensor in manifest.tensors) < len(manifest.tensors)
    tiers = [tier for tier in Tier if manifest.stored_bytes(tier)]
    sources = [PacedSource(store), PacedSource(store)]
    held = [
        [
            source.hold(reads_of(manifest, *[part for part in manifest.parts if part.tier is tier]))
            for tier in tiers
        ]
        for source in sources
    ]
    on_host = WeightLoad(sources[0], manifest, options=LoadOptions(order=Order.DRAFT_FIRST))
    options = LoadOptions(order=Order.DRAFT_FIRST)
    with (
        on_host,
        DeviceLoad.in_threads(
            sources[1], manifest, lambda: device, options=options, as_stored=WAYS[-1]
        ) as load,
    ):
        on_host.start()
        for number, tier in enumerate(tiers):
            for each in held:
                each[number].release()
            for group in manifest.groups:
                on_host.wait(group.index, tier, timeout_s=WAIT_S)
                load.wait(group.index, tier, timeout_s=WAIT_S)
            for tensor in manifest.tensors:
                begin = tensor.offset_bytes
                right = on_host.slab(tensor.group)[begin : begin + tensor.size_bytes].tobytes()
                assert seen(load, tensor.name) == right, (tier.name, tensor.name)
                assert right == contents[tensor.name][2] or tier is not Tier.REFINE
        assert load.wait_done(WAIT_S)


def test_pruned_weights_need_the_hosts_memory(device: SimulatedDevice) -> None:
    manifest = pack(model_store(llama_contents(hidden=128)), MemoryStore(), prune=PruneOptions(0.5)).manifest
    sparse_bytes = sum(tensor.size_bytes for tensor in manifest.tensors if tensor.encoding.is_sparse)
    assert ring_bytes(manifest, room_bytes=sparse_bytes) > 0
    with pytest.raises(InsufficientMemoryError, match="pruned weights take"):
        ring_bytes(manifest, room_bytes=sparse_bytes - 1)


def test_a_model_of_empty_tensors_is_there_at_once(device: SimulatedDevice) -> None:
    built = build_artifact([("embed", {"nothing": ("BF16", (0, 8))}), ("head", {"neither": ("F32", (4, 0))})])
    with load_in_threads(built, device) as load:
        assert_exact(load, built.originals)
        assert load.wait_done(WAIT_S)


def test_plain_safetensors_go_to_the_device_as_they_are(device: SimulatedDevice) -> None:
    built = build_artifact(LAYOUT, packed=False)
    with load_in_threads(built, device) as load:
        assert_exact(load, built.originals)
    figures = load.device_statistics()
    assert figures is not None
    assert figures.num_launches == 0
    assert figures.sent_bytes == sum(original.size for original in built.originals.values())


@PLANES_ALONE
def test_a_gate_may_open_before_the_device_is_done_and_readers_wait_for_it(
    built: BuiltArtifact, device: SimulatedDevice
) -> None:
    reader: list[bytes] = []
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(contextlib.ExitStack())
        held.enter_context(device.hold())
        load = stack.enter_context(load_in_threads(built, device))
        load.wait(0, timeout_s=WAIT_S)  # ordered to place, which it cannot do
        thread = threading.Thread(target=lambda: reader.append(seen(load, "embed")))
        thread.start()
        assert not reader
        held.close()
        thread.join(WAIT_S)
        assert reader == [built.originals["embed"].tobytes()]


@PLANES_ALONE  # test_stored_load.py has the other way's
def test_draft_weights_in_use_stay_as_they_are_until_their_use_ends_on_the_device(
    built: BuiltArtifact, device: SimulatedDevice
) -> None:
    """A computation has only launched its reads when refining is asked for."""
    manifest = built.manifest
    source = PacedSource(built.store.reopen())
    held = source.hold(reads_of(manifest, *[part for part in manifest.parts if part.tier is Tier.REFINE]))
    with load_in_threads(built, device, source=source, order=Order.DRAFT_FIRST) as load:
        tensor = manifest.by_name["up"]
        load.wait(tensor.group, Tier.DRAFT, timeout_s=WAIT_S)
        stream, go_on = device.new_stream(), threading.Event()
        slab = load.device_slab(tensor.group)
        read: list[bytes] = []
        with load.reading(tensor.group, stream):
            device.launch(stream, lambda: (go_on.wait(), None)[1])
            begin, end = tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes
            device.launch(stream, lambda: read.append(slab[begin:end].tobytes()))
        used = device.record(stream)
        held.release()
        load.wait(tensor.group, timeout_s=WAIT_S)  # refining was asked for, behind the read
        assert not placed_of(load, tensor.group).wait(0.2), "it did not wait for the read"
        go_on.set()
        used.wait()
        assert read == [built.expected("up", Tier.DRAFT).tobytes()]
        assert_exact(load, built.originals)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_changes_under_who_uses_it_whatever_order_parts_come_in(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A computation reads every tensor twice, late, while parts are placed: both times it must see the same."""
    built = build_artifact(
        LAYOUT,
        seed=seed,
        sketch_bits=1,
        sketch_elements=65_536,
        draft_elements=65_536,
        refine_elements=65_536,
    )
    shrink_rings(built.manifest, monkeypatch)
    device = SimulatedDevice()
    source = PacedSource(built.store.reopen())
    source.delay(seed=seed, max_s=0.01)
    order = Order.DRAFT_FIRST if seed % 2 else Order.EXACT
    torn: list[str] = []
    with load_in_threads(built, device, source=source, order=order, connections=3) as load:
        load.device_slab(0)
        stream = device.new_stream()
        groups = [group.index for group in built.manifest.groups]
        while not all(load.is_ready(group) for group in groups):
            for group in groups:
                load.wait(group, Tier.SKETCH, timeout_s=WAIT_S)
                with load.reading(group, stream):
                    for index in built.manifest.groups[group].tensors:
                        device.launch(stream, read_twice(load, built.manifest.tensors[index], torn))
            device.record(stream).wait()
        assert not torn
        assert_exact(load, built.originals)
    device.close()


def read_twice(load: DeviceLoad, tensor: Tensor, torn: list[str]) -> Callable[[], None]:
    content = load.device_slab(tensor.group)[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]

    def read() -> None:
        first = content.copy()
        threading.Event().wait(0.002)  # so that others have the time to do what they must not
        if not np.array_equal(first, content):
            torn.append(tensor.name)

    return read


def test_rows_that_are_asked_for_come_first(built: BuiltArtifact, device: SimulatedDevice) -> None:
    manifest = built.manifest
    wanted = [part.index for part in manifest.parts if part.group == 2]
    with load_in_threads(built, device) as load:
        load.wait_parts(wanted, timeout_s=WAIT_S)
        assert seen(load, "down") == built.originals["down"].tobytes()


def test_a_ring_for_one_image_is_enough(
    built: BuiltArtifact, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_rings(built.manifest, monkeypatch)
    with load_in_threads(built, device) as load:
        assert_exact(load, built.originals)


@PLANES_ALONE
@pytest.mark.parametrize("decompresses", [False, True], ids=["host", "device"])
def test_parts_that_make_several_images_arrive_whole(
    monkeypatch: pytest.MonkeyPatch, decompresses: bool
) -> None:
    built = build_artifact(
        [("a", {"w": ("BF16", (600, 513)), "s": ("F32", (9, 9))}), ("b", {"v": ("I8", (700, 500))})]
    )
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 1 << 16)
    if decompresses:
        monkeypatch.setattr(ImageSink, "_choose", lambda *_: DecompressionPath.DEVICE)
    device = SimulatedDevice(decompresses=decompresses)
    with load_in_threads(built, device) as load:
        assert_exact(load, built.originals)
        assert load.wait_done(WAIT_S)
        assert device.statistics().num_images > len(built.manifest.parts)
    device.close()


def test_the_rings_memory_is_let_go_once_all_is_placed(built: BuiltArtifact, device: SimulatedDevice) -> None:
    released = threading.Event()
    release_ring = device.release_ring
    device.release_ring = lambda: (release_ring(), released.set())[0]
    with load_in_threads(built, device) as load:
        assert_exact(load, built.originals)
        assert load.wait_done(WAIT_S)
        assert released.is_set()
        assert_exact(load, built.originals)
        tensor = built.manifest.by_name["up"]
        end = tensor.offset_bytes + tensor.size_bytes
        assert load.read_back(tensor.group, tensor.offset_bytes, end) == built.originals["up"].tobytes()


@PLANES_ALONE
@pytest.mark.parametrize("order", [Order.EXACT, Order.DRAFT_FIRST])
def test_a_device_that_decompresses_gets_frames_and_a_gate_opens_when_it_has(
    built: BuiltArtifact, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = SimulatedDevice(decompresses=True)

    def choose(link_bytes_per_s: float, host_bytes_per_s: float | None, speed: DeviceSpeed) -> PathChoice:
        return PathChoice(ChosenPath.DEVICE if speed.decompresses else ChosenPath.HOST, "a test says so")

    monkeypatch.setattr(sink, "choose_path", choose)
    source = PacedSource(built.store.reopen())
    held = source.hold()
    with load_in_threads(built, able, source=source, order=order) as load:
        load.device_slab(0)  # the device's abilities are known before this exists
        held.release()
        assert_exact(load, built.originals)
        assert load.wait_done(WAIT_S)
        spans = [span for span in timeline_of(load).spans() if span.lane in ("device", "place")]
        assert {"host", "device"} <= {span.attributes.get("path") for span in spans}
        assert any(span.name.startswith("planes are decompressed on the device") for span in spans)
        assert device_speed_of(load).bytes_per_s, "the speed of the device is unknown"
        exponents = sum(
            math.prod(tensor.shape) for tensor in built.manifest.tensors if tensor.dtype == "BF16"
        )
        whole = sum(original.size for original in built.originals.values())
        assert able.statistics().sent_bytes < whole - exponents / 2
    able.close()


# what fails


def test_a_model_that_the_device_has_no_room_for_ends_the_load_with_the_numbers(built: BuiltArtifact) -> None:
    small = SimulatedDevice(memory_bytes=1000)
    with load_in_threads(built, small) as load:
        with pytest.raises(InsufficientMemoryError, match="the memory of simulated"):
            load.wait(0, timeout_s=WAIT_S)
        with pytest.raises(InsufficientMemoryError):
            load.device_slab(0)
        assert load.progress().state is LoadState.FAILED


def test_a_device_that_cannot_be_opened_ends_the_load(built: BuiltArtifact) -> None:
    def open_device() -> Device:
        raise LoadError("cuda:0 failed while opening it: no such device")

    with (
        DeviceLoad.in_threads(built.store.reopen(), built.manifest, open_device) as load,
        pytest.raises(LoadError, match="no such device"),
    ):
        load.wait(len(built.manifest.groups) - 1, timeout_s=WAIT_S)


def test_a_device_that_fails_on_the_way_fails_the_readers(built: BuiltArtifact) -> None:
    failing = SimulatedDevice(fail_at_image=1)
    with load_in_threads(built, failing) as load, pytest.raises(LoadError, match="set to fail"):
        assert_exact(load, built.originals)


@PLANES_ALONE
def test_a_device_that_fails_when_all_gates_are_open_fails_the_wait_for_the_weights(
    built: BuiltArtifact,
) -> None:
    failing = SimulatedDevice(fail_at_image=len(built.manifest.parts) - 1)
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(contextlib.ExitStack())
        held.enter_context(failing.hold())
        load = stack.enter_context(load_in_threads(built, failing))
        for group in built.manifest.groups:
            load.wait(group.index, timeout_s=WAIT_S)
        assert not load.wait_done(0)
        held.close()
        with pytest.raises(LoadError, match="set to fail"):
            load.wait_done(WAIT_S)
        assert load.progress().state is LoadState.FAILED
        with pytest.raises(LoadError, match="set to fail"):
            assert_exact(load, built.originals)


def test_closing_wakes_threads_that_wait_for_the_device(
    built: BuiltArtifact, device: SimulatedDevice
) -> None:
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            load.wait_done()
        except LoadCancelledError as error:
            raised.append(error)

    source = PacedSource(built.store.reopen())
    source.hold()
    load = DeviceLoad.in_threads(source, built.manifest, lambda: device)
    thread = threading.Thread(target=wait)
    thread.start()
    load.close()
    thread.join(WAIT_S)
    assert len(raised) == 1


def test_damaged_bytes_never_reach_the_device(built: BuiltArtifact, device: SimulatedDevice) -> None:
    source = PacedSource(built.store.reopen())
    spoilt = built.manifest.parts[2]
    source.spoil(reads_of(built.manifest, spoilt), times=99)
    with load_in_threads(built, device, source=source) as load:
        with pytest.raises(IntegrityError, match="wrong digest"):
            assert_exact(load, built.originals)
        assert not load.is_ready(spoilt.group)
        with pytest.raises(IntegrityError, match="wrong digest"):
            load.wait_done(WAIT_S)


def test_closing_a_load_that_waits_for_room_ends_it(
    built: BuiltArtifact, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink_rings(built.manifest, monkeypatch)
    with device.hold():
        load = DeviceLoad.in_threads(built.store.reopen(), built.manifest, lambda: device)
        load.device_slab(0)
        load.cancel()
        with pytest.raises(LoadCancelledError):
            load.wait(len(built.manifest.groups) - 1, timeout_s=WAIT_S)
    load.close()
    load.close()
