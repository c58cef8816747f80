"""`teneral pool run` with real servers: several models behind one port, reloads, deaths, sleep, and memory."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema_rs
import pytest
from tests.support.pool_runs import NODE, SERVE, Answer, Load, PoolRun, pool_file
from tests.support.standby_processes import WAIT_S, descendants, runs, until

from teneral import cli
from teneral.handlers.api_document.document import document as api_document
from teneral.handlers.console.files import PATHS as CONSOLE_PATHS
from teneral.handlers.console.routes import PAGES
from teneral.handlers.pool import measure
from teneral.handlers.pool.memory import tree_pss_bytes
from teneral.handlers.pool.overview import OPEN_PATHS, ROUTES

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are watched as Linux does it"),
    pytest.mark.slow,
]


def test_a_path_that_no_instance_has_wakes_no_model(models: Path, tmp_path: Path) -> None:
    with PoolRun(
        tmp_path, pool_file(f'[models.m]\nsource = "{models}/repository/1"\n'), "--no-console"
    ) as pool:
        for method, path in (
            ("GET", "/favicon.ico"),
            ("GET", "/.git/config"),
            ("POST", "/v1/completions/render"),
            ("GET", "/get_model_info"),
        ):
            answer = pool.ask(method, path)
            assert (answer.status, answer.json["error"]["code"]) == (404, "unknown_url"), path
        assert pool.ask("GET", "/v2/models").json == {"error": "there is no such route here"}
        assert pool.ask("GET", "/v1/messages/batches").json["error"]["type"] == "not_found_error"
        for method, path in (("GET", "/"), ("GET", "/v1/completions"), ("DELETE", "/v1/models/m")):
            answer = pool.ask(method, path)
            assert (answer.status, answer.json["error"]["code"]) == (405, "method_not_allowed"), path
            assert answer.headers["allow"], path
        assert pool.pool()["counts"]["cold_requests"] == {}
        assert pool.pool()["models"]["m"]["state"] == "asleep"
        assert pool.ask("HEAD", "/version").status == 200
        assert pool.ask("GET", "/v2/models/m/config").status == 200
        assert pool.pool()["counts"]["cold_requests"] == {"m": 1}


def test_models_aliases_and_versions_answer_behind_one_port(models: Path, tmp_path: Path) -> None:
    file = pool_file(
        f"""
