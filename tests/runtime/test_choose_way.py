"""The ways of weights to where they are used, as a table."""

from __future__ import annotations

from typing import Any

import pytest

from teneral.runtime.instance.loading import Way, choose_way

USUAL: dict[str, Any] = {
    "device": "cpu",
    "is_shared": False,
    "can_map": False,
    "weights_bytes": None,
    "fits": True,
    "has_base": False,
}


@pytest.mark.parametrize(
    ("differs", "way"),
    [
        ({}, Way.HOST),
        ({"can_map": True}, Way.MAPPED),
        ({"is_shared": True}, Way.SHARED),
        ({"is_shared": True, "can_map": True}, Way.SHARED),
        ({"device": "cuda:0"}, Way.DEVICE),
        ({"device": "cuda:0", "can_map": True}, Way.DEVICE),
        ({"weights_bytes": 1000, "fits": False}, Way.PAGED),
        ({"weights_bytes": 1000, "fits": True}, Way.HOST),
        ({"weights_bytes": 1000, "fits": False, "can_map": True}, Way.PAGED),
        ({"weights_bytes": 1000, "fits": False, "has_base": True}, Way.HOST),
        ({"has_base": True}, Way.HOST),
    ],
)
def test_the_way_of_a_load(differs: dict[str, Any], way: Way) -> None:
    assert choose_way(**{**USUAL, **differs}) is way
