"""`teneral serve` as Lambda starts it: from the start of the process to its end, with a store that a test holds up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from tests.support.fake_runtime_api import FakeRuntimeApi
from tests.support.lambda_rig import runtime_process
from tests.support.load import patience_s
from tests.support.store_faults import Fault
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny

from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

WAIT_S = patience_s(60)
HANDLER = """
import os, random, time, uuid
from teneral.handlers.lifecycle import after_restore, before_checkpoint

hooks = []
before_checkpoint(lambda: hooks.append("before"))
after_restore(lambda: hooks.append("after"))
random.seed(7)
boundary = random.getstate()

def handler(event, context):
    if event == "now":
        return "at once"
    if event == "hooks":
        return hooks
    if event == "draws":
        return [random.random(), uuid.uuid4().hex]
    if event == "slow":
        print("begun", flush=True)
        time.sleep(0.3)
        return "finished"
    return context.model.generate(event, max_tokens=4, temperature=1, ignore_eos=True).to_dict()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lambda")
    save_tiny("llama", folder / "model")
    pack(FileStore(folder / "model"), FileStore(folder / "bucket" / "artifact"))
    (folder / "mine.py").write_text(HANDLER)
    return folder


@contextmanager
def serving(
    api: FakeRuntimeApi, folder: Path, model: str, *flags: str, **environment: str
) -> Iterator[Popen[str]]:
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    arguments = ["teneral", "serve", model, *flags]
    with runtime_process(api, *arguments, folder=folder, **(keys | environment)) as process:
        yield process


def test_an_invocation_is_taken_while_the_weights_are_still_on_their_way(
    api: FakeRuntimeApi, folder: Path
) -> None:
    weights_may_come = threading.Event()

    def hold_weights(request: Any) -> Fault | None:
        if "blobs" in (request.key or ""):
            assert weights_may_come.wait(WAIT_S)
        return None

    with (
        StoreServer(folder, fault=hold_weights, rate_mb_s=5) as store,
        serving(
            api,
            folder,
            "s3://bucket/artifact",
            "--endpoint-url",
            store.url,
            "--read-timeout-s",
            "60",
            "--handler",
            "mine.handler",
        ),
    ):
        assert api.invoke("now").json == "at once"  # with not one weight there
        submitted = api.submit("hello")
        assert not submitted.done.wait(0.2)
        weights_may_come.set()
        assert submitted.wait().json["usage"]["completion_tokens"] == 4


def test_the_handler_may_be_the_images_command(api: FakeRuntimeApi, folder: Path) -> None:
    with serving(api, folder, "model", _HANDLER="mine.handler"):
        assert api.invoke("now").json == "at once"


def test_without_a_function_direct_events_generate(api: FakeRuntimeApi, folder: Path) -> None:
    with serving(api, folder, "model"):
        answer = api.invoke({"prompt": "hello", "max_tokens": 3, "ignore_eos": True}).json
        assert answer["usage"]["completion_tokens"] == 3
        reply = api.invoke({"Records": [{"eventSource": "aws:s3"}]}).json
        assert reply["errorType"] == "RequestError"


# -- what cannot start, and what ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "error_type"), [("nowhere", "NotFoundError"), ("s3:///", "UsageError")])
def test_a_missing_model_is_reported_at_the_start(
    api: FakeRuntimeApi, folder: Path, model: str, error_type: str
) -> None:
    with serving(api, folder, model) as process:
        headers, body = api.init_errors.get(timeout=WAIT_S)
        output, _ = process.communicate(timeout=WAIT_S)
    assert headers["lambda-runtime-function-error-type"] == body["errorType"] == error_type
    assert process.returncode == 1
    assert "Traceback" not in output
    assert not api.polled.is_set()


@pytest.mark.slow
def test_a_load_that_fails_later_is_the_invocations_error_and_ends_the_process(
    api: FakeRuntimeApi, folder: Path
) -> None:
    may_fail = threading.Event()

    def no_weights(request: Any) -> Fault | None:
        if "blobs" not in (request.key or ""):
            return None
        assert may_fail.wait(WAIT_S)
        return Fault(status=503)

    with (
        StoreServer(folder, fault=no_weights) as store,
        serving(
            api,
            folder,
            "s3://bucket/artifact",
            "--endpoint-url",
            store.url,
            "--outage-s",
            "0",
            "--handler",
            "mine.handler",
        ) as process,
    ):
        assert api.invoke("now").json == "at once"
        submitted = api.submit("hello")
        while api.num_polling:
            time.sleep(0.005)
        may_fail.set()
        assert submitted.wait().json["errorType"] == "UnavailableError"
        output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 5
    assert api.init_errors.empty()
    assert "cannot be read" in output or "UnavailableError" in output


def test_sigterm_lets_what_runs_finish(api: FakeRuntimeApi, folder: Path) -> None:
    # Longer than Lambda's own, in which a busy machine may not end it.
    flags = ["--handler", "mine.handler", "--drain-timeout-s", str(WAIT_S)]
    with serving(api, folder, "model", *flags) as process:
        submitted = api.submit("slow")
        assert process.stdout is not None
        while process.stdout.readline() != "begun\n":
            pass
        process.terminate()
        assert submitted.wait().json == "finished"
        assert process.wait(WAIT_S) == 0


