"""Going easy on a busy store: how many may ask at a time, and when."""

from __future__ import annotations

import math
import random
import threading
import time

import pytest
from tests.support.load import patience_s

from teneral.loader.sources.http.retry import Throttle


def refuse(throttle: Throttle, *, asked_s: float | None = None, wish_s: float | None = None) -> None:
    throttle.refused(asked_s=time.monotonic() if asked_s is None else asked_s, wish_s=wish_s)


def with_under_way(number: int) -> Throttle:
    throttle = Throttle()
    for _ in range(number):
        assert throttle.enter()
    return throttle


def test_a_store_that_was_never_busy_is_not_limited() -> None:
    assert with_under_way(100).limit == math.inf


def test_refusals_of_one_round_halve_the_requests_once() -> None:
    throttle = with_under_way(8)
    asked_s = time.monotonic()
    for _ in range(8):
        refuse(throttle, asked_s=asked_s)
    assert throttle.limit == 4
    refuse(throttle)
    assert throttle.limit == 2
    for _ in range(5):
        refuse(throttle)
    assert throttle.limit == 1


def test_successes_let_the_requests_grow_again_one_a_round_until_all_are_back() -> None:
    throttle = with_under_way(8)
    refuse(throttle)
    for _ in range(5):
        throttle.succeeded()
    assert 5 <= throttle.limit < 6
    for _ in range(30):
        throttle.succeeded()
    assert throttle.limit == math.inf


def test_one_refusal_stops_no_reader_and_the_second_in_a_row_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda _, most: most)  # the longest pauses that chance gives
    throttle = with_under_way(8)
    refuse(throttle)
    assert not throttle.is_pausing
    throttle.succeeded()
    refuse(throttle)
    assert not throttle.is_pausing
    refuse(throttle)
    assert throttle.is_pausing


def test_a_wish_of_the_store_is_for_all_at_once() -> None:
    throttle = with_under_way(1)
    refuse(throttle, wish_s=20)
    assert throttle.is_pausing


def test_who_comes_while_the_limit_is_reached_waits_for_who_leaves() -> None:
    throttle = with_under_way(2)
    refuse(throttle)
    assert throttle.limit == 1
    entered = threading.Event()
    thread = threading.Thread(target=lambda: throttle.enter() and entered.set())
    thread.start()
    throttle.leave()
    assert not entered.wait(0.05)  # the other one is still under way
    throttle.leave()
    assert entered.wait(patience_s(10))
    thread.join()


@pytest.mark.parametrize("wish_s", [None, 20.0])
def test_closing_lets_everybody_go(wish_s: float | None) -> None:
    throttle = with_under_way(1)
    refuse(throttle, wish_s=wish_s)
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(throttle.enter()))
    thread.start()
    throttle.close()
    thread.join(patience_s(10))
    assert results == [False]
    assert throttle.enter() is False
