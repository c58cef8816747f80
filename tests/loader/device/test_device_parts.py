"""A load and its device, part by part: images, the ring, the choice of a device and of a path."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path as FilePath

import numpy as np
import pytest
from tests.support.artifacts import build_artifact
from tests.support.device_parts import code_tensors, weights_like
from tests.support.load import patience_s

from teneral.loader.device import detect
from teneral.loader.device import ring as device_ring
from teneral.loader.device.compile import cubin_name, find_cubin, keep_cubin
from teneral.loader.device.detect import choose_device, index_of, parse_device
from teneral.loader.device.image import plan_image, slab_starts
from teneral.loader.device.nvcomp import Decompressor, find_library
from teneral.loader.device.paths import DeviceSpeed, Path, choose_path
from teneral.loader.device.placement import num_together
from teneral.loader.device.ring import (
    ImageRing,
    cut_part,
    max_image_bytes,
    plane_sizes,
    ring_bytes,
    with_plane_sizes,
    with_stored,
)
from teneral.loader.device.sink import SentImage, fill_image
from teneral.loader.errors import IntegrityError, LoadCancelledError, LoadError, UsageError
from teneral.loader.format.manifest import FRAME_ELEMENTS, Tier
from teneral.loader.memory.arena import map_bytes
from teneral.loader.process.cpu import quick_turns

PAGE = 4096
WAIT_S = patience_s(30)
MIXED = {
    "q": ("BF16", "bf16.1.3", weights_like("BF16", FRAME_ELEMENTS + 1001)),
    "norm": ("BF16", "whole.sketch", weights_like("BF16", 777)),
    "half": ("F16", "f16.10", weights_like("F16", FRAME_ELEMENTS + 13)),
    "wide": ("F32", "f32.23", weights_like("F32", 2001)),
    "codes": ("I8", "bytes.sketch", weights_like("I8", 70_001)),
    "steps": ("I64", "bytes.sketch", np.zeros(8 * 999, np.uint8)),
    "nothing": ("BF16", "whole.sketch", weights_like("BF16", 0)),
}


# images


@pytest.mark.parametrize("coded", [False, True], ids=["host", "device"])
def test_nothing_in_an_image_overlaps_and_all_of_it_is_within_its_bound(coded: bool) -> None:
    made = code_tensors(MIXED, cut_at=FRAME_ELEMENTS)
    starts, _ = slab_starts(made.manifest.groups)
    for part in made.manifest.parts:
        image = plan_image(made.manifest, part, starts, coded=coded)
        pieces = [(copy.image_bytes, copy.size_bytes) for copy in image.copies]
        copied = {begin for begin, _ in pieces}
        uploaded: list[tuple[int, int]] = []
        for segment, planes in zip(part.segments, image.planes, strict=True):
            if planes[0].offset_bytes in copied:
                continue
            for stored, plane in zip(segment.planes, planes, strict=True):
                pieces.append((plane.offset_bytes, plane.size_bytes))
                if plane.coded_bytes is not None:
                    uploaded.append((plane.coded_bytes, stored.size_bytes))
                else:
                    uploaded.append(pieces[-1])
        assert all(begin + size <= image.upload_bytes for begin, size in uploaded)
        ends = 0
        for begin, size in sorted({*pieces, *uploaded}):
            assert begin >= ends
            assert begin % 16 == 0
            ends = begin + size
        assert ends <= image.size_bytes <= max_image_bytes(made.manifest, part)


def test_an_image_carries_planes_and_not_weights() -> None:
    count = 4 * FRAME_ELEMENTS
    made = code_tensors({"w": ("BF16", "bf16.3", weights_like("BF16", count))})
    starts, _ = slab_starts(made.manifest.groups)
    sent = [plan_image(made.manifest, part, starts).sent_bytes for part in made.manifest.parts]
    assert sent[0] < 1.51 * count
    assert sent[1] < 0.51 * count


def test_bits_behind_the_last_element_are_refused_before_anything_is_sent() -> None:
    made = code_tensors({"w": ("BF16", "bf16.3", weights_like("BF16", 4097))})
    starts, _ = slab_starts(made.manifest.groups)
    part = made.manifest.parts[1]
    spoilt = bytearray(made.stored[1])
    plane = part.segments[0].planes[0]
    spoilt[plane.offset_bytes + plane.size_bytes - 1] |= 0xF0  # the nibble of an element that there is not
    image = plan_image(made.manifest, part, starts)
    with pytest.raises(IntegrityError, match="unused bits"):
        fill_image(
            image, made.manifest, part, starts, memoryview(spoilt), memoryview(bytearray(image.size_bytes))
        )


def test_frames_that_do_not_declare_their_size_never_reach_a_device() -> None:
    made = code_tensors({"w": ("BF16", "bf16.3", weights_like("BF16", 2 * FRAME_ELEMENTS))})
    starts, _ = slab_starts(made.manifest.groups)
    part = made.manifest.parts[0]
    spoilt = bytearray(made.stored[0])
    spoilt[part.segments[0].planes[0].offset_bytes + 5] ^= 1  # of the first frame's content size
    image = plan_image(made.manifest, part, starts, coded=True)
    assert image.chunks is not None
    with pytest.raises(IntegrityError, match="declares"):
        fill_image(
            image, made.manifest, part, starts, memoryview(spoilt), memoryview(bytearray(image.size_bytes))
        )


# the ring


def test_a_ring_is_as_large_as_wanted_but_holds_the_largest_image_and_no_more_than_all() -> None:
    manifest = code_tensors(MIXED).manifest
    largest = max(max_image_bytes(manifest, part) for part in manifest.parts)
    assert largest <= ring_bytes(manifest, 1) < largest + PAGE
    assert ring_bytes(manifest, 1 << 40) < sum(
        max_image_bytes(manifest, part) + PAGE for part in manifest.parts
    )
    assert ring_bytes(manifest, 2 * largest) % PAGE == 0
    assert ring_bytes(manifest, 1 << 40, room_bytes=1 << 10) == ring_bytes(manifest, 1)


def test_who_takes_memory_waits_until_some_is_given_back() -> None:
    ring = ImageRing(map_bytes(2 * PAGE, what="a test's ring"))
    first = ring.take(2 * PAGE)
    taken = threading.Event()
    thread = threading.Thread(target=lambda: (ring.take(PAGE), taken.set()))
    thread.start()
    assert not taken.is_set()
    ring.give_back(first.offset_bytes)
    thread.join(WAIT_S)
    assert taken.is_set()
    assert ring.wait_s > 0
    ring.check_integrity()


def test_a_closed_ring_wakes_waiting_threads_and_takes_what_is_given_back() -> None:
    ring = ImageRing(map_bytes(PAGE, what="a test's ring"))
    lent = ring.take(PAGE)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            ring.take(PAGE)
        except LoadCancelledError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    ring.close()
    thread.join(WAIT_S)
    assert len(raised) == 1
    ring.give_back(lent.offset_bytes)
    ring.give_back(lent.offset_bytes)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_ring_has_lent_never_overlaps(seed: int) -> None:
    rng = random.Random(seed)
    steps = [(rng.randint(1, 5 * PAGE), rng.random() < 0.5) for _ in range(40)]
    ring = ImageRing(map_bytes(256 * PAGE, what="a test's ring"))
    lent: list[tuple[int, int]] = []
    for size_bytes, gives_back in steps:
        buffer = ring.take(size_bytes)
        assert all(
            buffer.offset_bytes + size_bytes <= begin or begin + size <= buffer.offset_bytes
            for begin, size in lent
        )
        lent.append((buffer.offset_bytes, size_bytes))
        if gives_back:
            ring.give_back(lent.pop(len(lent) // 2)[0])
        ring.check_integrity()


# which device


@pytest.fixture
def cuda_machine(tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A machine's control file, CuPy, and a torch that was built for CUDA, as far as files tell."""
    control = tmp_path / "nvidiactl"
    control.touch()
    for name in ("cupy", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in ("cupy", "torch"):
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
    return (str(control),)


def test_without_a_driver_auto_is_the_cpu_and_looks_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", None)
    assert choose_device("auto", control_files=("/nowhere/nvidiactl",)) == "cpu"
    assert choose_device("cpu", control_files=("/dev/null",)) == "cpu"


def test_auto_is_the_first_gpu_where_all_is_there(cuda_machine: tuple[str, ...]) -> None:
    assert choose_device("auto", control_files=cuda_machine) == "cuda:0"
    assert choose_device("cuda", control_files=cuda_machine) == "cuda:0"
    assert choose_device("cuda:3", control_files=cuda_machine) == "cuda:3"
    assert index_of("cuda:12") == 12


@pytest.mark.parametrize(
    ("lacks", "why"),
    [("cupy", "CuPy is not installed"), ("version", "built without CUDA"), ("control", "no NVIDIA driver")],
)
def test_a_gpu_that_is_asked_for_by_name_is_missed_with_the_reason(
    cuda_machine: tuple[str, ...], tmp_path: FilePath, lacks: str, why: str
) -> None:
    if lacks == "cupy":
        (tmp_path / "cupy" / "__init__.py").unlink()
        (tmp_path / "cupy").rmdir()
    elif lacks == "version":
        (tmp_path / "torch" / "version.py").write_text("cuda: Optional[str] = None\n")
    else:
        (tmp_path / "nvidiactl").unlink()
    assert choose_device("auto", control_files=cuda_machine) == "cpu"
    with pytest.raises(UsageError, match=why) as caught:
        choose_device("cuda", control_files=cuda_machine)
    assert "--device cpu" in caught.value.hint


@pytest.mark.parametrize("text", ["", "gpu", "cuda:", "cuda:x", "cuda:123", "simulated", 3, None])
def test_other_names_of_devices_are_no_setting(text: object) -> None:
    with pytest.raises(ValueError, match="must be auto, cpu, cuda or cuda:N"):
        parse_device(text)
    assert parse_device("cpu") == detect.CPU


# who decompresses

CAN = DeviceSpeed(decompresses=True)


@pytest.mark.parametrize(
    ("link", "host", "device", "path"),
    [
        (5e9, 1e9, DeviceSpeed(), Path.HOST),  # it cannot
        (0.0, 1e9, CAN, Path.HOST),  # nothing is known of the store …
        (5e9, None, CAN, Path.HOST),  # … or of the host
        (1e9, 2e9, CAN, Path.HOST),  # the host keeps up
        (5e9, 2e9, CAN, Path.DEVICE),  # it does not: the device is tried …
        (5e9, 2e9, DeviceSpeed(True, 9e9), Path.DEVICE),  # … and kept where it is faster
        (5e9, 2e9, DeviceSpeed(True, 2.1e9), Path.HOST),
    ],
)
def test_who_decompresses_follows_from_what_was_measured(
    link: float, host: float | None, device: DeviceSpeed, path: Path
) -> None:
    choice = choose_path(link, host, device)
    assert choice.path is path
    assert choice.why


def test_nvcomp_is_called_as_its_headers_say() -> None:
    path = find_library()
    if path is None:
        pytest.skip("nvidia-libnvcomp is not installed")
    scratch_bytes = Decompressor(path).scratch_bytes(16, 16 * FRAME_ELEMENTS)
    assert 16 * FRAME_ELEMENTS <= scratch_bytes <= 64 * FRAME_ELEMENTS


def test_nvcomp_is_found_where_packages_are_and_only_the_version_that_is_understood(
    tmp_path: FilePath,
) -> None:
    folder = tmp_path / "packages" / "nvidia" / "libnvcomp" / "lib64"
    folder.mkdir(parents=True)
    (folder / "libnvcomp.so.6").touch()
    assert find_library([str(tmp_path), str(tmp_path / "packages")]) is None
    (folder / "libnvcomp.so.5").touch()
    assert find_library([str(tmp_path), str(tmp_path / "packages")]) == str(folder / "libnvcomp.so.5")


def test_a_library_that_is_none_is_refused(tmp_path: FilePath) -> None:
    library = tmp_path / "libnvcomp.so.5"
    library.write_bytes(b"not a library")
    with pytest.raises(LoadError, match="cannot be used"):
        Decompressor(str(library))


# compiled kernels


def test_a_cubin_is_taken_for_its_architecture_and_later_minor_versions_of_it(tmp_path: FilePath) -> None:
    first, second = tmp_path / "image", tmp_path / "home"
    path = keep_cubin(80, b"for ampere", first)
    later = keep_cubin(86, b"for a later one", second)
    assert find_cubin(80, [first, second]) == path
    assert find_cubin(86, [first, second]) == find_cubin(89, [first, second]) == later
    assert find_cubin(90, [first, second]) is None
    assert find_cubin(75, [first, second]) is None


def test_a_cubin_of_other_sources_is_never_taken(tmp_path: FilePath) -> None:
    (tmp_path / cubin_name(90).replace("loader-", "loader-0")).write_bytes(b"of another version")
    assert find_cubin(90, [tmp_path]) is None


# pieces


LARGE = {
    "large": ("BF16", "bf16.3", weights_like("BF16", 65 * FRAME_ELEMENTS + 1001)),
    "norm": ("BF16", "whole", weights_like("BF16", 777)),
    "half": ("F16", "f16.3", weights_like("F16", 30 * FRAME_ELEMENTS + 13)),
    "codes": ("I8", "bytes", weights_like("I8", 9 << 20)),
    "nothing": ("BF16", "whole", weights_like("BF16", 0)),
    "flat": ("F32", "whole", weights_like("F32", 3 << 20)),
}


def test_a_large_part_becomes_images_of_eight_to_sixteen_mebibytes() -> None:
    made = code_tensors(LARGE)
    starts, _ = slab_starts(made.manifest.groups)
    for part, stored in zip(made.manifest.parts, made.stored, strict=True):
        pieces = with_stored(made.manifest, cut_part(made.manifest, part), part, memoryview(stored))
        assert sum(each.count for piece in pieces for each in piece.segments) == sum(
            segment.count for segment in part.segments
        )
        sizes = [plan_image(made.manifest, piece, starts).size_bytes for piece in pieces]
        if len(pieces) > 1:
            assert all(8 << 20 <= size <= 17 << 20 for size in sizes[:-1]), sizes
        assert sizes[-1] <= 17 << 20
        for piece, cut in zip(pieces, cut_part(made.manifest, part), strict=True):
            coded = plan_image(made.manifest, piece, starts, coded=True)
            assert coded.size_bytes <= max_image_bytes(made.manifest, piece)
            sized = with_plane_sizes(cut, plane_sizes(piece))  # in the process that has no bytes
            assert plan_image(made.manifest, sized, starts, coded=True) == coded
    assert len(cut_part(made.manifest, made.manifest.parts[0])) > 1


@pytest.mark.parametrize("num_cores", [2, 8, 16])
def test_each_core_has_room_in_the_ring_for_an_image_of_its_own(
    monkeypatch: pytest.MonkeyPatch, num_cores: int
) -> None:
    monkeypatch.setattr(device_ring, "available_cores", lambda: num_cores)
    made = code_tensors({"w": ("BF16", "bf16.3", np.zeros(2 << 24, np.uint8))})  # the packer's largest part
    (draft, _) = made.manifest.parts
    many = made.manifest._replace(parts=made.manifest.parts * 20)
    ring = ImageRing(map_bytes(ring_bytes(many), what="a test's ring"))
    starts, _ = slab_starts(made.manifest.groups)
    pieces = cut_part(made.manifest, draft)
    sizes = [plan_image(made.manifest, piece, starts).size_bytes for piece in pieces]
    assert max(sizes) - min(sizes) < 1 << 19
    held = [ring.take(max(sizes)) for _ in range(num_cores)]
    assert sum(len(buffer.data) for buffer in held) < ring.size_bytes - 4 * max(
        sizes
    )  # and some on their way


def test_pieces_of_a_damaged_part_are_refused_before_any_is_sent() -> None:
    made = code_tensors(LARGE)
    part = made.manifest.parts[0]
    spoilt = bytearray(made.stored[0])
    spoilt[part.segments[0].planes[0].offset_bytes + 5] ^= 1  # of the first frame's content size
    with pytest.raises(IntegrityError, match="declares"):
        with_stored(made.manifest, cut_part(made.manifest, part), part, memoryview(spoilt))


def test_images_that_replace_no_bits_are_placed_together_and_others_group_by_group() -> None:
    built = build_artifact(
        [("a", {"w": ("BF16", (300, 64))}), ("b", {"v": ("BF16", (300, 64))})], draft_elements=65_536
    )
    manifest = built.manifest
    drafts = [SentImage(part.index, 0) for part in manifest.parts if part.tier is Tier.DRAFT]
    refines = {part.group: SentImage(part.index, 0) for part in manifest.parts if part.tier is Tier.REFINE}
    assert num_together(manifest, drafts) == len(drafts) == 2
    assert num_together(manifest, [*drafts, refines[0]]) == 2
    assert num_together(manifest, [refines[0], refines[0], refines[1]]) == 2
    assert num_together(manifest, [refines[1], drafts[0]]) == 1


def test_threads_take_turns_more_often_while_weights_arrive() -> None:
    before = sys.getswitchinterval()
    with quick_turns():
        with quick_turns():
            assert sys.getswitchinterval() == pytest.approx(0.0005)
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    assert sys.getswitchinterval() == before
