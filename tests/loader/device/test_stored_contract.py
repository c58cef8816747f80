"""The contract of every device for images of parts as they are stored: the simulated one, the code for CUDA on a CPU,
and CUDA where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.loader.device.test_device_contract import (
    HAS_CUDA,
    MIXED,
    RING_BYTES,
    WITH_SKETCH,
    Bench,
    CudaBench,
    CudaOnCpuBench,
    SimulatedBench,
)
from tests.support.device_parts import CodedTensors, code_tensors, weights_like

from teneral.loader.device.base import Device, Placed, Ticket
from teneral.loader.device.image import plan_image, slab_starts
from teneral.loader.device.sink import fill_image
from teneral.loader.device.stored import (
    DIGEST_DIFFERS,
    FRAME_DAMAGED,
    max_stored_bytes,
    max_tables_bytes,
    plan_plain,
    write_tables,
)
from teneral.loader.format.manifest import FRAME_ELEMENTS, Part, Tier, align
from teneral.loader.memory.arena import map_bytes

PAGE_BYTES = 4096


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


class Sent:
    """A device with slots, and a ring that parts lie in as they are stored."""

    def __init__(self, device: Device, coded: CodedTensors) -> None:
        self.device, self.coded = device, coded
        self.starts, self.weights_bytes = slab_starts(coded.manifest.groups)
        self.ring = map_bytes(RING_BYTES, what="a test's ring")
        self.at = 0
        self.words: list[int] = []  # where those of the images are
        slot_bytes = max(max_stored_bytes(part) for part in coded.manifest.parts) + RING_BYTES
        device.reserve(self.weights_bytes, self.ring, slot_bytes=align(slot_bytes, PAGE_BYTES))

    def placed(self, part: Part, *, flipped: int | None = None) -> Placed:
        stored = bytearray(self.coded.stored[part.index])
        if flipped is not None:
            stored[flipped] ^= 1
        begin = self._take(len(stored))
        self.ring[begin : begin + len(stored)] = stored
        tables = self._take(max_tables_bytes(part))
        room = self.ring[tables : tables + max_tables_bytes(part)]
        image = write_tables(self.coded.manifest, part, self.starts, memoryview(stored), room)
        assert image is not None
        self.words.append(tables + image.wrong_begin - image.tables_begin)
        return Placed(image, begin, tables)

    def word(self, number: int = -1) -> int:
        begin = self.words[number]
        return int.from_bytes(self.ring[begin : begin + 4], "little")

    def part(self, tier: Tier) -> Part:
        return next(part for part in self.coded.manifest.parts if part.tier is tier)

    def place(self, tier: Tier, after: tuple[Ticket, ...] = (), *, flipped: int | None = None) -> Ticket:
        return self.device.place([self.placed(self.part(tier), flipped=flipped)], after)

    def _take(self, size_bytes: int) -> int:
        begin, self.at = self.at, self.at + align(size_bytes, PAGE_BYTES)
        assert self.at <= RING_BYTES
        return begin

    def assert_is(self, upto: Tier) -> None:
        got, expected = self.device.read_back(0, self.weights_bytes), self.coded.expected(upto)
        for tensor in self.coded.manifest.tensors:  # bytes between them belong to no tensor
            stretch = slice(tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes)
            if tensor.encoding.tiers[0] <= upto:
                assert np.array_equal(got[stretch], expected[stretch]), tensor.name


@pytest.mark.parametrize("tensors", [MIXED, WITH_SKETCH], ids=["two tiers", "three tiers"])
def test_weights_are_what_the_decoder_makes_of_them_tier_by_tier(bench: Bench, tensors: dict) -> None:
    sent = Sent(bench.device, code_tensors(tensors))
    for part in sent.coded.manifest.parts:
        sent.place(part.tier).wait()
        assert sent.word() == 0
        sent.assert_is(part.tier)


def test_more_images_than_slots_are_placed_in_order(bench: Bench) -> None:
    """Tiers in turns, over and over, in one call each: a slot is used again only behind its last merge."""
    sent = Sent(
        bench.device, code_tensors({"q": ("BF16", "bf16.3", weights_like("BF16", FRAME_ELEMENTS + 77))})
    )
    for _ in range(4):
        images = [sent.placed(sent.part(tier)) for tier in (Tier.DRAFT, Tier.REFINE) * 2]
        ticket = bench.device.place(images)
    ticket.wait()
    assert [sent.word(number) for number in range(16)] == [0] * 16
    sent.assert_is(Tier.REFINE)


@pytest.mark.parametrize("place", [0.4, 0.8, 0.99])
def test_a_flipped_bit_changes_no_weight_and_is_reported(bench: Bench, place: float) -> None:
    sent = Sent(bench.device, code_tensors(MIXED))
    sent.place(Tier.DRAFT).wait()
    flipped = int(place * len(sent.coded.stored[1]))
    sent.place(Tier.REFINE, flipped=flipped).wait()
    assert sent.word() & DIGEST_DIFFERS
    sent.assert_is(Tier.DRAFT)
    sent.place(Tier.REFINE).wait()
    assert sent.word() == 0
    sent.assert_is(Tier.REFINE)


def test_one_image_that_is_wrong_holds_up_no_other(bench: Bench) -> None:
    sent = Sent(bench.device, code_tensors(MIXED))
    draft, size_bytes = sent.part(Tier.DRAFT), len(sent.coded.stored[0])
    images = [sent.placed(draft), sent.placed(draft, flipped=size_bytes - 1), sent.placed(draft)]
    bench.device.place(images).wait()
    assert [sent.word(number) & DIGEST_DIFFERS for number in range(3)] == [0, DIGEST_DIFFERS, 0]
    sent.assert_is(Tier.DRAFT)


def test_a_right_digest_over_a_damaged_frame_changes_no_weight(bench: Bench) -> None:
    """A packer's fault: the header is as it should be, and the codes are not."""
    from blake3 import blake3

    coded = code_tensors({"q": ("BF16", "bf16.3", weights_like("BF16", FRAME_ELEMENTS))})
    part = coded.manifest.parts[0]
    spoilt = bytearray(coded.stored[0])
    spoilt[part.segments[0].planes[0].offset_bytes + 40] ^= 0xFF
    parts = (part._replace(digest=blake3(bytes(spoilt)).digest()), *coded.manifest.parts[1:])
    changed = CodedTensors(
        coded.manifest._replace(parts=parts), (bytes(spoilt), *coded.stored[1:]), coded.contents
    )
    sent = Sent(bench.device, changed)
    before = bench.device.read_back(0, sent.weights_bytes)
    sent.place(Tier.DRAFT).wait()
    assert sent.word() == FRAME_DAMAGED
    assert np.array_equal(bench.device.read_back(0, sent.weights_bytes), before)


