"""Rate limits of API keys: a bucket by a clock of the test, and a real pool that refuses before it starts a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.pool_runs import PoolRun, pool_file

from teneral.handlers.http.errors import ApiError
from teneral.handlers.http.keys import ApiKeys
from teneral.handlers.pool.rates import KeyRates
from teneral.handlers.pool.run import RunOptions, run_pool
from teneral.loader.errors import UsageError


def test_a_key_sends_a_minutes_requests_at_once_and_then_as_the_bucket_refills() -> None:
    clock = [100.0]
    rates = KeyRates(ApiKeys(["a", "b"]), 6, lambda: clock[0])
    for _ in range(6):
        rates.take(b"a")
    with pytest.raises(ApiError) as refused:
        rates.take(b"a")
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "10"})
    rates.take(b"b")
    clock[0] += 9.9
    with pytest.raises(ApiError):
        rates.take(b"a")
    clock[0] += 0.2
    rates.take(b"a")
    with pytest.raises(ApiError):
        rates.take(b"a")
    clock[0] += 1e6
    for _ in range(6):
        rates.take(b"a")
    with pytest.raises(ApiError):
        rates.take(b"a")


@pytest.mark.timeout(200)
def test_a_pool_refuses_a_keys_surplus_before_it_starts_a_model(models: Path, tmp_path: Path) -> None:
    file = pool_file(
        f'[models.m]\nsource = "{models}/repository/1"\n[models.n]\nsource = "{models}/repository/2"\n'
    )
    with PoolRun(tmp_path, file, "--key-rate", "2", environment={"TENERAL_API_KEY": "one,two"}) as pool:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        assert [pool.complete("m", headers=one).status for _ in range(2)] == [200, 200]
        refused = pool.complete("n", headers=one)
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 0 < int(refused.headers["retry-after"]) <= 30
        models_now = pool.ask("GET", "/v1/pool", headers=one).json["models"]  # which no limit counts
        assert models_now["n"]["state"] == "asleep"
        assert pool.complete("m", headers=two).status == 200
        assert pool.complete("m").status == 401


def test_a_limit_without_keys_is_refused(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TENERAL_API_KEY", raising=False)
    (tmp_path / "pool.toml").write_text(pool_file(f'[models.m]\nsource = "{models}/repository/1"\n'))
    with pytest.raises(UsageError, match="no API keys"):
        run_pool(RunOptions(file=str(tmp_path / "pool.toml"), port=0, key_rate=3))
