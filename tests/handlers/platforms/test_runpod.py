"""RunPod's queue: what a job gets and gives; and, under RunPod's own SDK, the whole worker against a queue on loopback.

The SDK has an environment of its own: `scripts/conformance-runpod` makes it and runs these.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.load import patience_s
from tests.support.runpod_service import RunPodService, environment, runpod_service
from tests.support.small_host import SmallHost
from tests.support.tiny_models import save_tiny

from teneral.handlers.function.handler import Handler
from teneral.handlers.platforms.runpod import RunPodWorker, check_surroundings
from teneral.loader.errors import UsageError
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.errors import RequestError

WAIT_S = patience_s(60)
SDK_PYTHON = os.environ.get("RUNPOD_PYTHON")
with_sdk = pytest.mark.skipif(
    not SDK_PYTHON, reason="RunPod's SDK has an environment of its own: scripts/conformance-runpod"
)


# without the SDK


@pytest.fixture
def work(host: SmallHost) -> Callable[..., RunPodWorker]:
    def make(function: Callable[..., Any], **options: Any) -> RunPodWorker:
        reported: list[Any] = options.pop("reported", [])
        return RunPodWorker(
            host,
            Handler(function),
            drain_timeout_s=0,
            num_unposted=lambda: 0,
            tell_progress=lambda job, value: reported.append((job["id"], value)),
        )

    return make


def job(event: Any) -> dict[str, Any]:
    return {"id": "job-1", "input": event}


async def test_a_functions_value_is_the_jobs_output(work: Any) -> None:
    worker = work(lambda event, context: {"event": event, "id": context.request_id})
    assert worker.sdk_handler == worker.answer
    assert await worker.answer(job({"a": 1})) == {"event": {"a": 1}, "id": "job-1"}
    assert await work(lambda event, context: b"\xff").answer(job(1)) == "/w=="
    assert await work(lambda event, context: None).answer(job(1)) is None
    assert await work(lambda event, context: iter(range(3))).answer(job(1)) == [0, 1, 2]


async def test_values_that_are_yielded_are_streamed(work: Any) -> None:
    def count(event: Any, context: Any) -> Iterator[int]:
        yield from range(event)

    worker = work(count)
    assert worker.sdk_handler == worker.stream
    assert [value async for value in worker.stream(job(3))] == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RequestError("no text", param="text"), "invalid_request_error", "no text"),
        (KeyError("x"), "handler_error", "KeyError"),
    ],
)
async def test_an_error_is_the_jobs_error_without_a_traceback(
    work: Any, error: Exception, kind: str, message: str
) -> None:
    def fail(event: Any, context: Any) -> Any:
        raise error

    def fail_late(event: Any, context: Any) -> Iterator[int]:
        yield 1
        raise error

    whole = await work(fail).answer(job(1))
    first, streamed = [value async for value in work(fail_late).stream(job(1))]
    assert first == 1
    for reported in (whole, streamed):
        assert set(reported) == {"error"}
        assert json.loads(reported["error"])["error_type"] == kind
        assert message in json.loads(reported["error"])["error_message"]
        assert "Traceback" not in reported["error"]


async def test_a_job_that_is_stopped_cancels_its_function(work: Any) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait(event: Any, context: Any) -> None:
        loop.call_soon_threadsafe(begun.set)
        while not context.cancelled:
            pass
        loop.call_soon_threadsafe(ended.set)

    task = asyncio.create_task(work(wait).answer(job(1)))
    await begun.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    await ended.wait()


async def test_progress_is_posted_at_a_bounded_rate(work: Any) -> None:
    reported: list[Any] = []

    def report(event: Any, context: Any) -> None:
        for done in range(100):
            context.progress({"done": done})

    await work(report, reported=reported).answer(job(1))
    assert reported[0] == ("job-1", {"done": 0})
    assert len(reported) < 10


async def test_progress_that_is_no_json_is_the_functions_error(work: Any) -> None:
    answer = await work(lambda event, context: context.progress(object())).answer(job(1))
    assert "TypeError" in answer["error"]


def test_without_a_queue_there_is_nothing_to_work_on() -> None:
    with pytest.raises(UsageError, match="RUNPOD_WEBHOOK_GET_JOB"):
        check_surroundings({})


# under the SDK


HANDLERS = """
import asyncio, pathlib, threading, time
from teneral.runtime.errors import RequestError