[models.first]
source = "{models}/repository/1"
[models.brief]
source = "{models}/repository/1"
idle_timeout_s = 1
[models.second]
source = "{models}/repository/{{version}}"
versions = "all"
[models.broken]
source = "{models}/nowhere"
[aliases]
assistant = "second@2"
"""
    )
    with PoolRun(tmp_path, file, "--model-control") as pool:
        assert pool.ask("GET", "/livez").status == pool.ask("GET", "/health").status == 200
        first = pool.complete("first")
        assert first.status == 200, first.body
        assert first.headers["x-teneral-model"] == "first"
        assert first.headers["x-teneral-start"] in ("standby", "cold")
        assert pool.complete("FIRST").headers["x-teneral-start"] == "warm"
        one, two = pool.complete("second@1"), pool.complete("assistant")
        assert one.text == first.text, "the same weights"
        assert two.text != one.text, "other weights"
        assert (
            two.headers["x-teneral-model"] == pool.complete("second").headers["x-teneral-model"] == "second@2"
        )
        infer = pool.ask(
            "POST", "/v2/models/second/versions/2/generate", {"text_input": "a b c", "parameters": {}}
        )
        assert infer.status == 200, infer.body
        assert infer.headers["x-teneral-model"] == "second@2"

        for name in ("nothing", "second@3", "first@1"):
            missing = pool.complete(name)
            assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")
        broken = pool.complete("broken")
        assert (broken.status, broken.json["error"]["code"]) == (503, "model_unavailable")
        assert pool.ask("POST", "/v1/completions", ["no object"]).status == 400
        assert pool.ask("POST", "/invoke", {"x": 1}).status == 400, "it names no model"

        listed = {each["id"]: each["teneral"] for each in pool.ask("GET", "/v1/models").json["data"]}
        assert listed["second"] == {"state": "ready", "versions": [1, 2]}
        assert listed["broken"]["state"] == "unavailable"
        assert set(listed) == {"first", "brief", "second", "broken", "assistant"}

        def starts_in_a_standby() -> bool:
            """Not where the machine takes longer to fork one than the pool waits for it."""
            until(lambda: pool.pool()["models"]["brief"]["state"] == "asleep", "the idle model ends")
            return pool.complete("brief").headers["x-teneral-start"] == "standby"

        assert pool.complete("brief").headers["x-teneral-start"] in ("standby", "cold")
        until(starts_in_a_standby, "a start in a standby process")

        assert pool.ask("POST", "/v1/pool/first/drain").status == 200
        refused = pool.complete("first")
        assert (refused.status, refused.headers["retry-after"]) == (503, "60")
        assert pool.ask("POST", "/v1/pool/first/wake").status == 200
        assert pool.complete("first").headers["x-teneral-start"] == "warm"
        metrics = pool.ask("GET", "/metrics").body.decode()
        assert 'teneral_starts_total{kind="standby",model="brief",outcome="ok"}' in metrics
        assert 'teneral_pool_memory_bytes{kind="budget"} 8.589934592e+09' in metrics
        assert pool.end() == 0


def test_the_front_sends_its_own_document_and_answers_as_it_says(models: Path, tmp_path: Path) -> None:
    tables = f'[models.first]\nsource = "{models}/repository/1"\n[models.other]\nsource = "{models}/repository/2"\n'
    with PoolRun(tmp_path, pool_file(tables), environment={"TENERAL_API_KEY": "sesame"}) as pool:
        assert pool.ask("GET", "/openapi.json").status == 401
        headers = {"Authorization": "Bearer sesame"}
        document = pool.ask("GET", "/openapi.json", headers=headers).json
        assert document == json.loads(json.dumps(api_document(OPEN_PATHS | CONSOLE_PATHS, (*ROUTES, *PAGES))))
        for path, item in document["paths"].items():
            operation = item.get("get")
            if operation is None or any(each["in"] == "header" for each in operation.get("parameters", ())):
                continue  # passed on to an instance, which it would start
            answer = pool.ask("GET", re.sub(r"{\w+}", "first", path))
            is_open = operation.get("security") == []
            assert (answer.status == 401) is not is_open, path
            answer = pool.ask("GET", re.sub(r"{\w+}", "first", path), headers=headers)
            assert answer.status == 200, path
            content = operation["responses"]["200"]["content"]
            if schema := content.get("application/json", {}).get("schema"):
                whole = {**schema, "components": document["components"]}
                jsonschema_rs.Draft202012Validator(whole).validate(answer.json)
        assert {
            model["state"] for model in pool.ask("GET", "/v1/pool", headers=headers).json["models"].values()
        } == {"asleep"}


def test_streams_pass_through_and_a_client_that_goes_away_frees_its_place(
    models: Path, tmp_path: Path
) -> None:
    file = pool_file(f'[models.m]\nsource = "{models}/repository/1"\nmin_warm = 1\nmax_instances = 1\n')
    with PoolRun(tmp_path, file) as pool:
        until(lambda: pool.ask("GET", "/readyz").status == 200, "min_warm is there")
        streamed = pool.complete("m", stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.body.endswith(b"data: [DONE]\n\n")
        connection = http.client.HTTPConnection("127.0.0.1", pool.port)
        body = {"model": "m", "prompt": "a", "max_tokens": 60, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        connection.getresponse().read(1)
        connection.close()
        until(lambda: pool.instances("m")[0]["in_work"] == 0, "the place is free again")


def test_a_new_version_takes_over_under_load_without_a_failed_request(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    shutil.copytree(models / "repository" / "1", folder / "1")
    file = pool_file(f'[models.m]\nsource = "{folder}/{{version}}"\nmin_warm = 1\nmax_instances = 2\n')
    with PoolRun(tmp_path, file, "--watch", "--watch-s", "0.3") as pool:
        assert pool.complete("m").headers["x-teneral-model"] == "m@1"
        with Load(lambda _: pool.complete("m")) as load:
            shutil.copytree(models / "repository" / "2", folder / "2.copy")
            os.rename(folder / "2.copy", folder / "2")
            until(lambda: pool.complete("m").headers["x-teneral-model"] == "m@2", "version 2 takes over")
            # A file that cannot be used changes nothing.
            pool.reload("version = 1\n[models.m]\nsorce = 1\n")
            until(lambda: "sorce: is not a known key [E1]" in pool.log, "the bad file is logged")
            pool.reload(file.replace("max_instances = 2", "max_instances = 2\npriority = 3"))
            time.sleep(0.5)
        assert not load.lost
        assert Counter(answer.status for answer in load.answers) == {200: len(load.answers)}
        assert {answer.headers["x-teneral-model"] for answer in load.answers} == {"m@1", "m@2"}
        texts = {(answer.headers["x-teneral-model"], answer.text) for answer in load.answers}
        assert len(texts) == 2, "each version gives its own answer, always"


def test_a_version_that_fails_leaves_the_old_one_serving(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    shutil.copytree(models / "repository" / "1", folder / "1")
    file = pool_file(f'[models.m]\nsource = "{folder}/{{version}}"\nmin_warm = 1\n')
    with PoolRun(tmp_path, file, "--watch", "--watch-s", "0.3") as pool:
        assert pool.complete("m").headers["x-teneral-model"] == "m@1"
        shutil.copytree(models / "repository" / "2", folder / "damaged")
        blob = max((folder / "damaged").rglob("*.bin"), key=lambda path: path.stat().st_size)
        blob.write_bytes(bytes(blob.stat().st_size))
        os.rename(folder / "damaged", folder / "2")

        def newest() -> dict[str, Any]:
            return next(v for v in pool.pool()["models"]["m"]["versions"] if v["name"] == "m@2")

        until(
            lambda: "m@2" in str(pool.pool()["models"]) and newest().get("failures", 0) >= 1,
            "version 2 fails",
        )
        assert newest()["reason"]
        assert pool.complete("m").headers["x-teneral-model"] == "m@1"


HANDLER = """
def handler(event, context):
    text = context.model.generate("a b c", max_tokens=4, temperature=0).text
    if text != event["text"]:
        raise ValueError("another version's text")
    return {"text": text}
