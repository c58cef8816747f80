"""Instances of a real pool that are stopped."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.pool_runs import PoolRun, pool_file
from tests.support.standby_processes import WAIT_S, runs, until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are watched as Linux does it"),
    pytest.mark.slow,
]


def test_a_stopped_instance_is_replaced_although_its_clients_give_up_first(
    models: Path, tmp_path: Path
) -> None:
    model = f'[models.m]\nsource = "{models}/repository/1"\nmin_warm = 1\nmax_instances = 1\n'
    with PoolRun(tmp_path, pool_file(model)) as pool, ThreadPoolExecutor(1) as client:
        text = pool.complete("m").text
        (stopped,) = [each["process"] for each in pool.instances("m")]
        os.kill(stopped, signal.SIGSTOP)
        patient = client.submit(pool.complete, "m")
        while runs(stopped):
            connection = http.client.HTTPConnection("127.0.0.1", pool.port, timeout=1)
            with contextlib.closing(connection), contextlib.suppress(TimeoutError):
                body = json.dumps({"model": "m", "prompt": "a", "max_tokens": 1})
                connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
                connection.getresponse().read()
        answer = patient.result(WAIT_S)
        assert (answer.status, answer.text) == (200, text), "asked again at the instance that replaced it"
        assert "it answered no probe for 30 s" in pool.log
        until(lambda: pool.ask("GET", "/readyz").status == 200, "min_warm is there again")
