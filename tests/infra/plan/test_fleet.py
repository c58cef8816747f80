"""`teneral pool plan --fleet` and `--ways`: nodes, paces, bytes and costs against cases worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from teneral import cli
from teneral.handlers.pool.values import Model
from teneral.infra.plan.fleet import SCALING, Scaling, fetch_all, parse_fleet
from teneral.infra.plan.instance_model import Profile, profile_of
from teneral.infra.plan.outcome import Outcome, parse_price
from teneral.infra.plan.search import three_ways
from teneral.infra.plan.simulate import simulate
from teneral.infra.plan.trace import ArrivedRequest
from teneral.loader.errors import UsageError

PROFILE = Profile(start_s=2.0, start_cpu_s=2.0, prefill_tokens_s=100.0, decode_tokens_s=((1, 10.0),))
GB = 10**9


def burst(number: int, fleet: str, profile: Profile = PROFILE) -> tuple[list[float], Outcome]:
    """First tokens of requests that come together, each to an instance of its own."""
    model = Model("m", "/m", max_instances=number, target_concurrency=1, max_concurrency=1)
    requests = [ArrivedRequest(0.0, "m", 0, 101) for _ in range(number)]
    outcome = simulate(requests, {"m": model}, {"m": profile}, fleet=parse_fleet(fleet))["m"]
    return sorted(outcome.first_token_s), outcome


def test_a_platform_decides_when_its_clock_ticks() -> None:
    scaling = Scaling(tick_s=4.0, zero_tick_s=2.0)
    assert [scaling.next_tick_s(now_s, 0) for now_s in (0.0, 1.0, 1.5, 3.5)] == [1.0, 1.0, 3.0, 5.0]
    assert [scaling.next_tick_s(now_s, 1) for now_s in (0.0, 2.0, 3.0)] == [2.0, 2.0, 6.0]
    assert SCALING["pool"].next_tick_s(0.3, 0) == 0.3
    assert burst(2, "nodes=2,zero_tick_s=2")[0] == pytest.approx([3.0, 3.0]), (
        "1 s until the tick, a start of 2 s"
    )


def test_a_platform_begins_no_more_starts_than_its_rate_allows() -> None:
    assert burst(4, "nodes=4,burst=2,per_s=0.5")[0] == pytest.approx([2.0, 2.0, 4.0, 6.0])


def test_each_node_has_standby_processes_of_its_own() -> None:
    profile = profile_of({"standby": 1, "refill_s": 5.0}, "here", PROFILE)
    assert burst(3, "nodes=2,per_node=2", profile)[0] == pytest.approx([2.0, 2.0, 7.0])


@pytest.mark.parametrize(
    ("weights", "last_s", "store_bytes", "peer_bytes"),
    [
        ("store", 4 * 1.09, 4 * GB, 0),  # four copies on the store's link, and 9 % of overhead
        ("cache", 2 * 1.09, 2 * GB, 0),  # one a node; the other start of the node waits for it
        ("peers", 1.09, GB, GB),  # one for the zone; the other node receives it at half of its link's rate
    ],
)
def test_starts_read_the_store_once_for_all_that_share_its_bytes(
    weights: str, last_s: float, store_bytes: int, peer_bytes: int
) -> None:
    profile = profile_of({"start_s": 0.5, "bytes": GB, "link_bytes_s": GB}, "here", PROFILE)
    times, outcome = burst(4, f"nodes=2,per_node=2,node_bytes_s=2e9,weights={weights}", profile)
    assert times == pytest.approx([last_s] * 4)
    assert (outcome.store_bytes, outcome.peer_bytes) == (store_bytes, peer_bytes)


def test_a_later_start_finds_the_bytes_on_its_node() -> None:
    profile = profile_of({"start_s": 0.5, "bytes": GB, "link_bytes_s": GB}, "here", PROFILE)
    model = Model("m", "/m", max_instances=1, idle_timeout_s=10)
    requests = [ArrivedRequest(t_s, "m", 0, 1) for t_s in (0.0, 100.0)]
    fleet = parse_fleet("nodes=2,weights=cache")
    outcome = simulate(requests, {"m": model}, {"m": profile}, fleet=fleet)["m"]
    assert list(outcome.first_token_s) == pytest.approx([1.09, 0.5])
    assert outcome.store_bytes == GB


def test_the_store_gives_a_copy_for_each_instance_node_or_zone() -> None:
    fleet = parse_fleet("nodes=4,per_node=2,zones=2,node_bytes_s=1e9")
    rows = {fetch.weights: fetch for fetch in fetch_all(fleet, GB, 2e9)}
    assert {name: fetch.store_bytes for name, fetch in rows.items()} == {
        "store": 8 * GB,
        "cache": 4 * GB,
        "peers": 2 * GB,
    }
    assert rows["store"].seconds == pytest.approx(4.0), (
        "8 GB at 2 GB/s; a node's two would take 2 s on its link"
    )
    assert rows["cache"].seconds == pytest.approx(2.0)
    assert rows["peers"].seconds == pytest.approx(1.0 + 0.008388608), (
        "and a piece of 8 MiB from one node to the other"
    )
    assert all(fetch.seconds is None for fetch in fetch_all(fleet, GB, float("inf")))
    thousand = parse_fleet("nodes=100,per_node=10,zones=4,node_bytes_s=1e9")
    copies = [fetch.store_bytes // GB for fetch in fetch_all(thousand, GB, 1e9)]
    assert copies == [1000, 100, 4]


@pytest.mark.parametrize(
    "text",
    ["", "nodes=0", "nodes=1001", "nodes=x", "nodes=2,zones=3", "nodes=1,size=2", "nodes=1,weights=tape",
     "nodes=1,scaling=x", "nodes=1,burst=3", "nodes=1,node_bytes_s=0", "nodes=1,tick_s=-1", "nodes=1,tick_s=nan"],
)  # fmt: skip
def test_a_fleet_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_fleet(text)


def test_instances_over_time_are_the_most_of_each_part() -> None:
    outcome = Outcome(counts=[(0.0, 1), (1.0, 3), (2.5, 0), (9.0, 2)])
    assert outcome.over_time(10.0, 5) == [3, 3, 0, 0, 2]


def test_three_ways_to_keep_capacity_cost_what_their_seconds_do() -> None:
    known = {"standby": 1, "refill_s": 1.0, "cold_start_s": 5.0, "bytes": GB}
    profile = profile_of(known, "here", PROFILE)
    requests = [ArrivedRequest(t_s, "m", 100, 11) for t_s in (0.0, 100.0)]  # 1 s of prompt, 1 s of decoding
    price = parse_price("3600/h", "36/h", "2/GB")
    found = three_ways(requests, Model("m", "/m", idle_timeout_s=60), profile, price)
    assert {name: choice.outcome.instance_s for name, choice in found.items()} == pytest.approx(
        {"warm": 102.0, "standby": 64.0 + 4.0, "cold": 67.0 + 7.0}
    )
    assert {name: choice.ttft_p99_s for name, choice in found.items()} == pytest.approx(
        {"warm": 1.0, "standby": 3.0, "cold": 6.0}
    )
    assert {name: choice.cost for name, choice in found.items()} == pytest.approx(
        {"warm": 102.0, "standby": 68.0 + 1.0 + 4.0, "cold": 74.0 + 4.0}
    ), "a standby process for 100 s, and 1 GB for each start"
    unknown = profile_of({"cold_start_s": 0}, "here", profile)
    assert set(three_ways(requests, Model("m", "/m"), unknown, price)) == {"warm", "standby"}


def test_the_command_compares_the_ways_in_a_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pool.toml"
    path.write_text('version = 1\n[models.m]\nsource = "/models/m"\nmax_instances = 4\n')
    command = [
        "pool",
        "plan",
        str(path),
        "--synthetic",
        "poisson:rate=2,duration=60",
        "--assume",
        "bytes=1e9",
    ]
    command += ["--assume", "link_bytes_s=1e9", "--ways", "--fleet"]
    assert cli.run([*command, "nodes=1,per_node=2"]) == 2
    assert "room for 2" in capsys.readouterr().err
    assert cli.run([*command, "nodes=2,per_node=2", "--cores", "2"]) == 2
    capsys.readouterr()
    spec = "nodes=2,per_node=2,weights=cache,node_bytes_s=1e9,scaling=lambda"
    assert cli.run([*command, spec, "--json", "--price", "0.1/h"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)["plans"][0]
    assert set(plan["ways"]) == {"warm", "cold"}
    assert plan["ways"]["warm"]["cold_share"] == 0.0
    assert len(plan["as_written"]["instances"]) == 24
    assert max(plan["as_written"]["instances"]) == plan["as_written"]["most_instances"]
    assert [row["store_bytes"] for row in plan["all_at_once"]] == [4 * GB, 2 * GB, GB]
    assert cli.run([*command, spec]) == 0
    printed = capsys.readouterr().out
    assert "not in the cost, for want of a price: standby processes, the store's bytes" in printed
    assert "4 starts at once" in printed