"""


def test_a_version_with_too_many_errors_is_rolled_back(models: Path, tmp_path: Path) -> None:
    (tmp_path / "function.py").write_text(HANDLER)
    folder = tmp_path / "repository"
    shutil.copytree(models / "repository" / "1", folder / "1")
    head = SERVE + f'handler = "{tmp_path}/function.py:handler"\n'
    file = pool_file(f'[models.m]\nsource = "{folder}/{{version}}"\nmin_warm = 1\n', head)
    with PoolRun(tmp_path, file, "--watch", "--watch-s", "0.3") as pool:
        text = pool.complete("m").text

        def invoke(_: int) -> Answer:
            return pool.ask("POST", "/invoke", {"text": text})

        assert invoke(0).status == 200
        shutil.copytree(models / "repository" / "2", folder / "2")
        with Load(invoke, num_threads=2, pause_s=0.02) as load:
            until(lambda: any(answer.status == 500 for answer in load.answers), "version 2 makes errors")
            until(lambda: load.answers[-1].status == 200, "version 1 serves again")
            until(lambda: invoke(0).headers.get("x-teneral-model") == "m@1", "version 1 serves again")
        assert "answers were errors" in pool.pool()["models"]["m"]["rejected"]["2"]


def test_the_front_and_its_instances_log_json(models: Path, tmp_path: Path) -> None:
    file = pool_file(f'[models.m]\nsource = "{models}/repository/1"\n')
    with PoolRun(tmp_path, file, "--log-format", "json") as pool:
        answer = pool.complete("m")
        assert answer.status == 200
        assert pool.end() == 0
        # Every line is an object, but for those that announce an address.
        lines = [json.loads(line) for line in pool.log.splitlines() if not line.startswith("teneral: ")]
    access = next(line for line in lines if line["logger"] == "teneral.pool.access" and line["model"] == "m")
    assert access["status"] == 200
    assert access["path"] == "/v1/completions"
    assert access["request_id"] == answer.headers["x-request-id"]
    assert 0 < access["duration_s"] < WAIT_S
    assert any(line.get("generated_tokens") for line in lines), "of the instance"


def test_lines_are_written_whole_where_python_does_not_buffer(models: Path, tmp_path: Path) -> None:
    """Python does not buffer in the image, where pieces of a line would mix with other processes' lines."""
    file = tmp_path / "pool.toml"
    file.write_text(pool_file(f'[models.m]\nsource = "{models}/repository/1"\n'))
    command = [
        sys.executable,
        "-m",
        "teneral",
        "pool",
        "run",
        str(file),
        "--port",
        "0",
        "--log-format",
        "json",
    ]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps writes apart
    with ours, theirs:
        ours.settimeout(WAIT_S)
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stderr=theirs, env=environment)
        theirs.close()
        writes: list[bytes] = []
        try:
            for awaited in (b"standby processes at", b"pool of 1 models on http://127.0.0.1:"):
                while not any(awaited in each for each in writes):
                    writes.append(ours.recv(1 << 16))
            port = int(re.search(rb"127.0.0.1:(\d+)", b"".join(writes))[1])  # type: ignore[index]
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as client:
                body = {"model": "m", "prompt": "a", "max_tokens": 1}
                client.request(
                    "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
                )
                assert client.getresponse().status == 200
            process.terminate()
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
            process.wait()
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while len(writes) < 1000:
                writes.append(ours.recv(1 << 16))
    assert sum(each.startswith(b"teneral: ") for each in writes) == 3
    assert {each for each in writes if each and not each.endswith(b"\n")} == set()


