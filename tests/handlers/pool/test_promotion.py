"""`teneral pool promote` and `rollback` at a real pool: which version gets requests, and the line of the audit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.pool_runs import PoolRun, pool_file

from teneral.cli import run

KEYS = "first-key,second-key"
pytestmark = pytest.mark.timeout(300)


def test_a_version_is_rolled_back_and_promoted_by_hand(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = pool_file(f'[models.m]\nsource = "{models}/repository/{{version}}"\n')  # the newest alone
    monkeypatch.setenv("TENERAL_API_KEY", "second-key")
    with PoolRun(tmp_path, file, "--model-control", "--watch", environment={"TENERAL_API_KEY": KEYS}) as pool:
        key = {"authorization": "Bearer first-key"}

        def served() -> str:
            return pool.complete("m", headers=key).headers["x-teneral-model"]

        def control(action: str, name: str) -> tuple[int, str]:
            status = run(["pool", action, name, "--url", f"http://127.0.0.1:{pool.port}"])
            output = capsys.readouterr()
            return status, output.out + output.err

        assert served() == "m@2"
        assert control("rollback", "m") == (0, "requests without a version go to m@1\n")
        assert served() in ("m@1", "m@2")  # 2 goes on until 1 is ready
        status, output = control("rollback", "m@1")
        assert status != 0
        assert "no version but 1" in output or "no such version" in output
        assert control("promote", "m@2") == (0, "requests without a version go to m@2\n")
        assert served() == "m@2"
        status, output = control("promote", "m@7")
        assert status != 0
        assert "version 7 of 'm' is not served; those served: 2" in output
        assert pool.ask("POST", "/v1/pool/m/promote", headers=key).status == 400
        assert pool.ask("POST", "/v1/pool/m/promote").status == 401
    assert "rollback 'm': done, from 127.0.0.1 with key 2, req_" in pool.log
    assert "promote 'm@7': refused (404), from 127.0.0.1 with key 2" in pool.log
    assert "promote 'm': refused (400), from 127.0.0.1 with key 1" in pool.log
    assert "promote 'm': refused (401), from 127.0.0.1 with no key" in pool.log
    assert "first-key" not in pool.log + output
    assert "second-key" not in pool.log + output


def test_a_promotion_lasts_until_the_files_entry_changes(models: Path, tmp_path: Path) -> None:
    def file(traffic: str) -> str:
        model = f'[models.m]\nsource = "{models}/repository/{{version}}"\nversions = [1, 2]\n'
        return pool_file(f"{model}traffic = {{ {traffic} }}\n")

    with PoolRun(tmp_path, file('"1" = 100'), "--model-control") as pool:
        assert pool.complete("m").headers["x-teneral-model"] == "m@1"
        promoted = pool.ask("POST", "/v1/pool/m@2/promote")
        assert promoted.status == 200, promoted.body
        assert promoted.json["promoted"] == 2
        assert {pool.complete("m").headers["x-teneral-model"] for _ in range(4)} == {"m@2"}
        pool.reload(file('"1" = 100') + "# a remark\n")
        assert pool.complete("m").headers["x-teneral-model"] == "m@2"
        pool.reload(file('"1" = 99, "2" = 1'))
        for _ in range(200):
            if pool.complete("m").headers["x-teneral-model"] == "m@1":
                break
        else:
            raise AssertionError("the file's traffic is not in force")
        assert "promoted" not in pool.pool()["models"]["m"]


def test_without_model_control_a_call_is_refused_and_logged(models: Path, tmp_path: Path) -> None:
    file = pool_file(f'[models.m]\nsource = "{models}/repository/1"\n')
    with PoolRun(tmp_path, file) as pool:
        assert pool.ask("POST", "/v1/pool/m/rollback").status == 403
    assert "rollback 'm': refused (403), from 127.0.0.1 with no key, req_" in pool.log
