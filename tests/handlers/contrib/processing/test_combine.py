from __future__ import annotations

import asyncio

import numpy as np
import pytest

from teneral.handlers.contrib.processing import amap_reduce, map_reduce, mean_vector
from teneral.runtime.errors import RequestError


def test_the_mean_is_weighted_and_of_unit_length():
    vectors = np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)
    mean = mean_vector(vectors, [3, 1])
    np.testing.assert_allclose(mean, np.array([3, 1]) / np.sqrt(10), rtol=1e-6)
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean_vector(vectors, [3, 1], normalize=False), [0.75, 0.25])


@pytest.mark.parametrize("weights", [[], [1], [0, 0], [-1, 2], [float("nan"), 1]])
def test_invalid_weights_are_refused(weights):
    with pytest.raises(RequestError):
        mean_vector(np.ones((2, 3), dtype=np.float32), weights)


def bracket(parts):
    return f"({' '.join(parts)})"


async def abracket(parts):
    await asyncio.sleep(0)
    return bracket(parts)


async def aupper(part):
    await asyncio.sleep(0)
    return part.upper()


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ("", ""),
        ("a", "A"),
        ("ab", "(A B)"),
        ("abcd", "((A B C) D)"),
        ("abcdefghij", "(((A B C) (D E F) (G H I)) J)"),
    ],
)
async def test_parts_are_reduced_in_rounds_and_in_their_order(parts, expected):
    assert map_reduce(parts, each=str.upper, together=bracket, fan_in=3) == expected
    assert await amap_reduce(parts, each=aupper, together=abracket, fan_in=3) == expected


async def test_no_more_parts_are_worked_on_at_a_time_than_allowed():
    running, most = 0, 0

    async def each(part):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return part

    await amap_reduce(["x"] * 30, each=each, together=abracket, concurrent=4)
    assert most == 4


async def test_the_first_failure_ends_the_others():
    done = []

    async def each(part):
        if part == "bad":
            raise RequestError("no")
        await asyncio.Event().wait()
        done.append(part)

    with pytest.raises(RequestError, match="no"):
        await amap_reduce(["a", "bad", "b"], each=each, together=abracket)
    assert done == []


async def test_no_more_parts_are_taken_than_anybody_means():
    with pytest.raises(RequestError, match="parts"):
        map_reduce(("x" for _ in range(10_001)), each=str, together=bracket)
    with pytest.raises(RequestError, match="fan_in"):
        map_reduce("ab", each=str, together=bracket, fan_in=1)
