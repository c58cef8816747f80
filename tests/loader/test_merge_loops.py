"""Merging in one compiled pass writes what numpy's passes write, to the bit."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.test_codec import COUNTS, FLOAT_ENCODINGS, check_tiers, float_encoding, made_of
from tests.support.load import patience_s

from teneral.loader.format import float_planes
from teneral.loader.format.manifest import DTYPE_BITS, FRAME_ELEMENTS

pytest.importorskip("numba", reason="the extra [cpu] is not installed")


@pytest.fixture(scope="module")
def calls() -> Iterator[Counter[str]]:
    """How often each of the compiled functions was called, while they are used."""
    from teneral.loader.format import merge_loops

    merge_loops.use()
    functions = float_planes.one_pass
    assert functions is not None
    counted: Counter[str] = Counter()

    def first_of_bf16(*arguments: object) -> None:
        counted["first"] += 1
        functions.first_of_bf16(*arguments)

    def later(*arguments: object) -> None:
        counted["later"] += 1
        functions.later(*arguments)

    float_planes.one_pass = float_planes.OnePass(first_of_bf16, later)
    yield counted
    float_planes.one_pass = None


@pytest.mark.parametrize(("name", "first", "then"), [("bf16.3", 1, 1), ("bf16.0.3", 0, 1), ("f16.6", 0, 1)])
def test_they_are_called_where_the_planes_are_nibbles(
    calls: Counter[str], name: str, first: int, then: int
) -> None:
    calls.clear()
    check_tiers(name, made_of("weights", 2 * 1003, 1))
    assert (calls["first"], calls["later"]) == (2 * first, 2 * then)  # each tier is decoded twice


@pytest.mark.parametrize("name", FLOAT_ENCODINGS)
def test_every_encoding_gives_every_bit_back(calls: Counter[str], name: str) -> None:
    dtype, _, _ = float_encoding(name)
    check_tiers(name, made_of("noise", 1003 * DTYPE_BITS[dtype] // 8, 3))


@pytest.mark.parametrize("count", [1, 2, 3, FRAME_ELEMENTS - 1, FRAME_ELEMENTS + 1, 11 * FRAME_ELEMENTS + 7])
def test_frames_of_all_sizes(calls: Counter[str], count: int) -> None:
    check_tiers("bf16.3", made_of("noise", 2 * count, count))


@given(
    name=st.sampled_from(["bf16.3", "bf16.1.3", "f16.6", "f16.2.6"]),
    kind=st.sampled_from(["weights", "repetitions", "zeros", "noise"]),
    count=COUNTS,
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=60, deadline=None)
def test_nibbles_of_all_kinds(calls: Counter[str], name: str, kind: str, count: int, seed: int) -> None:
    check_tiers(name, made_of(kind, 2 * count, seed))


def test_nobody_who_does_not_ask_for_them_imports_numba() -> None:
    code = "import sys; from teneral.loader.format import codec; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patience_s(60))
