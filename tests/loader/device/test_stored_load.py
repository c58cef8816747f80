"""Loads of parts as they are stored: no gate opens over bytes that the device has not verified, and what it finds wrong
is fetched again, or decoded by the host.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.support.artifacts import BuiltArtifact, Layout, build_artifact
from tests.support.device_parts import assert_exact, seen
from tests.support.inspection import timeline_of
from tests.support.paced import WAIT_S, PacedSource, reads_of
from tests.support.simulated_device import SimulatedDevice

from teneral.loader.device.ring import cut_part, max_image_bytes, stored_ring
from teneral.loader.device.stored import can_be_stored, max_stored_bytes, max_tables_bytes, plan_stored
from teneral.loader.errors import IntegrityError, LoadError
from teneral.loader.format.manifest import Tier
from teneral.loader.load.accounting import LoadState
from teneral.loader.load.device_load import DeviceLoad
from teneral.loader.load.options import LoadOptions, Order

LAYOUT: Layout = [
    ("embed", {"embed": ("BF16", (300, 257)), "steps": ("I64", (4, 300))}),
    ("layers.0", {"norm": ("BF16", (300,)), "up": ("BF16", (301, 301)), "half": ("F16", (200, 301))}),
    ("head", {"mask": ("BOOL", (50, 50)), "wide": ("F64", (11, 13)), "codes": ("I8", (97, 103))}),
]


@pytest.fixture(scope="module")
def built() -> BuiltArtifact:
    return build_artifact(LAYOUT, draft_elements=65_536, refine_elements=131_072)


@contextmanager
def load_as_stored(
    built: BuiltArtifact, device: SimulatedDevice, *, source: object = None, **options: object
) -> Iterator[DeviceLoad]:
    source = source or built.store.reopen()
    with DeviceLoad.in_threads(
        source, built.manifest, lambda: device, options=LoadOptions(**options), as_stored=True
    ) as load:
        yield load
    device.close()


def ways(load: DeviceLoad) -> set[object]:
    return {span.attributes.get("path") for span in timeline_of(load).spans() if span.lane == "place"}


@pytest.mark.parametrize("order", [Order.EXACT, Order.DRAFT_FIRST])
def test_the_host_decodes_nothing_and_the_link_carries_what_is_stored(
    built: BuiltArtifact, order: Order
) -> None:
    device = SimulatedDevice()
    with load_as_stored(built, device, order=order) as load:
        assert_exact(load, built.originals)
        assert load.wait_done(WAIT_S)
        assert load.join(WAIT_S)
        statistics = load.statistics()
        assert statistics is not None
        assert ways(load) == {"device"}
        assert statistics.verify.size_bytes == statistics.decode.size_bytes == 0
        stored = sum(part.size_bytes for part in built.manifest.parts)
        tables = sum(plan_stored(built.manifest, part).tables_bytes for part in built.manifest.parts)
        assert device.statistics().sent_bytes == stored + tables
        assert load.progress().state is LoadState.EXACT


def test_no_gate_opens_before_the_device_has_verified(built: BuiltArtifact) -> None:
    device = SimulatedDevice()
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(contextlib.ExitStack())
        held.enter_context(device.hold())
        load = stack.enter_context(load_as_stored(built, device))
        load.device_slab(0)
        with pytest.raises(TimeoutError):
            load.wait(0, Tier.DRAFT, timeout_s=0.2)
        held.close()
        assert_exact(load, built.originals)


def test_draft_weights_in_use_stay_as_they_are_until_their_use_ends(built: BuiltArtifact) -> None:
    device, manifest = SimulatedDevice(), built.manifest
    source = PacedSource(built.store.reopen())
    held = source.hold(reads_of(manifest, *[part for part in manifest.parts if part.tier is Tier.REFINE]))
    with load_as_stored(built, device, source=source, order=Order.DRAFT_FIRST) as load:
        tensor = manifest.by_name["up"]
        load.wait(tensor.group, Tier.DRAFT, timeout_s=WAIT_S)
        stream, go_on, read = device.new_stream(), threading.Event(), list[bytes]()
        slab = load.device_slab(tensor.group)
        with load.reading(tensor.group, stream):
            device.launch(stream, lambda: (go_on.wait(), None)[1])
            begin, end = tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes
            device.launch(stream, lambda: read.append(slab[begin:end].tobytes()))
        used = device.record(stream)
        held.release()
        with pytest.raises(TimeoutError):
            load.wait(tensor.group, timeout_s=0.2)
        go_on.set()
        used.wait()
        assert read == [built.expected("up", Tier.DRAFT).tobytes()]
        assert_exact(load, built.originals)


@pytest.mark.parametrize("number", [0, 3, -1])
def test_a_part_that_is_spoilt_on_its_way_is_fetched_again(built: BuiltArtifact, number: int) -> None:
    device, source = SimulatedDevice(), PacedSource(built.store.reopen())
    source.spoil(reads_of(built.manifest, built.manifest.parts[number]), times=1)
    with load_as_stored(built, device, source=source) as load:
        assert_exact(load, built.originals)
        assert load.join(WAIT_S)
        statistics = load.statistics()
        assert statistics is not None
        assert statistics.num_refetched_parts == 1


def test_a_part_that_is_wrong_twice_is_named_and_no_gate_opens_over_it(built: BuiltArtifact) -> None:
    device, source = SimulatedDevice(), PacedSource(built.store.reopen())
    spoilt = built.manifest.parts[3]  # in the middle of the range that is read first
    source.spoil(reads_of(built.manifest, spoilt), times=99)
    with load_as_stored(built, device, source=source) as load:
        with pytest.raises(IntegrityError, match=rf"part {spoilt.index} .* has a wrong digest"):
            load.wait_done(WAIT_S)
        assert not load.is_ready(spoilt.group)
        assert load.progress().state is LoadState.FAILED


def test_what_is_spoilt_between_host_and_device_is_decoded_by_the_host(built: BuiltArtifact) -> None:
    """The digest is right here, so nothing is fetched again."""
    device = SimulatedDevice(spoils=frozenset({1, 2}))
    with load_as_stored(built, device) as load:
        assert_exact(load, built.originals)
        assert load.join(WAIT_S)
        statistics = load.statistics()
        assert statistics is not None
        assert statistics.num_refetched_parts == 0
        assert ways(load) == {"host", "device"}


def test_a_device_that_fails_fails_the_readers(built: BuiltArtifact) -> None:
    device = SimulatedDevice(fail_at_image=1)
    with load_as_stored(built, device) as load, pytest.raises(LoadError, match="set to fail"):
        assert_exact(load, built.originals)


def test_plain_files_are_sent_from_where_they_were_read() -> None:
    plain, device = build_artifact(LAYOUT, packed=False), SimulatedDevice()
    with load_as_stored(plain, device) as load:
        assert_exact(load, plain.originals)
        assert load.join(WAIT_S)
        statistics = load.statistics()
        assert statistics is not None
        assert statistics.decode.size_bytes == 0
    assert device.statistics().num_launches == 0
    assert device.statistics().sent_bytes == sum(each.size for each in plain.originals.values())


def test_a_node_cache_keeps_what_the_device_has_verified(built: BuiltArtifact, tmp_path: Path) -> None:
    """The second load finds it there, the third one what a disk has spoilt."""
    for turn in range(3):
        device = SimulatedDevice()
        with load_as_stored(built, device, cache_dir=str(tmp_path)) as load:
            assert_exact(load, built.originals)
            assert load.join(WAIT_S)
            statistics = load.statistics()
            assert statistics is not None
            assert statistics.cache is not None
            assert (statistics.cache.num_hits > 0) == (turn > 0)
            assert statistics.cache.num_rejected == (turn == 2)
            wait_for_files(tmp_path, len(built.manifest.parts))
        if turn == 1:
            largest = max(
                (each for each in tmp_path.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size
            )
            content = bytearray(largest.read_bytes())
            content[len(content) // 2] ^= 1
            largest.write_bytes(content)


def wait_for_files(folder: Path, num: int) -> None:
    pause = threading.Event()
    for _ in range(200):
        if sum(path.is_file() for path in folder.rglob("*")) >= num:
            return
        pause.wait(0.05)


@pytest.mark.parametrize("sketch_bits", [None, 1])
def test_bounds_hold_for_every_part(sketch_bits: int | None) -> None:
    manifest = build_artifact(LAYOUT, sketch_bits=sketch_bits).manifest
    ring = stored_ring(manifest)
    for part in manifest.parts:
        assert can_be_stored(manifest, part)
        image = plan_stored(manifest, part)
        assert image.tables_bytes <= max_tables_bytes(part)
        assert image.size_bytes <= max_stored_bytes(part) <= ring.slot_bytes
        assert part.size_bytes + max_tables_bytes(part) <= ring.staging_bytes
        assert all(max_image_bytes(manifest, piece) <= ring.slot_bytes for piece in cut_part(manifest, part))
    assert stored_ring(manifest, room_bytes=1).size_bytes < ring.size_bytes


def test_weights_are_seen_as_soon_as_their_gate_opens(built: BuiltArtifact) -> None:
    device = SimulatedDevice()
    with load_as_stored(built, device) as load:
        for name, original in built.originals.items():
            load.wait(load.manifest.by_name[name].group, timeout_s=WAIT_S)
            assert np.array_equal(np.frombuffer(seen(load, name), np.uint8), original.view(np.uint8).ravel())