def test_killed_instances_lose_no_request_and_none_is_wrong(models: Path, tmp_path: Path) -> None:
    """Six models with memory for three, an instance killed every second and a half."""
    names = [f"m{number}" for number in range(6)]
    tables = "".join(
        f'[models.{name}]\nsource = "{models}/repository/{1 + number % 2}"\nqueue_timeout_s = 90\n'
        for number, name in enumerate(names)
    )
    need_mib = 250 + 8 + 30
    node = f'[node]\nmemory = "{3 * need_mib + 400}MiB"\nstandby = 2\n'
    kills = int(os.environ.get("POOL_KILLS", "5"))
    with PoolRun(tmp_path, pool_file(tables, node=node), "--log-level", "warning") as pool:
        expected = {name: pool.complete(name).text for name in names}
        assert len(set(expected.values())) == 2
        killed = 0
        over = 0.0

        def ask(number: int) -> Answer:
            ask.count += 1  # type: ignore[attr-defined]
            name = names[(ask.count * 7 + number) % 6]  # type: ignore[attr-defined]
            answer = pool.complete(name)
            if answer.status == 200:
                assert answer.text == expected[name], "an answer of another model's"
            return answer

        ask.count = 0  # type: ignore[attr-defined]
        with Load(ask, num_threads=6) as load:
            until_s = time.monotonic() + max(WAIT_S, 10.0 * kills)
            while killed < kills:
                assert time.monotonic() < until_s, load.answers
                time.sleep(1.5)
                state = pool.pool()
                memory = state["memory"]
                over = max(over, memory["used_bytes"] / memory["budget_bytes"])
                instances = [
                    i for m in state["models"].values() for v in m["versions"] for i in v["instances"]
                ]
                assert len(instances) <= 4
                if instances:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(instances[killed % len(instances)]["process"], signal.SIGKILL)
                        killed += 1
        statuses = Counter(answer.status for answer in load.answers)
        assert not load.lost, "no connection ended without an answer"
        assert over <= 1.02
        # A request is asked again once: a kill may end several that wait at their second instance.
        assert set(statuses) <= {200, 502, 503}, statuses
        assert statuses.total() - statuses[200] <= 3 * kills, statuses