def test_images_of_planes_are_placed_among_stored_ones(bench: Bench) -> None:
    plain = {"norm": ("BF16", "whole", weights_like("BF16", 777))}
    coded = code_tensors({**plain, "q": ("BF16", "bf16.3", weights_like("BF16", FRAME_ELEMENTS + 5))})
    sent = Sent(bench.device, coded)
    draft = sent.part(Tier.DRAFT)
    image = plan_image(coded.manifest, draft, sent.starts)
    begin = sent.at
    sent.at += align(image.size_bytes, PAGE_BYTES)
    room = sent.ring[begin : begin + image.size_bytes]
    fill_image(image, coded.manifest, draft, sent.starts, memoryview(coded.stored[0]), room)
    bench.device.place([Placed(image, begin), sent.placed(sent.part(Tier.REFINE))]).wait()
    sent.assert_is(Tier.REFINE)
    assert plan_plain(coded.manifest, draft, sent.starts) is None


def test_what_is_in_use_is_replaced_only_behind_its_use(bench: Bench) -> None:
    sent = Sent(bench.device, code_tensors({"q": MIXED["q"]}))
    stream, size_bytes = bench.stream(), MIXED["q"][2].size
    bench.device.order_after(sent.place(Tier.DRAFT), stream)
    go_on = bench.busy(stream)
    seen = bench.read(stream, 0, size_bytes)
    refined = sent.place(Tier.REFINE, after=(bench.device.record(stream),))
    assert not refined.is_done()
    go_on()
    assert np.array_equal(seen(), sent.coded.expected(Tier.DRAFT)[:size_bytes])
    refined.wait()
    sent.assert_is(Tier.REFINE)


def test_statistics_count_what_is_stored(bench: Bench) -> None:
    sent = Sent(bench.device, code_tensors({"q": MIXED["q"]}))
    for tier in (Tier.DRAFT, Tier.REFINE):
        sent.place(tier).wait()
    figures = bench.device.statistics()
    stored = sum(map(len, sent.coded.stored))
    assert figures.num_images == 2
    assert stored < figures.sent_bytes < stored + 2000
    assert figures.written_bytes == 2 * MIXED["q"][2].size
