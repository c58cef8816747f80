"""Limits of API keys at a pool's port: requests, before a model is started, and tokens, which instances report."""

from __future__ import annotations

import http.client
import json
import re
import time
from pathlib import Path

import pytest
from tests.support.pool_runs import PoolRun, pool_file

from teneral.handlers.http.service import HttpCall
from teneral.handlers.pool.protocols import StreamEnd
from teneral.handlers.pool.run import RunOptions, run_pool
from teneral.loader.errors import UsageError


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_tokens_of_a_stream_are_those_of_its_comment_and_before_it_one_an_event(size: int) -> None:
    call = HttpCall("req_1")
    end = StreamEnd("/v1/completions", "req_1", call)
    events = b'data: {"a":1}\n\ndata: {"a":2}\n\n'
    for begin in range(0, len(events), 1000):
        end.passed(events[begin : begin + 1000])
    assert (call.prompt_tokens, call.generated_tokens) == (0, 2)
    rest = b'data: {"text":": tokens 7+7"}\n\n: tokens 12+34\n\ndata: [DONE]\n\n'
    for begin in range(0, len(rest), size):
        end.passed(rest[begin : begin + size])
    assert (call.prompt_tokens, call.generated_tokens) == (12, 34)


def usage_of(pool: PoolRun) -> dict[str, float]:
    text = pool.ask("GET", "/metrics", headers={"authorization": "Bearer one"}).body.decode()
    return {
        name: float(value) for name, value in re.findall(r"(?m)^(teneral_key_\S+?_total{\S+}) (\S+)", text)
    }


@pytest.mark.timeout(200)
def test_a_pool_refuses_a_keys_surplus_before_it_starts_a_model(models: Path, tmp_path: Path) -> None:
    file = pool_file(
        f'[models.m]\nsource = "{models}/repository/1"\n[models.n]\nsource = "{models}/repository/2"\n'
    )
    limits = "requests_minute=2,tokens_minute=1000"
    with PoolRun(tmp_path, file, "--key-limits", limits, environment={"TENERAL_API_KEY": "one,two"}) as pool:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        assert [pool.complete("m", headers=one).status for _ in range(2)] == [200, 200]
        refused = pool.complete("n", headers=one)
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 0 < int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        models_now = pool.ask("GET", "/v1/pool", headers=one).json["models"]  # which no limit counts
        assert models_now["n"]["state"] == "asleep"
        assert pool.complete("m", headers=two).status == 200
        assert pool.complete("m").status == 401
        assert usage_of(pool)['teneral_key_refused_total{key="1",limit="requests_minute"}'] == 1


@pytest.mark.timeout(200)
def test_a_pool_counts_the_tokens_of_whole_answers_of_streams_and_of_streams_that_clients_leave(
    models: Path, tmp_path: Path
) -> None:
    file = pool_file(f'[models.m]\nsource = "{models}/repository/1"\n')
    limits = "tokens_day=40"
    with PoolRun(tmp_path, file, "--key-limits", limits, environment={"TENERAL_API_KEY": "one"}) as pool:
        one = {"authorization": "Bearer one"}
        whole = pool.complete("m", headers=one, ignore_eos=True)
        used = whole.json["usage"]["total_tokens"]
        assert "x-teneral-tokens" not in whole.headers
        assert usage_of(pool)['teneral_key_tokens_total{key="1"}'] == used
        streamed = pool.complete("m", headers=one, ignore_eos=True, stream=True)
        assert streamed.headers["x-ratelimit-limit-tokens"] == "40"
        assert streamed.headers["x-ratelimit-remaining-tokens"] == str(40 - used)
        assert usage_of(pool)['teneral_key_tokens_total{key="1"}'] == 2 * used
        body = {"model": "m", "input": "a", "background": True}
        refused = pool.ask("POST", "/v1/responses", body, one)
        assert (refused.status, refused.json["error"]["param"]) == (400, "background")
        leave_a_stream(pool)
        until_s = time.monotonic() + 30
        while usage_of(pool)['teneral_key_tokens_total{key="1"}'] <= 2 * used and time.monotonic() < until_s:
            time.sleep(0.05)
        assert usage_of(pool)['teneral_key_tokens_total{key="1"}'] > 2 * used
        last = pool.complete("m", headers=one, ignore_eos=True, max_tokens=40)
        assert last.status == 200
        refused = pool.complete("m", headers=one)
        assert (refused.status, refused.headers["x-ratelimit-remaining-tokens"]) == (429, "0")
        assert int(refused.headers["retry-after"]) > 60


def leave_a_stream(pool: PoolRun) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", pool.port, timeout=60)
    body = {"model": "m", "prompt": "a b c", "max_tokens": 200, "ignore_eos": True, "stream": True}
    headers = {"authorization": "Bearer one", "content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    assert connection.getresponse().readline().startswith(b"data: ")
    connection.close()


def test_a_limit_without_keys_is_refused(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TENERAL_API_KEY", raising=False)
    (tmp_path / "pool.toml").write_text(pool_file(f'[models.m]\nsource = "{models}/repository/1"\n'))
    with pytest.raises(UsageError, match="no API keys"):
        run_pool(RunOptions(file=str(tmp_path / "pool.toml"), port=0, key_limits="requests_day=3"))
