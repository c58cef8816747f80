"""A version's record of starts and failures, and the ledger of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from teneral.handlers.pool.deployment import Deployment
from teneral.handlers.pool.memory import Budget
from teneral.handlers.pool.repository import Release
from teneral.handlers.pool.values import DeviceShare, Model
from teneral.runtime.config import ServeConfig


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment(
        Model("m", "/m"), Release(None, str(tmp_path), "1", 0), ServeConfig(model=str(tmp_path))
    )


def test_a_start_that_fails_is_retried_after_1_2_4_up_to_300_s(deployment: Deployment) -> None:
    waits = []
    for _ in range(11):
        deployment.start_failed("no memory", 1000.0)
        waits.append(deployment.retry_at_s - 1000.0)
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_three_failures_in_a_row_make_a_model_fail_until_it_answers(deployment: Deployment) -> None:
    states = []
    for _ in range(3):
        deployment.start_failed("no memory", 0.0)
        states.append((deployment.is_failing, deployment.reason))
    assert states == [(False, "no memory"), (False, "no memory"), (True, "no memory")]
    deployment.answered(is_error=False)
    assert (deployment.is_failing, deployment.reason, deployment.state()) == (False, "", "asleep")


@pytest.mark.parametrize(
    ("answers", "errors", "too_many"), [(19, 19, False), (20, 1, False), (20, 2, True), (100, 5, False)]
)
def test_a_version_fails_too_often_above_5_percent_of_20_answers(
    deployment: Deployment, answers: int, errors: int, too_many: bool
) -> None:
    for number in range(answers):
        deployment.answered(is_error=number < errors)
    assert deployment.fails_too_often is too_many


def test_a_reservation_counts_until_it_is_released_and_no_two_pass_the_budget() -> None:
    budget = Budget(100)
    assert budget.reserve("a", 60)
    assert not budget.reserve("b", 60), "two starts never count on the same bytes"
    assert budget.reserve("b", 40)
    assert budget.free_bytes == 0
    budget.release("a")
    budget.release("a")
    assert budget.free_bytes == 60


def test_shares_of_a_device_are_one_whole_at_most() -> None:
    budget = Budget(100)
    assert budget.reserve("a", 10, DeviceShare("cuda:0", 60))
    assert not budget.reserve("b", 10, DeviceShare("cuda:0", 41))
    assert budget.free_bytes == 90, "what is refused is not half reserved"
    assert budget.reserve("b", 10, DeviceShare("cuda:0", 40))
    assert budget.reserve("c", 10, DeviceShare("cuda:1", 41))
    assert budget.shares() == {"cuda:0": 100, "cuda:1": 41}
    budget.release("a")
    assert (budget.free_percent("cuda:0"), budget.shares()) == (60, {"cuda:0": 40, "cuda:1": 41})


def test_memory_counts_as_measured_where_that_is_more_than_reserved() -> None:
    budget = Budget(100)
    budget.measure("unknown", 50)
    assert budget.reserve("a", 60)
    budget.measure("a", 20)
    assert (budget.charge_of("a"), budget.used_bytes, budget.free_bytes) == (60, 20, 40)
    budget.measure("a", 90)
    assert (budget.charge_of("a"), budget.used_bytes, budget.free_bytes) == (90, 90, 10)
    budget.keep("b", 30)
    assert budget.free_bytes == -20, "what runs already is kept, whether it fits or not"
    assert not budget.reserve("c", 1)
