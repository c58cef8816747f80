"""The benchmarks of placing weights, as far as they run without a GPU: what they feed the device is what a load
does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.gpu import stored, stream
from benchmarks.gpu.merge import by_numpy
from benchmarks.gpu.planes import coded_parts, empty_parts
from tests.support.image_programs import run_launch
from tests.support.load import patience_s
from tests.support.simulated_device import SimulatedDevice

from teneral.loader.device.image import pack_tables, plan_image, slab_starts
from teneral.loader.format.manifest import FRAME_ELEMENTS, Tier
from teneral.loader.memory.arena import map_bytes

COUNT = 2 * FRAME_ELEMENTS


@pytest.mark.parametrize("coded", [False, True], ids=["host", "device"])
def test_what_the_stream_benchmark_places_are_the_weights(coded: bool) -> None:
    made = coded_parts(COUNT, 9)
    device = SimulatedDevice(decompresses=True)
    ring = map_bytes(2 << 20, what="a test's ring")
    device.reserve(slab_starts(made.manifest.groups)[1], ring)
    slots = stream.fill_ring(ring, made, coded=coded)
    assert all(len(places) > 1 for places in slots.values())
    seconds, sent_bytes = stream.place_all(device, slots, made, coded=coded)
    assert seconds > 0
    assert (sent_bytes < 9 * 1.6 * COUNT) == coded
    floats = np.random.default_rng(0).standard_normal(COUNT, dtype=np.float32) * np.float32(0.02)
    words = (floats.view("<u4") >> 16).astype("<u2")
    assert np.array_equal(device.read_back(0, 2 * COUNT).view("<u2"), words)
    device.close()


def test_one_frame_is_merged_as_it_is_among_others() -> None:
    """What the merge benchmark compares the kernels with."""
    made = empty_parts("BF16", "bf16.3", COUNT)
    starts, weights_bytes = slab_starts(made.manifest.groups)
    rng = np.random.default_rng(1)
    weights = rng.integers(0, 256, weights_bytes, dtype=np.uint8)
    for tier in (Tier.DRAFT, Tier.REFINE):
        part = made.parts[tier][0]
        plan = plan_image(made.manifest, part, starts)
        (launch,) = plan.launches
        image = rng.integers(0, 256, plan.size_bytes, dtype=np.uint8)
        pack_tables(plan, made.manifest, part, starts, image.data)
        was = weights[2 * FRAME_ELEMENTS : 4 * FRAME_ELEMENTS].copy()
        run_launch(launch, image, weights)
        pieces = []
        for plane in plan.planes[0]:
            size = plane.size_bytes // 2
            pieces.append(image[plane.offset_bytes + size : plane.offset_bytes + 2 * size])
        recipe = image[launch.table_bytes : launch.table_bytes + 96]
        assert np.array_equal(
            by_numpy(launch, recipe, pieces, was), weights[2 * FRAME_ELEMENTS : 4 * FRAME_ELEMENTS]
        )


def test_what_the_benchmark_of_stored_parts_places_are_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "PART_ELEMENTS", COUNT)
    made, device = stored.with_digests(coded_parts(COUNT, 9)), SimulatedDevice()
    ring = map_bytes(1 << 20, what="a test's ring")
    device.reserve(slab_starts(made.manifest.groups)[1], ring, slot_bytes=stored.slot_bytes(made))
    slots = stored.fill_ring(ring, made)
    assert all(len(places) > 1 for places in slots.values())
    seconds, sent_bytes = stored.place_all(device, ring, slots, made)
    assert seconds > 0
    assert sent_bytes < 9 * 1.4 * COUNT
    assert stored.has_right_weights(device)
    device.close()


@pytest.mark.parametrize("name", ["merge", "stream", "stored"])
def test_without_a_device_a_benchmark_says_so_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s(60))
    if done.returncode == 0:
        pytest.skip("there is a device here")
    assert done.returncode == 2
    assert "no device" in done.stderr
    assert "Traceback" not in done.stderr
    assert not result.exists()
