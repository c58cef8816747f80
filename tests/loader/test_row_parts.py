"""The parts that hold given rows."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.artifacts import build_artifact

from teneral.loader.load.plan import RowParts

ROWS, WIDTH = 90, 48


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(0, ROWS - 1), max_size=8),
    draft_elements=st.integers(WIDTH // 3, 3_000),
    refine_elements=st.integers(WIDTH // 3, 3_000),
    packed=st.booleans(),
    dtype=st.sampled_from(["BF16", "F32", "F4"]),
)
def test_the_parts_of_rows_are_those_that_share_an_element_with_them(
    rows: list[int], draft_elements: int, refine_elements: int, packed: bool, dtype: str
) -> None:
    layout = [("embed", {"before": ("BF16", (7,)), "w": (dtype, (ROWS, WIDTH)), "after": ("BF16", (9,))})]
    built = build_artifact(
        layout, packed=packed, draft_elements=draft_elements, refine_elements=refine_elements
    )
    tensor = built.manifest.by_name["w"]
    width = tensor.num_elements // ROWS
    wanted = {row * width + column for row in rows for column in range(width)}
    expected = set()
    everywhere = set()
    for part in built.manifest.parts:
        for segment in part.segments:
            if segment.tensor == tensor.index:
                everywhere.add(part.index)
                if wanted & set(range(segment.start, segment.start + segment.count)):
                    expected.add(part.index)
    table = RowParts(built.manifest, "w")
    assert table.holding(rows) == expected
    assert table.all == everywhere


def test_an_empty_tensor_is_in_no_part() -> None:
    built = build_artifact([("embed", {"w": ("BF16", (0, 8))})])
    assert RowParts(built.manifest, "w").all == frozenset()
    assert RowParts(built.manifest, "w").holding([]) == set()


@settings(max_examples=60, deadline=None)
@given(
    most=st.integers(1, 20),
    draft_elements=st.integers(WIDTH // 3, 3_000),
    refine_elements=st.integers(WIDTH // 3, 3_000),
)
def test_from_one_row_of_a_run_to_the_next_no_row_needs_another_part(
    most: int, draft_elements: int, refine_elements: int
) -> None:
    layout = [("embed", {"before": ("BF16", (7,)), "w": ("BF16", (ROWS, WIDTH))})]
    built = build_artifact(layout, draft_elements=draft_elements, refine_elements=refine_elements)
    table = RowParts(built.manifest, "w")
    runs = table.runs(most)
    assert 1 <= len(runs) <= most
    begins = [row for run in runs for row in run]
    assert begins == sorted(set(begins))
    assert begins[0] == 0
    for first, end in itertools.pairwise([*begins, ROWS]):
        assert table.holding(range(first, end)) == table.holding([first])
