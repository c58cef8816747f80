"""`teneral pool plan`: the simulator against cases worked out by hand, traces, the search and the command."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral import cli
from teneral.handlers.pool.policy import max_starts
from teneral.handlers.pool.values import InstanceSize, Model
from teneral.infra.plan.fleet import parse_fleet
from teneral.infra.plan.instance_model import Profile, profile_of, read_profiles
from teneral.infra.plan.outcome import Outcome, Price, cost_of, parse_price
from teneral.infra.plan.search import candidates, cheapest, pareto, search
from teneral.infra.plan.simulate import simulate
from teneral.infra.plan.trace import ArrivedRequest, read_trace, synthesize
from teneral.loader.errors import UsageError

TRACES = Path(__file__).parents[4] / "shared" / "traces"
PROFILE = Profile(
    start_s=2.0,
    start_cpu_s=2.0,
    prefill_tokens_s=100.0,
    decode_tokens_s=((1, 10.0), (4, 20.0)),
    work_cores=1.0,
)


def one(requests: list[ArrivedRequest], model: Model, profile: Profile = PROFILE, **more: Any) -> Outcome:
    return simulate(requests, {"m": model}, {"m": profile}, **more)["m"]


def at(t_s: float, prompt: int = 100, output: int = 11) -> ArrivedRequest:
    return ArrivedRequest(t_s, "m", prompt, output)


def test_a_cold_request_waits_for_the_start_and_a_warm_one_does_not() -> None:
    outcome = one([at(0), at(10)], Model("m", "/m", idle_timeout_s=60))
    assert list(outcome.first_token_s) == pytest.approx([2.0 + 1.0, 1.0])
    assert (outcome.cold, outcome.starts) == (1, 1)


def test_an_instance_is_paid_for_from_its_start_to_its_idle_end() -> None:
    outcome = one([at(0)], Model("m", "/m", idle_timeout_s=60), until_s=1000)
    # 2 s of start, 1 s of prefill, 1 s of decoding (10 tokens after the first), 60 s idle
    assert outcome.instance_s == pytest.approx(64.0)
    assert outcome.busy_s == pytest.approx(2.0)


def test_an_instance_that_ended_is_started_again() -> None:
    outcome = one([at(0), at(100)], Model("m", "/m", idle_timeout_s=60))
    assert (outcome.cold, outcome.starts) == (2, 2)
    warm = one([at(10), at(100)], Model("m", "/m", min_warm=1, idle_timeout_s=60))
    assert (warm.cold, warm.starts) == (0, 1)


def test_sequences_of_a_batch_slow_each_other_down_as_measured() -> None:
    model = Model("m", "/m", min_warm=1, max_instances=1, target_concurrency=8)
    requests = [ArrivedRequest(10.0, "m", 0, 41) for _ in range(4)]
    outcome = one(requests, model, until_s=100.0)
    assert outcome.busy_s == pytest.approx(4 * 40 / 20.0), "160 tokens at 20 a second"
    alone = one(requests[:1], model, until_s=100.0)
    assert alone.busy_s == pytest.approx(40 / 10.0)


def test_prompts_of_an_instance_are_computed_one_after_the_other() -> None:
    model = Model("m", "/m", min_warm=1, max_instances=1)
    outcome = one([at(10), at(10)], model, until_s=100.0)
    assert list(outcome.first_token_s) == pytest.approx([1.0, 2.0])
    # 2 s of prompts, then 10 tokens of each: 1 s alone, in a batch of two at 2/3 of the speed
    assert outcome.busy_s == pytest.approx(2.0 + 1.5)


def test_requests_that_wait_for_one_step_share_its_overhead() -> None:
    profile = profile_of({"overhead_s": 4.0}, "here", PROFILE)
    outcome = one([at(10), at(11), at(12)], Model("m", "/m", min_warm=1, max_instances=1), profile)
    # a step from 10 to 15, and one for both others from 15: 4 s of overhead, and 1 s for each prompt
    assert list(outcome.first_token_s) == pytest.approx([5.0, 9.0, 9.0])


def test_starts_and_first_tokens_vary_as_measured() -> None:
    profile = profile_of({"starts_s": [3.0, 6.0, 12.0], "prompt_ratios": [0.5, 1.0, 2.0]}, "here", PROFILE)
    model = Model("m", "/m", idle_timeout_s=60)
    requests = [at(1000.0 * number, output=1) for number in range(200)]
    times = one(requests, model, profile).first_token_s
    expected = sorted({start + first for start in (1.0, 2.0, 4.0) for first in (0.5, 1.0, 2.0)})
    assert sorted({round(seconds, 6) for seconds in times}) == expected, "at the median 2 s and 1 s"
    assumed = one(requests, model, profile_of({"start_s": 9.0, "prompt_ratios": []}, "here", profile))
    assert set(assumed.first_token_s) == {10.0}, "a start that is assumed does not vary"


def starts_at_once(number: int, profile: Profile = PROFILE, **more: float) -> list[float]:
    """First tokens of requests that come together, each to an instance of its own; their work takes no core."""
    profile = profile_of({"work_cores": 1e-9}, "here", profile)
    model = Model("m", "/m", max_instances=number, target_concurrency=1, max_concurrency=1)
    requests = [ArrivedRequest(0.0, "m", 0, 101) for _ in range(number)]
    return sorted(one(requests, model, profile, **more).first_token_s)


def test_starts_on_one_host_share_its_cores() -> None:
    assert starts_at_once(3) == pytest.approx([2.0, 2.0, 2.0]), "each has a machine"
    assert starts_at_once(3, cores=3.0) == pytest.approx([2.0, 2.0, 2.0])
    busy = profile_of({"other_cores": 2.0, "work_cores": 1e-9}, "here", PROFILE)
    assert starts_at_once(3, busy, cores=3.0) == pytest.approx([6.0, 6.0, 6.0]), "the figures are of one core"
    both_s, last_s = starts_at_once(2, cores=1.0)
    assert (both_s, last_s) == pytest.approx((4.0, 4.0)), "two starts of 2 CPU-s on one core"


def test_no_more_starts_of_one_host_run_at_once_than_the_supervisor_lets() -> None:
    assert max_starts(1) == 2
    assert starts_at_once(3, cores=1.0) == pytest.approx([4.0, 4.0, 6.0])
    light = profile_of({"start_cpu_s": 0.2}, "here", PROFILE)
    assert starts_at_once(5, light, cores=2.0) == pytest.approx([2.0, 2.0, 2.0, 2.0, 4.0])


def test_starts_on_one_host_share_its_link() -> None:
    profile = profile_of({"start_s": 0.1, "bytes": 10**9, "link_bytes_s": 1.09e9, "start_cpu_s": 0.1}, "here")
    assert starts_at_once(2, profile) == pytest.approx([1.0, 1.0])
    assert starts_at_once(2, profile, cores=2.0) == pytest.approx([2.0, 2.0])
    half = profile_of({"start_s": 2.0}, "here", profile)
    assert starts_at_once(2, half, cores=2.0) == pytest.approx([2.0, 2.0]), "each leaves half of it"


def test_a_standby_that_was_taken_must_be_replaced_first() -> None:
    profile = profile_of({"standby": 1, "refill_s": 5.0}, "here", PROFILE)
    assert starts_at_once(2, profile) == pytest.approx([2.0, 7.0])


def test_an_instance_takes_requests_before_its_weights_are_there() -> None:
    profile = profile_of({"ready_share": 0.25}, "here", PROFILE)
    outcome = one([at(0), at(1.0), at(20.0)], Model("m", "/m", max_instances=1, idle_timeout_s=60), profile)
    whole = one([at(0), at(1.0), at(20.0)], Model("m", "/m", max_instances=1, idle_timeout_s=60))
    assert (outcome.cold, whole.cold) == (1, 2), "the second finds an instance that is ready, from 0.5 s on"
    # 1 s of prefill each, one after the other
    assert list(outcome.first_token_s) == pytest.approx([2.0 + 1.0, 1.0 + 2.0, 1.0])
    assert list(whole.first_token_s) == pytest.approx(list(outcome.first_token_s))
    assert outcome.instance_s == pytest.approx(whole.instance_s)


def test_warm_instances_are_ready_when_the_trace_begins() -> None:
    outcome = one([at(0)], Model("m", "/m", min_warm=2, max_instances=2), until_s=100.0)
    assert (outcome.cold, outcome.starts) == (0, 2)
    assert list(outcome.first_token_s) == pytest.approx([1.0])
    assert outcome.instance_s == pytest.approx(200.0)


def test_a_hybrid_pool_is_warm_when_a_regular_request_comes() -> None:
    """One request every 20 minutes: after ten gaps, an instance of about a minute has each one find it warm."""
    requests = [at(1200.0 * number + 30) for number in range(40)]
    fixed = one(requests, Model("m", "/m", idle_timeout_s=300), until_s=1200.0 * 40)
    hybrid = one(requests, Model("m", "/m", idle_timeout_s=300, policy="hybrid"), until_s=1200.0 * 40)
    always = one(requests, Model("m", "/m", idle_timeout_s=1300), until_s=1200.0 * 40)
    assert (fixed.cold, hybrid.cold, always.cold) == (40, 11, 1)
    assert hybrid.instance_s < fixed.instance_s / 2 < always.instance_s / 4
    busy = [at(5.0 * number) for number in range(100)]
    unlike = [one(busy, Model("m", "/m", policy=policy), until_s=3600) for policy in ("fixed", "hybrid")]
    assert unlike[0].first_token_s == unlike[1].first_token_s, "gaps of seconds are kept through"
    assert unlike[1].instance_s < unlike[0].instance_s, "and the end comes after a minute"


def test_requests_wait_in_order_and_are_refused_after_their_time() -> None:
    model = Model(
        "m", "/m", min_warm=1, max_instances=1, target_concurrency=1, max_concurrency=1, queue_timeout_s=5.0
    )
    outcome = one([at(10.0) for _ in range(4)], model)  # 2 s each
    assert list(outcome.first_token_s) == pytest.approx([1.0, 3.0, 5.0])
    assert outcome.refused == 1


@settings(max_examples=60, deadline=None)
@given(
    times=st.lists(st.floats(0, 5000), min_size=1, max_size=60),
    min_warm=st.integers(0, 3),
    more=st.integers(1, 4),
    buffer=st.integers(0, 1),
    cores=st.none() | st.floats(0.5, 8),
    policy=st.sampled_from(["fixed", "hybrid"]),
    ready_share=st.sampled_from([0.1, 1.0]),
    fleet=st.sampled_from(["", "weights=cache", "zones=2,weights=peers,scaling=keda", "burst=1,per_s=0.1"]),
)
def test_every_request_ends_once_whatever_the_pool(
    times: list[float],
    min_warm: int,
    more: int,
    buffer: int,
    cores: float | None,
    policy: str,
    ready_share: float,
    fleet: str,
) -> None:
    known = {
        "ready_share": ready_share,
        "bytes": 10**9,
        "link_bytes_s": 10**8,
        "prompt_ratios": [0.5, 1, 3],
    }
    profile = profile_of(known, "here", PROFILE)
    host = {"fleet": parse_fleet(f"nodes=4,per_node=2,{fleet}")} if fleet else {"cores": cores}
    model = Model(
        "m",
        "/m",
        min_warm=min_warm,
        max_instances=min_warm + more,
        buffer=buffer,
        idle_timeout_s=20,
        policy=policy,
        target_concurrency=2,
    )
    requests = [at(t_s, output=30) for t_s in sorted(times)]
    outcome = one(requests, model, profile, **host)
    assert len(outcome.first_token_s) + outcome.refused == outcome.requests == len(requests)
    assert outcome.most <= model.max_instances
    assert all(seconds >= 0 for seconds in outcome.first_token_s)
    assert outcome.busy_s <= outcome.instance_s + 1e-6
    assert outcome.store_bytes + outcome.peer_bytes <= outcome.starts * profile.bytes
    assert max(outcome.over_time(outcome.counts[-1][0], 10)) == outcome.most
    again = one(requests, model, profile, **host)
    assert (again.cold, again.instance_s) == (outcome.cold, outcome.instance_s)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the Azure LLM traces are not next to this checkout")
def test_the_real_traces_are_read() -> None:
    code = read_trace(TRACES / "AzureLLMInferenceTrace_code.csv", model="m")
    conv = read_trace(TRACES / "AzureLLMInferenceTrace_conv.csv", model="m")
    assert (len(code), len(conv)) == (8819, 19366)
    gaps = [b.t_s - a.t_s for a, b in itertools.pairwise(code)]
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(13.15, abs=0.05)
    assert max(gaps) == pytest.approx(217, abs=1)
    outcome = one(
        code, Model("m", "/m", max_instances=20, idle_timeout_s=60), Profile(prefill_tokens_s=20_000)
    )
    assert outcome.requests == 8819
    assert 0 < outcome.cold_share < 0.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("t,model,prompt_tokens,output_tokens\n5,a,1,2\n4,,3,4\n", [(0, "m", 3), (1, "a", 1)]),
        ('{"t": 1, "prompt_tokens": 7, "output_tokens": 2}\n\n', [(0, "m", 7)]),
        ("app,func,end_timestamp,duration\nx,y,10.5,0.5\n", [(0, "m", 0)]),
    ],
)
def test_traces_of_each_format_are_read(
    text: str, expected: list[tuple[float, str, int]], tmp_path: Path
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    assert [(r.t_s, r.model, r.prompt_tokens) for r in read_trace(path, model="m")] == expected


@pytest.mark.parametrize(
    "text",
    ["", "a,b\n1,2\n", "t,prompt_tokens,output_tokens\nx,1,2\n", "t,prompt_tokens,output_tokens\nnan,1,2\n",
     "t,prompt_tokens,output_tokens\n1,-1,2\n", "t,prompt_tokens,output_tokens\n1\n", '{"t": 1}\n', "{\n"],
)  # fmt: skip
def test_a_trace_that_cannot_be_read_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_trace(path, model="m")


def test_synthetic_arrivals_have_their_rates_and_are_the_same_again() -> None:
    poisson = synthesize("poisson:rate=5,duration=2000", model="m")
    assert len(poisson) == pytest.approx(10_000, rel=0.05)
    bursty = synthesize("bursty:rate=10,on=20,off=180,duration=20000", model="m")
    gaps = [b.t_s - a.t_s for a, b in itertools.pairwise(bursty)]
    assert len(bursty) == pytest.approx(20_000, rel=0.25)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) > 3
    assert synthesize("diurnal:rate=0.1,peak=1,duration=9000,period=9000", model="m")
    assert synthesize("poisson:rate=5,duration=2000", model="m") == poisson
    for spec in ("uniform:", "poisson:rate=x", "poisson:speed=1", "poisson:rate=1e9", "bursty:base=1e9"):
        with pytest.raises(UsageError) as caught:
            synthesize(spec, model="m")
        assert "speed" not in caught.value.hint


def test_the_search_names_pools_that_no_other_beats() -> None:
    requests = synthesize("bursty:rate=5,on=40,off=860,duration=7200,seed=1", model="m")
    model = Model("m", "/m", max_instances=4)
    profile = profile_of({"prefill_tokens_s": 2000, "decode_tokens_s": {"1": 40, "8": 160}}, "here", PROFILE)
    choices = search(requests, model, profile, Price())
    assert len(choices) == len(list(candidates(model))) == 53, "4 + 1 and 4 + 2 are too many; 3 hybrid"
    front = pareto(choices)
    for choice in choices:
        assert any(f.cost <= choice.cost and f.ttft_p99_s <= choice.ttft_p99_s for f in front)
    advice = cheapest(choices, front[-1].ttft_p99_s)
    assert advice is not None
    assert advice.ttft_p99_s <= front[-1].ttft_p99_s
    assert cheapest(choices, 0.0) is None


def test_costs_are_the_users_prices() -> None:
    outcome = Outcome(instance_s=7200.0)
    model = Model("m", "/m", instance=InstanceSize(memory_bytes=4_000_000_000))
    assert cost_of(outcome, model, parse_price("0.10/h")) == pytest.approx(0.2)
    assert cost_of(outcome, model, parse_price("0.00001/GB-s")) == pytest.approx(0.288)
    assert cost_of(outcome, model, parse_price(None)) == 2.0
    for text in ("free", "1/day", "-1/h"):
        with pytest.raises(UsageError):
            parse_price(text)


def test_a_start_takes_at_least_its_bytes_on_the_link() -> None:
    profile = profile_of({"bytes": 10**9, "link_bytes_s": 10**8}, "here", PROFILE)
    assert profile.start_work_s == pytest.approx(10.9)
    assert profile.start_cores == pytest.approx(2.0 / 10.9)
    assert Profile().speed(1) == 1.0
    assert math.isinf(Profile().link_bytes_s)


POOL = 'version = 1\n[models.m]\nsource = "/models/m"\nmax_instances = 4\n[slo]\nttft_p99_s = 3.0\n'


def test_the_command_prints_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pool.toml").write_text(POOL)
    command = ["pool", "plan", str(tmp_path / "pool.toml"), "--synthetic", "poisson:rate=0.2,duration=600"]
    assert cli.run(command) == 2
    assert "teneral pool measure" in capsys.readouterr().err
    (tmp_path / "pool.measured.json").write_text(
        json.dumps(
            {"schema": 1, "models": {"m": {"start_s": 0.5, "decode_tokens_s": {"1": 100}, "peak_mb": 1}}}
        )
    )
    assert read_profiles(tmp_path / "pool.measured.json")["m"].start_s == 0.5
    assert cli.run([*command, "--price", "0.10/h", "--html", str(tmp_path / "plan.html")]) == 0
    printed = capsys.readouterr().out
    assert "cheapest with a first token's p99 of at most 3 s: min_warm=0" in printed
    assert "<svg" in (tmp_path / "plan.html").read_text()
    assert cli.run([*command, "--json", "--assume", "start_s=9"]) == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]
    assert plan["profile"]["start_s"] == 9.0
    assert plan["as_written"]["cold_share"] > 0
    (tmp_path / "pool.measured.json").write_text('{"schema": 2}')
    assert cli.run(command) == 2
