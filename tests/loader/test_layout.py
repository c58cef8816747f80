"""The places of tensors, and their division into parts."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from teneral.loader.format.layout import (
    FINE_PART_ELEMENTS,
    MAX_FINE_PARTS,
    arrange_tensors,
    cut_parts,
    cut_rows,
    fine_part_elements,
)
from teneral.loader.format.manifest import (
    FRAME_ELEMENTS,
    MAX_PART_DECODED_BYTES,
    MAX_PART_ELEMENTS,
    MAX_PART_SEGMENTS,
    Encoding,
    Tensor,
)


def tensor(index: int, dtype: str, num_elements: int) -> Tensor:
    return Tensor(index, f"t{index}", dtype, (num_elements,), 0, Encoding.WHOLE, 0)


SIZES = st.one_of(
    st.integers(0, 3),
    st.integers(0, 200_000),
    st.integers(MAX_PART_ELEMENTS - 100_000, 3 * MAX_PART_ELEMENTS),
)


@given(st.lists(st.tuples(st.sampled_from(["U8", "BF16", "F32", "F64"]), SIZES), max_size=12))
def test_parts_hold_every_element_once_in_order_and_within_their_bounds(wanted) -> None:
    tensors = [tensor(index, dtype, size) for index, (dtype, size) in enumerate(wanted)]
    reached = dict.fromkeys(range(len(tensors)), 0)
    last = (0, 0)
    for part in cut_parts(tensors):
        assert part
        assert sum(stretch.count for stretch in part) <= MAX_PART_ELEMENTS
        assert sum(stretch.size_bytes for stretch in part) <= MAX_PART_DECODED_BYTES
        for stretch in part:
            index = stretch.tensor.index
            assert stretch.count > 0
            assert stretch.start == reached[index]
            assert stretch.start % FRAME_ELEMENTS == 0
            assert (index, stretch.start) >= last
            last = (index, stretch.start)
            reached[index] += stretch.count
    assert reached == {one.index: one.num_elements for one in tensors}


@given(st.lists(SIZES, max_size=12))
def test_parts_are_filled_up_to_the_last_whole_frame(sizes: list[int]) -> None:
    parts = list(cut_parts([tensor(index, "BF16", size) for index, size in enumerate(sizes)]))
    for part in parts[:-1]:
        assert sum(stretch.count for stretch in part) > MAX_PART_ELEMENTS - FRAME_ELEMENTS


def test_a_part_of_wide_elements_is_cut_by_its_bytes() -> None:
    (first, *_) = cut_parts([tensor(0, "F64", MAX_PART_ELEMENTS)])
    assert first[0].size_bytes == MAX_PART_DECODED_BYTES


def test_a_part_holds_no_more_segments_than_a_reader_accepts() -> None:
    parts = list(cut_parts([tensor(index, "U8", 1) for index in range(MAX_PART_SEGMENTS + 1)]))
    assert [len(part) for part in parts] == [MAX_PART_SEGMENTS, 1]


def test_tensors_are_numbered_group_by_group_and_placed_aligned() -> None:
    groups, tensors = arrange_tensors(
        {
            "lm_head.weight": ("BF16", (7, 3)),
            "model.layers.0.mlp.up_proj.weight": ("BF16", (5, 3)),
            "model.layers.0.mlp.gate_proj.weight": ("BF16", (5, 3)),
            "model.embed_tokens.weight": ("F32", (7, 3)),
        },
        lambda name, dtype, shape: Encoding.BYTES if dtype == "F32" else Encoding.WHOLE,
    )
    assert [group.name for group in groups] == ["embed", "layers.0", "head"]
    assert [one.index for one in tensors] == [0, 1, 2, 3]
    assert [one.group for one in tensors] == [0, 1, 1, 2]
    assert tensors[0].encoding is Encoding.BYTES
    assert [tensors[index].name for index in groups[1].tensors] == [
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ]
    assert [one.offset_bytes for one in tensors] == [0, 0, 64, 0]
    assert [group.slab_bytes for group in groups] == [128, 128, 64]


@given(st.lists(SIZES, max_size=6), st.integers(1, 40))
def test_parts_can_be_kept_small(sizes: list[int], frames: int) -> None:
    most = frames * FRAME_ELEMENTS
    tensors = [tensor(index, "BF16", size) for index, size in enumerate(sizes)]
    parts = list(cut_parts(tensors, max_elements=most))
    assert sum(stretch.count for part in parts for stretch in part) == sum(sizes)
    assert all(sum(stretch.count for stretch in part) <= most for part in parts)


@given(st.integers(0, 2**34))
@example(2**29 + 1)
def test_small_parts_grow_with_their_group_and_stay_few(size: int) -> None:
    most = fine_part_elements([tensor(0, "BF16", size)])
    assert FINE_PART_ELEMENTS <= most <= MAX_PART_ELEMENTS
    assert most % FRAME_ELEMENTS == 0
    assert -(-size // most) <= MAX_FINE_PARTS or most == MAX_PART_ELEMENTS


@given(
    st.lists(
        st.tuples(st.sampled_from(["U8", "BF16"]), st.integers(1, 40), st.integers(0, 40 * FRAME_ELEMENTS)),
        max_size=4,
    )
)
@example([("U8", 32, 5760 * 90 * 16), ("U8", 128, 5760 * 90), ("U8", 2, 2 * MAX_PART_ELEMENTS)])
def test_a_row_needs_its_own_parts_and_the_two_frames_at_its_ends(wanted) -> None:
    tensors = [
        Tensor(index, f"t{index}", dtype, (num, row), 0, Encoding.WHOLE, 0)
        for index, (dtype, num, row) in enumerate(wanted)
    ]
    parts = list(cut_rows(tensors))
    assert all(len(part) == 1 for part in parts)
    for each, (_, num, row) in zip(tensors, wanted, strict=True):
        own = [part[0] for part in parts if part[0].tensor is each]
        ends = [stretch.start + stretch.count for stretch in own]
        assert [stretch.start for stretch in own] == ([0, *ends[:-1]] if own else [])
        assert sum(stretch.count for stretch in own) == each.num_elements
        assert all(end % FRAME_ELEMENTS == 0 for end in ends[:-1])
        assert all(stretch.count <= MAX_PART_ELEMENTS for stretch in own)
        for number in range(num):
            held = [
                stretch.count
                for stretch in own
                if stretch.start < (number + 1) * row and number * row < stretch.start + stretch.count
            ]
            assert sum(held) <= row + 2 * FRAME_ELEMENTS