# -- standing still ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_after_a_freeze_the_next_invocation_works(api: FakeRuntimeApi, folder: Path) -> None:
    shutil.copytree(folder / "bucket" / "artifact", folder / "bucket" / "frozen", dirs_exist_ok=True)
    with (
        StoreServer(folder) as store,
        serving(
            api,
            folder,
            "s3://bucket/frozen",
            "--endpoint-url",
            store.url,
            "--handler",
            "mine.handler",
        ) as process,
    ):
        first = api.invoke("hello").json
        draws = api.invoke("draws").json
        os.kill(process.pid, signal.SIGSTOP)
        while stopped(process.pid) != "T":
            time.sleep(0.005)
        store.drop_connections()
        api.drop_connections()
        submitted = api.submit("hello", timeout_s=30)
        time.sleep(2.5)  # longer than `STALE_AFTER_S`: this is the freeze
        os.kill(process.pid, signal.SIGCONT)
        after = submitted.wait()
        assert after.kind == "response", after.json
        assert after.json["usage"] == first["usage"]
        assert set(api.invoke("draws").json).isdisjoint(draws)


def stopped(process_id: int) -> str:
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_deadline_is_that_of_the_clock_on_the_wall(api: FakeRuntimeApi, folder: Path) -> None:
    """An invocation that was handed over to a frozen process has less time when it is found."""
    with serving(api, folder, "model", "--handler", "mine.handler") as process:
        api.invoke("now")
        os.kill(process.pid, signal.SIGSTOP)
        submitted = api.submit("slow", timeout_s=0.1)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGCONT)
        assert submitted.wait().json["errorType"] == "CancelledError"
        assert api.invoke("now").json == "at once"


# -- snapshots ---------------------------------------------------------------------------------------------------------

SNAP_START = {"AWS_LAMBDA_INITIALIZATION_TYPE": "snap-start"}


def test_a_snapshot_is_of_a_whole_instance_and_its_copy_is_its_own(api: FakeRuntimeApi, folder: Path) -> None:
    with serving(api, folder, "model", "--handler", "mine.handler", **SNAP_START) as process:
        assert api.asked_to_restore.wait(WAIT_S)
        assert not api.polled.is_set()
        os.kill(process.pid, signal.SIGSTOP)
        api.drop_connections()  # the copy runs elsewhere
        os.kill(process.pid, signal.SIGCONT)
        api.restore.set()
        assert api.invoke("hooks").json == ["before", "after"]
        assert api.invoke("draws").json[0] != 0.32383276483316237  # what the seed 7 gives
        assert api.invoke("hello").json["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("hook", "error_type", "status"),
    [
        ("before_checkpoint", "Runtime.BeforeSnapshotError", 64),
        ("after_restore", "Runtime.AfterRestoreError", 65),
    ],
)
def test_a_hook_that_fails_is_reported_and_ends_the_instance(
    api: FakeRuntimeApi, folder: Path, tmp_path: Path, hook: str, error_type: str, status: int
) -> None:
    (tmp_path / "hooked.py").write_text(
        f"from teneral.handlers.lifecycle import {hook}\n"
        f"@{hook}\ndef fail():\n    raise OSError('cannot')\n"
        "def handler(event, context):\n    return event\n"
    )
    model = str(folder / "model")
    api.restore.set()
    with serving(api, tmp_path, model, "--handler", "hooked.handler", **SNAP_START) as process:
        errors = api.init_errors if status == 64 else api.restore_errors
        headers, body = errors.get(timeout=WAIT_S)
        process.communicate(timeout=WAIT_S)
    assert headers["lambda-runtime-function-error-type"] == error_type
    assert (body["errorType"], body["errorMessage"]) == ("OSError", "cannot")
    assert process.returncode == status


@pytest.mark.parametrize(
    "environment",
    [
        {"AWS_LAMBDA_INITIALIZATION_TYPE": "provisioned-concurrency"},
        {"AWS_LAMBDA_INITIALIZATION_TYPE": "lambda-managed-instances", "AWS_LAMBDA_MAX_CONCURRENCY": "3"},
    ],
)
def test_an_instance_that_is_started_ahead_asks_when_everything_is_there(
    api: FakeRuntimeApi, folder: Path, environment: dict[str, str]
) -> None:
    weights_may_come = threading.Event()

    def hold_weights(request: Any) -> Fault | None:
        if "blobs" in (request.key or ""):
            assert weights_may_come.wait(WAIT_S)
        return None

    with (
        StoreServer(folder, fault=hold_weights) as store,
        serving(
            api,
            folder,
            "s3://bucket/artifact",
            "--endpoint-url",
            store.url,
            "--handler",
            "mine.handler",
            AWS_LAMBDA_LOG_FORMAT="JSON",
            **environment,
        ) as process,
    ):
        assert not api.polled.wait(1.0)
        weights_may_come.set()
        assert api.polled.wait(WAIT_S)
        assert api.invoke("now").json == "at once"
        while api.num_polling < int(environment.get("AWS_LAMBDA_MAX_CONCURRENCY", "1")):
            time.sleep(0.005)
        failed = api.invoke({"not": "a prompt"})
        process.terminate()
        output, _ = process.communicate(timeout=WAIT_S)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert any(line["requestId"] == failed.request_id for line in lines if line["level"] == "ERROR")