together = threading.Barrier(3, timeout=50)

def whole(event, context):
    match event:
        case {"meet": _}:
            together.wait()
            return {"met": True}
        case {"refuse": _}:
            raise RequestError("not this")
        case {"break": _}:
            raise KeyError("broken")
        case {"progress": value}:
            context.progress(value)
            return {"reported": True}
        case {"refresh": _}:
            return {"done": True, "refresh_worker": True}
        case {"hold": place, "until": other}:
            pathlib.Path(place).touch()
            while not pathlib.Path(other).exists():
                if context.cancelled:
                    pathlib.Path(place + ".cancelled").touch()
                    return
                time.sleep(0.01)
            return {"held": True}
        case {"prompt": prompt}:
            return context.model.generate(prompt, max_tokens=4, ignore_eos=True, temperature=0).to_dict()
    return event

async def parts(event, context):
    for number in range(event["to"]):
        if number == event.get("break"):
            raise RequestError("enough")
        yield {"number": number}
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runpod")
    save_tiny("llama", directory / "model")
    pack(FileStore(directory / "model"), FileStore(directory / "artifact"))
    (directory / "mine.py").write_text(HANDLERS)
    return directory / "artifact"


@contextmanager
def worker(
    artifact: Path, function: str, *flags: str
) -> Iterator[tuple[subprocess.Popen[bytes], RunPodService]]:
    with runpod_service() as (service, url):
        handler = f"{artifact.parent}/mine.py:{function}"
        process = subprocess.Popen(
            [
                SDK_PYTHON or sys.executable,
                "-m",
                "teneral",
                "serve",
                str(artifact),
                "--handler",
                handler,
                *flags,
            ],
            env={**os.environ, **environment(url), "PYTHONFAULTHANDLER": "1"},
            start_new_session=True,
        )
        try:
            yield process, service
        finally:
            with suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)  # the SDK's pings are sent by a process of their own
            process.wait()


@pytest.fixture(scope="module")
def whole(artifact: Path) -> Iterator[RunPodService]:
    with worker(artifact, "whole") as (_, service):
        yield service


@with_sdk
def test_a_job_is_worked_on_by_the_model(whole: RunPodService) -> None:
    whole.submit("generate", {"prompt": "Once"})
    output = whole.output_of("generate")["output"]
    assert output["usage"]["completion_tokens"] == 4
    assert output["finish_reason"] == "length"


@with_sdk
def test_several_jobs_are_worked_on_at_a_time(whole: RunPodService) -> None:
    for number in range(3):
        whole.submit(f"meet-{number}", {"meet": number})
    for number in range(3):
        assert whole.output_of(f"meet-{number}") == {"output": {"met": True}}
    assert max(whole.batch_sizes) > 3


@with_sdk
@pytest.mark.parametrize(
    ("event", "kind"), [({"refuse": 1}, "invalid_request_error"), ({"break": 1}, "handler_error")]
)
def test_a_job_fails_with_its_error(whole: RunPodService, event: Any, kind: str) -> None:
    whole.submit(kind, event)
    output = whole.output_of(kind)
    assert set(output) == {"error"}
    assert json.loads(output["error"])["error_type"] == kind


@with_sdk
def test_progress_is_posted(whole: RunPodService) -> None:
    whole.submit("progress", {"progress": {"percent": 50}})
    whole.wait(lambda: whole.progress["progress"] == [{"percent": 50}])
    assert whole.output_of("progress") == {"output": {"reported": True}}


@with_sdk
def test_a_function_can_have_its_worker_replaced(whole: RunPodService) -> None:
    whole.submit("refresh", {"refresh": 1})
    assert whole.output_of("refresh") == {"output": {"done": True}, "stopPod": True}