def test_a_model_that_never_fits_is_refused_with_the_numbers(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = pool_file(f'[models.m]\nsource = "{models}/repository/1"\n', node='[node]\nmemory = "100MiB"\n')
    with PoolRun(tmp_path, file) as pool:
        answer = pool.complete("m")
        assert (answer.status, answer.json["error"]["code"]) == (507, "insufficient_memory")
        assert "but the pool has 100 MiB" in answer.json["error"]["message"]
        assert tree_pss_bytes(pool.process.pid) < 60 << 20, "the front holds no torch and no model"
        refused = pool.ask("POST", "/v1/pool/m/sleep")
        assert (refused.status, refused.json["error"]["code"]) == (403, "forbidden")
    too_warm = file.replace('repository/1"', 'repository/1"\nmin_warm = 1')
    (tmp_path / "pool.toml").write_text(too_warm)
    capsys.readouterr()
    assert cli.run(["pool", "run", str(tmp_path / "pool.toml"), "--port", "0"]) == 2
    assert re.search(
        r"pool.toml:\d+: node.memory: is 100 MiB, but min_warm instances and standby processes need \d+ MiB: "
        r"1 × \d+ MiB of m \[E10\]",
        capsys.readouterr().err,
    )


def test_sleep_keeps_what_was_computed(models: Path, tmp_path: Path) -> None:
    file = pool_file(f'[models.m]\nsource = "{models}/repository/1"\n')
    prompt = "a b c d e f g h " * 6
    session = {"teneral": {"session": "one"}}
    with PoolRun(tmp_path, file, "--model-control") as pool:
        before = pool.complete("m", prompt, **session)  # a single turn of a conversation
        server = pool.instances("m")[0]["process"]
        assert pool.ask("POST", "/v1/pool/m/sleep").status == 200
        until(lambda: not runs(server), "the model sleeps")
        after = pool.complete("m", prompt, **session)
        assert after.headers["x-teneral-start"] != "warm"
        assert after.text == before.text
        assert after.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_request_while_an_instance_saves_its_sessions_finds_them(models: Path, tmp_path: Path) -> None:
    file = pool_file(f'[models.m]\nsource = "{models}/repository/1"\n')
    prompt = "a b c d e f g h " * 6
    session = {"teneral": {"session": "one"}}
    with PoolRun(tmp_path, file, "--model-control") as pool, ThreadPoolExecutor(1) as client:
        before = pool.complete("m", prompt, **session)
        server = pool.instances("m")[0]["process"]
        os.kill(server, signal.SIGSTOP)  # so that it takes long to end
        assert pool.ask("POST", "/v1/pool/m/sleep").status == 200
        asked = client.submit(pool.complete, "m", prompt, **session)
        until(
            lambda: pool.pool()["models"]["m"]["versions"][0]["waiting"] == 1,
            "the request waits for an instance",
        )
        time.sleep(0.5)
        os.kill(server, signal.SIGCONT)
        after = asked.result(WAIT_S)
        assert after.text == before.text
        assert after.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_copies_go_to_the_shadow_and_answers_come_from_the_other(models: Path, tmp_path: Path) -> None:
    model = f'[models.m]\nsource = "{models}/repository/{{version}}"\nversions = [1, 2]\n'
    file = pool_file(model + 'traffic = { "1" = 100 }\nshadow = { version = 2, percent = 50 }\n')
    with PoolRun(tmp_path, file) as pool:

        def ask() -> int:
            assert pool.complete("m").headers["x-teneral-model"] == "m@1"
            shadow = pool.pool()["counts"]["shadow"]
            return int(shadow.get("same", 0)) + int(shadow.get("different", 0))

        until(lambda: ask() >= 3, "copies are compared")


def test_instances_end_with_a_supervisor_that_is_killed(models: Path, tmp_path: Path) -> None:
    file = pool_file(f'[models.m]\nsource = "{models}/repository/1"\nmin_warm = 1\n')
    with PoolRun(tmp_path, file) as pool:
        assert pool.complete("m").status == 200
        server = pool.instances("m")[0]["process"]
        family = [server, *descendants(pool.process.pid)]
        pool.end(signal.SIGKILL)
        until(lambda: not any(map(runs, family)), "everything has ended")


def test_measured_figures_are_what_a_plan_reads(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Mock(wraps=measure.start_server)
    monkeypatch.setattr(measure, "start_server", start)
    model = f'[models.m]\nsource = "{models}/repository/1"\nmax_concurrency = 8\n'
    (tmp_path / "pool.toml").write_text(pool_file(model, node="[node]\nstandby = 1\n"))
    assert cli.run(["pool", "measure", str(tmp_path / "pool.toml"), "--starts", "1"]) == 0
    figures = json.loads((tmp_path / "pool.measured.json").read_text())["models"]["m"]
    assert {(config.prefix_cache, config.look_ahead) for (config,), _ in start.call_args_list} == {(False, 0)}
    assert figures["start_s"] > 0
    assert figures["cold_start_s"] > 0
    assert len(figures["prompt_ratios"]) == measure.REPEATS
    assert set(figures["decode_tokens_s"]) == {"1", "2", "4", "8"}
    command = ["pool", "plan", str(tmp_path / "pool.toml"), "--synthetic", "poisson:rate=1,duration=60"]
    capsys.readouterr()
    assert cli.run([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["profile"]["start_s"] == figures["start_s"]


def test_a_repository_is_served_without_a_file(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models"
    for name in ("alpha", "beta"):
        shutil.copytree(models / "repository", folder / name)
    (folder / "gamma" / "latest").mkdir(parents=True)
    (folder / "alpha" / "3").mkdir()  # empty: it is not whole
    file = (
        "version = 1\n" + SERVE + '[models.beta]\nsource = "models/beta/{version}"\nversions = "all"\n' + NODE
    )
    with PoolRun(tmp_path, file, "--repository", str(folder)) as pool:
        assert pool.complete("alpha").headers["x-teneral-model"] == "alpha@2"
        assert pool.complete("alpha@1").status == 404, "only the latest"
        assert pool.complete("beta@1").headers["x-teneral-model"] == "beta@1"
        listed = [each["id"] for each in pool.ask("GET", "/v1/models").json["data"]]
        assert sorted(listed) == ["alpha", "beta"]
        assert "version 3" in pool.pool()["models"]["alpha"]["trouble"]
        capsys.readouterr()
        assert cli.run(["pool", "status", "--url", f"http://127.0.0.1:{pool.port}"]) == 0
        printed = capsys.readouterr().out
        assert "alpha@2" in printed
        assert "alpha: version 3" in printed
    assert cli.run(["pool", "status", "--url", f"http://127.0.0.1:{pool.port}"]) == 5


def test_a_conversation_stays_with_its_version(models: Path, tmp_path: Path) -> None:
    model = f'[models.m]\nsource = "{models}/repository/{{version}}"\nversions = "all"\n'
    with PoolRun(tmp_path, pool_file(model + 'traffic = { "1" = 50, "2" = 50 }\n')) as pool:

        def versions(**more: Any) -> list[str]:
            return [pool.complete("m", **more).headers["x-teneral-model"] for _ in range(6)]

        assert set(versions()) == {"m@1", "m@2"}
        for name in ("a", "b", "c"):
            assert len(set(versions(teneral={"session": name}))) == 1
            assert len(set(versions(headers={"x-session-id": name}))) == 1
