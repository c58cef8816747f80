"""Several calls at the same time end as one after another would."""

from __future__ import annotations

import threading

import pytest
from tests.support.load import patience_s

from teneral.loader.process.cpu import parallel_map


@pytest.mark.parametrize("num_things", [0, 1, 2, 40])
def test_results_come_in_the_order_of_the_things(num_things: int) -> None:
    assert parallel_map(str, range(num_things), num_threads=4) == [str(each) for each in range(num_things)]


def test_calls_run_at_the_same_time() -> None:
    meeting = threading.Barrier(4)  # breaks, and raises, unless four are there
    assert parallel_map(lambda _: meeting.wait(patience_s(10)) >= 0, range(8), num_threads=4) == [True] * 8


def test_one_thing_needs_no_other_thread() -> None:
    assert parallel_map(lambda _: threading.current_thread(), "x", num_threads=8) == [
        threading.current_thread()
    ]


def test_the_first_error_counts_and_no_call_is_begun_after_one() -> None:
    seen = []
    both = threading.Barrier(2)

    def fail(number: int) -> None:
        seen.append(number)
        both.wait(patience_s(10))
        raise ValueError(str(number))

    with pytest.raises(ValueError, match=r"^0$"):
        parallel_map(fail, range(100), num_threads=2)
    assert sorted(seen) == [0, 1]