@with_sdk
def test_a_job_that_runpod_stops_is_cancelled_and_the_others_go_on(
    whole: RunPodService, tmp_path: Path
) -> None:
    places = [str(tmp_path / name) for name in ("first", "second")]
    for place in places:
        whole.submit(place.rpartition("/")[2], {"hold": place, "until": str(tmp_path / "end")})
    for place in places:
        wait_for(Path(place))
    whole.stop("first")
    wait_for(tmp_path / "first.cancelled")
    (tmp_path / "end").touch()
    assert whole.output_of("second") == {"output": {"held": True}}
    assert "first" not in whole.outputs


@with_sdk
def test_pings_name_the_jobs_in_work(whole: RunPodService, tmp_path: Path) -> None:
    whole.submit("pinged", {"hold": str(tmp_path / "held"), "until": str(tmp_path / "end")})
    whole.wait(lambda: "pinged" in whole.pinged_jobs)
    (tmp_path / "end").touch()
    assert whole.output_of("pinged") == {"output": {"held": True}}


@with_sdk
def test_what_a_function_yields_is_streamed_and_all_of_it_is_the_output(artifact: Path) -> None:
    with worker(artifact, "parts") as (process, service):
        service.submit("parts", {"to": 3})
        numbers = [{"number": number} for number in range(3)]
        assert service.output_of("parts") == {"output": numbers}
        assert service.streams["parts"] == numbers

        service.submit("broken", {"to": 3, "break": 1})
        reported = service.output_of("broken")
        assert service.streams["broken"] == numbers[:1]
        assert json.loads(reported["error"])["error_message"] == "enough"
        assert ended(process) == 0


@with_sdk
def test_a_signal_ends_an_idle_worker_though_it_waits_for_a_job(artifact: Path) -> None:
    with worker(artifact, "whole") as (process, service):
        service.wait(lambda: service.num_polls > 0)
        assert ended(process) == 0
        assert service.outputs == {}


@with_sdk
def test_a_signal_lets_jobs_in_work_end_and_takes_no_others(artifact: Path, tmp_path: Path) -> None:
    with worker(artifact, "whole", "--drain-timeout-s", "50") as (process, service):
        service.submit("held", {"hold": str(tmp_path / "held"), "until": str(tmp_path / "end")})
        wait_for(tmp_path / "held")
        process.send_signal(signal.SIGTERM)
        (tmp_path / "end").touch()
        assert service.output_of("held") == {"output": {"held": True}}
        assert wait_for_end(process) == 0


@with_sdk
def test_a_second_signal_ends_the_worker_at_once(artifact: Path, tmp_path: Path) -> None:
    with worker(artifact, "whole", "--drain-timeout-s", "100") as (process, service):
        service.submit("held", {"hold": str(tmp_path / "held"), "until": str(tmp_path / "never")})
        wait_for(tmp_path / "held")
        while process.poll() is None:  # signals that come together are one
            process.send_signal(signal.SIGTERM)
            time.sleep(0.01)
        assert process.wait(WAIT_S) == -signal.SIGTERM


@with_sdk
def test_a_job_that_outlasts_the_drain_gets_an_error(artifact: Path, tmp_path: Path) -> None:
    with worker(artifact, "whole", "--drain-timeout-s", "0") as (process, service):
        service.submit("held", {"hold": str(tmp_path / "held"), "until": str(tmp_path / "never")})
        wait_for(tmp_path / "held")
        assert ended(process) == 0
        assert json.loads(service.outputs["held"]["error"])["error_type"] == "draining"


@with_sdk
def test_a_worker_whose_model_is_not_there_takes_no_job_and_says_why(artifact: Path) -> None:
    with worker(artifact.parent / "nowhere", "whole") as (process, service):
        service.submit("never", {})
        assert wait_for_end(process) == 3
        assert service.num_polls == 0


def ended(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    return wait_for_end(process)


def wait_for_end(process: subprocess.Popen[bytes]) -> int:
    """Its exit code. One that does not end says where it is."""
    try:
        return process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        process.wait(WAIT_S)
        raise


def wait_for(place: Path) -> None:
    """Returns when the file is there; the test's own time limit is the limit."""
    while not place.exists():
        time.sleep(0.01)
