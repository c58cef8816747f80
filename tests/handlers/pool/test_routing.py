"""Names, aliases, weights and sticky keys; what the front reads of a body."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter

import pytest

from teneral.handlers.http.errors import ApiError
from teneral.handlers.pool.file import parse_pool
from teneral.handlers.pool.proxy_request import Body
from teneral.handlers.pool.routing import Chooser, RoundRobin, RouteTarget, rendezvous

POOL = parse_pool(
    """
version = 1
[models.Plain]
source = "/models/plain"
[models.helper]
source = "/models/helper/{version}"
versions = "all"
[aliases]
one = "helper@8"
split = { Plain = 30, "helper@8" = 70 }
"""
)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("plain", RouteTarget("Plain")),
        ("PLAIN", RouteTarget("Plain")),
        ("helper@8", RouteTarget("helper", 8)),
        ("One", RouteTarget("helper", 8)),
        ("helper@08", None),
        ("helper@x", None),
        ("nothing", None),
    ],
)
def test_names_versions_and_aliases_lead_to_targets(name: str, target: RouteTarget | None) -> None:
    assert Chooser().target(POOL, name, None) == target


WEIGHTS = {7: 70, 8: 25, 9: 5}


def test_shares_of_requests_without_a_key_are_exact() -> None:
    chooser = Chooser()
    counts = Counter(chooser.version("m", WEIGHTS, None) for _ in range(10_000))
    assert counts == {7: 7000, 8: 2500, 9: 500}


def test_shares_of_keys_are_within_a_point_and_each_key_is_sticky() -> None:
    chooser = Chooser()
    first = {f"session-{n}": chooser.version("m", WEIGHTS, f"session-{n}") for n in range(10_000)}
    counts = Counter(first.values())
    for version, weight in WEIGHTS.items():
        assert abs(counts[version] / 100 - weight) < 1
    assert all(Chooser().version("m", WEIGHTS, key) == version for key, version in first.items())


def test_a_change_of_weights_moves_only_the_share_that_it_must() -> None:
    keys = [f"session-{n}" for n in range(10_000)]
    before = {key: rendezvous({7: 90, 8: 10}, key) for key in keys}
    after = {key: rendezvous({7: 80, 8: 20}, key) for key in keys}
    moved = [key for key in keys if before[key] != after[key]]
    assert all((before[key], after[key]) == (7, 8) for key in moved)
    assert 0.09 < len(moved) / len(keys) < 0.13


def test_weights_of_zero_are_never_chosen() -> None:
    turns: RoundRobin[str] = RoundRobin()
    assert {turns.next({"a": 0, "b": 100}) for _ in range(50)} == {"b"}
    assert {rendezvous({"a": 0, "b": 1}, str(n)) for n in range(50)} == {"b"}


def test_an_alias_is_split_by_its_weights() -> None:
    chooser = Chooser()
    counts = Counter(chooser.target(POOL, "split", None) for _ in range(1000))
    assert counts == {RouteTarget("Plain"): 300, RouteTarget("helper", 8): 700}


def test_a_body_keeps_its_bytes_but_for_the_model() -> None:
    data = (
        b'{"temperature":1.000,"model":"alias","messages":[{"role":"user","content":"\\u00e9"}],'
        b'"seed":12345678901234567890}'
    )
    body = Body.parse(data)
    assert body.model == "alias"
    renamed = body.named("own")
    assert b'"temperature":1.000' in renamed
    assert b"12345678901234567890" in renamed
    assert json.loads(renamed) == {**json.loads(data), "model": "own"}
    assert body.named("alias") is data


def test_fields_that_the_front_does_not_read_cost_nothing() -> None:
    data = b'{"model":"m",%s,"user":"u"}' % b",".join(b'"%x":1' % number for number in range(100_000))
    tracemalloc.start()
    try:
        body = Body.parse(data)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (body.model, body.session) == ("m", "u")
    assert held_bytes < 10_000
    assert json.loads(body.named("own")) == {**json.loads(data), "model": "own"}


def test_an_adapters_name_stays_with_the_body_and_is_no_part_of_the_models() -> None:
    body = Body.parse(b'{"model":"alias:legal","prompt":"x"}')
    assert body.model == "alias"
    assert json.loads(body.named("own")) == {"model": "own:legal", "prompt": "x"}
    assert body.named("alias") is body.data
    assert Body.parse(b'{"model":":legal"}').model == ":legal", "no model at all"


@pytest.mark.parametrize(
    ("body", "session"),
    [
        ({"user": "u"}, "u"),
        ({"user": "u", "teneral": {"session": "s"}}, "s"),
        ({"user": "u", "prompt_cache_key": "k"}, "k"),
        ({"user": "u", "prompt_cache_key": "k", "conversation": "c"}, "c"),
        ({"conversation": "c", "session_id": "i"}, "i"),
        ({"user": "u", "conversation": {"id": "c"}}, "u"),
        ({"teneral": {"session": 5}, "user": 3}, None),
        ({}, None),
    ],
)
def test_the_sticky_key_is_the_session_else_the_conversation_or_user(
    body: dict[str, object], session: str | None
) -> None:
    assert Body.parse(json.dumps(body).encode()).session == session


def test_beginnings_of_prompts_are_compared_at_three_lengths() -> None:
    def prefixes(prompt: str) -> list[bytes]:
        return Body.parse(json.dumps({"prompt": prompt}).encode()).prefixes()

    long, other = prefixes("x" * 5000), prefixes("x" * 2000 + "y" * 3000)
    assert len(long) == 3
    assert long[1:] == other[1:]
    assert long[0] != other[0]
    assert prefixes("short") == []


@pytest.mark.parametrize("data", [b"", b"[]", b'{"model": 5}', b"{", b'{"a":' * 5000, b"\xff"])
def test_a_body_that_cannot_be_read_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        Body.parse(data)
    assert caught.value.status == 400
