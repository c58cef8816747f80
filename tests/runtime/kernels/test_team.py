"""Threads of a team see what the others have written before they met; and a team that is not complete does nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba", reason="kernels need the extra [cpu]")

import numba

from teneral.runtime.kernels import team as team_module
from teneral.runtime.kernels.team import assemble, meet, new_team, reset, share


@numba.njit(parallel=True)
def cumulate(team: Any, size: int, rows: Any) -> bool:
    """Each row is made of all of the row before it, by all threads."""
    reset(team)
    done = np.zeros(size, np.int8)
    for thread in numba.prange(size):
        if assemble(team, size):
            for row in range(1, rows.shape[0]):
                begin, end = share(rows.shape[1], thread, size)
                for i in range(begin, end):
                    rows[row, i] = (rows[row - 1].sum() + i) % 1_000_003
                meet(team, size)
            done[thread] = 1
    return bool(done.all())


def cumulated(num_rows: int, num_columns: int) -> np.ndarray:
    rows = np.zeros((num_rows, num_columns), np.int64)
    for row in range(1, num_rows):
        rows[row] = (rows[row - 1].sum() + np.arange(num_columns)) % 1_000_003
    return rows


@pytest.mark.parametrize("size", range(1, numba.config.NUMBA_NUM_THREADS + 1))
def test_what_is_written_before_a_meeting_is_read_after_it(size: int) -> None:
    numba.set_num_threads(size)
    team, rows = new_team(), np.zeros((3_000, 7), np.int64)
    for _ in range(3):  # a team is used again
        assert cumulate(team, size, rows)
        assert np.array_equal(rows, cumulated(3_000, 7))
        rows[:] = 0


def test_threads_that_are_fewer_than_the_team_do_nothing_and_do_not_wait_for_ever() -> None:
    numba.set_num_threads(1)
    rows = np.zeros((10, 4), np.int64)
    assert not cumulate(new_team(), 2, rows)
    assert not rows.any()


@pytest.mark.parametrize("num_items", [0, 1, 7, 100])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_all_items_once(num_items: int, size: int) -> None:
    shares = [team_module.share.py_func(num_items, thread, size) for thread in range(size)]
    assert [i for begin, end in shares for i in range(begin, end)] == list(range(num_items))
