"""RunPod's queue: `teneral serve --platform runpod-queue`. A worker of RunPod's own SDK takes jobs
and posts their results; this module has its callbacks: they run the user's function, or the model
itself, with the job's `input` as event.

Jobs are taken once they can start at once, as soon as the first layers have arrived: until then
they stay in the queue, where another worker may take them. The number of concurrent jobs is
constant after that, because the SDK lets all jobs end before it changes it. After a signal no more
jobs are taken, those in progress have the drain time, and those still running after it are answered
with an error.

It uses the SDK's public calls, and of its internals only the count of jobs whose result is not
posted yet (`JobsProgress`). The SDK is the extra `runpod`, imported after the load has begun.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from ...loader.errors import TeneralError, UsageError
from ...loader.timeline import Timeline
from ...runtime.config import ServeConfig
from ...runtime.errors import CancelledError, DrainingError
from ...runtime.instance.helpers import launch_helpers
from ..function.channel import calling_on_loop
from . import platform_of

if TYPE_CHECKING:
    from ...runtime.instance.instance import Instance
    from ..function.context import Context
    from ..function.handler import Handler
    from . import MakeApp

logger = logging.getLogger("teneral.runpod")

NAME = "runpod-queue"  # of the platform
# The address of jobs; without it the SDK runs one test job and ends.
JOBS_VARIABLE = "RUNPOD_WEBHOOK_GET_JOB"
PROGRESS_INTERVAL_S = 1.0  # the SDK starts a thread for every progress update
CUT_GRACE_S = 2.0  # for posting the results of cancelled jobs
# Interval of checks whether all results are posted, only while draining.
POLL_S = 0.02
_END = object()


def run_runpod_queue(config: ServeConfig, _make_app: MakeApp) -> int:
    """Process jobs until a signal. Blocks.

    Returns 0; raises the error that ended the instance, and `UsageError` without the SDK or its
    variables. Changes the process: logging, signal handlers. Jobs are not HTTP requests,
    which `_make_app` is for.
    """
    check_surroundings(os.environ)
    timeline = Timeline()
    launched = launch_helpers(config, timeline, fork=True)
    from ...runtime.instance.instance import Instance  # from here on in parallel to the load

    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("torch").setLevel(logging.WARNING)
    with Instance(config, timeline=timeline, launched=launched) as instance:
        from ..function.handler import Handler, load_handler
        from ..plain import handler as plain

        handler = load_handler(config.handler) if config.handler else Handler(plain)
        try:
            drain_timeout_s = config.drain_timeout_s
            if drain_timeout_s is None:
                drain_timeout_s = platform_of(NAME, {}).drain_timeout_s
            _work(instance, handler, drain_timeout_s)
        finally:
            handler.close()
        failure = instance.failure
    if failure is not None:
        raise failure
    return 0


def check_surroundings(environment: os._Environ[str] | dict[str, str]) -> None:
    """Raise `UsageError`, naming what is missing, before anything is started."""
    if not environment.get(JOBS_VARIABLE):
        raise UsageError(
            f"{JOBS_VARIABLE} is not set: this is not a worker of a RunPod queue",
            key="platform",
            hint="To try a function elsewhere, call it with teneral invoke.",
        )
    from importlib.util import find_spec

    if find_spec("runpod") is None:
        raise UsageError(
            "RunPod's queue needs its SDK, which is not installed",
            key="platform",
            hint="pip install 'teneral[runpod]'",
        )


def _work(instance: Instance, handler: Handler, drain_timeout_s: float) -> None:
    """Process jobs until a signal, or the end of the instance. In the main thread."""
    # Takes more than a second: in parallel to the load.
    import runpod
    from runpod.serverless.modules.worker_state import JobsProgress

    kind = instance.kind.result()
    if kind == "decoder":
        instance.engine.result()
    elif kind == "onnx":
        instance.onnx.result()
    else:
        instance.embedder.result()
    jobs = JobsProgress()
    worker = RunPodWorker(
        instance,
        handler,
        drain_timeout_s=drain_timeout_s,
        num_unposted=jobs.get_job_count,
        tell_progress=runpod.serverless.progress_update,
    )
    settings = {"handler": worker.sdk_handler, "concurrency_modifier": worker.concurrency}
    with suppress(asyncio.CancelledError):  # the drain ends the SDK's loop with it
        runpod.serverless.start({**settings, "return_aggregate_stream": True})


class RunPodWorker:
    """The SDK's callbacks, on its event loop."""

    def __init__(
        self,
        instance: Instance,
        handler: Handler,
        *,
        drain_timeout_s: float,
        num_unposted: Callable[[], int],
        tell_progress: Callable[[dict[str, Any], Any], object],
    ) -> None:
        """`num_unposted` counts the SDK's jobs whose results are not posted; `tell_progress` posts
        progress.
        """
        self._instance = instance
        self._handler = handler
        self._drain_timeout_s = drain_timeout_s
        self._num_unposted = num_unposted
        self._tell_progress = tell_progress
        self._draining: asyncio.Task[None] | None = None
        self._cut = asyncio.Event()  # set when running jobs must end
        self._begun = False

    @property
    def sdk_handler(self) -> Callable[[dict[str, Any]], Any]:
        """The callback: a generator if the function is defined as one, which the SDK checks before
        its calls.
        """
        return self.stream if self._handler.kind.is_generator else self.answer

    def concurrency(self, current: int) -> int:
        """The SDK's number of concurrent jobs, requested before it takes any. None while draining."""
        if not self._begun:
            self._begun = True
            self._take_over_signals()
        if self._draining is not None or not self._instance.state.can_answer:
            return 0
        return self._instance.config.max_running

    async def answer(self, job: dict[str, Any]) -> Any:
        """The job's result; the list of values of a generator. Errors are results in the SDK's
        shape, but without a traceback, which is logged.
        """
        try:
            given = [json_ready(value) async for value in self._values(job)]
        except Exception as error:  # noqa: BLE001 - any error is answered
            return {"error": self._error_text(job, error)}
        return given[0] if len(given) == 1 else given

    async def stream(self, job: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """The values as they are made: the SDK streams them, and posts all of them as the job's
        output.
        """
        async with aclosing(self._values(job)) as values:
            try:
                async for value in values:
                    yield json_ready(value)
                return
            except Exception as error:  # noqa: BLE001 - as above
                text = self._error_text(job, error)
        yield {"error": text}

    async def _values(self, job: dict[str, Any]) -> AsyncGenerator[Any, None]:
        from ..function.handler import run

        context = self._context(job)
        async with aclosing(run(self._handler, job.get("input"), context)) as values:  # type: ignore[type-var]
            while (value := await self._next(values)) is not _END:
                yield value

    async def _next(self, values: AsyncIterator[Any]) -> Any:
        """The next value, or `_END`. Raises `DrainingError` if the time is over first."""
        step = asyncio.ensure_future(anext(values, _END))
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait({step, cut}, return_when=asyncio.FIRST_COMPLETED)
            if step.done():
                return step.result()
            raise DrainingError("the worker shut down before the job was done")
        finally:
            cut.cancel()
            if not step.done():
                step.cancel()
                await asyncio.wait({step})  # the invocation has ended with this step

    def _context(self, job: dict[str, Any]) -> Context:
        from ..function.context import Context

        last_s = -PROGRESS_INTERVAL_S

        def tell(value: Any) -> None:
            nonlocal last_s
            # Here, so that the function gets the error for invalid JSON.
            json.dumps(value, allow_nan=False)
            if time.monotonic() - last_s >= PROGRESS_INTERVAL_S:
                last_s = time.monotonic()
                self._tell_progress(job, value)

        timeout_s = self._instance.config.request_timeout_s
        return Context(
            self._instance,
            request_id=str(job["id"]),
            timeout_s=timeout_s,
            platform={"name": NAME, "job": job},
            on_progress=tell,
        )

    def _error_text(self, job: dict[str, Any], error: Exception) -> str:
        from ..http.errors import as_api_error

        failure = as_api_error(error)
        if not isinstance(error, TeneralError) or failure.status >= 500:
            logger.warning("job %s: %s", job["id"], error, exc_info=error.__cause__ or error)
        kind = "request_timeout" if isinstance(error, CancelledError) else failure.code or failure.kind
        return json.dumps({"error_type": kind, "error_message": failure.message}, ensure_ascii=False)

    # ending

    def _take_over_signals(self) -> None:
        """Replace the SDK's signal handlers. Its own shutdown would wait for its next job, up to 90
        s, and then drop that job.
        """
        loop = asyncio.get_running_loop()
        sdk_stops = signal.getsignal(signal.SIGTERM)

        def drain(timeout_s: float) -> None:
            if self._draining is None:
                self._draining = loop.create_task(self._drain(timeout_s, stop))

        def stop() -> None:
            if callable(sdk_stops):
                sdk_stops(signal.SIGTERM, None)

        def on_signal(number: int) -> None:
            if self._draining is not None:  # the second signal: end at once
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            drain(self._drain_timeout_s)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        self._instance.ended.add_done_callback(calling_on_loop(loop, lambda _: drain(0.0)))

    async def _drain(self, timeout_s: float, stop: Callable[[], None]) -> None:
        """Wait for jobs to end, or cancel them; then stop the SDK. Ends with the event loop."""
        logger.info("draining: %d jobs in work, %g s", self._num_unposted(), timeout_s)
        deadline_s = time.monotonic() + timeout_s
        if not await self._posted_by(deadline_s):
            self._cut.set()
            await self._posted_by(time.monotonic() + CUT_GRACE_S)
        await asyncio.to_thread(self._instance.save_snapshot, deadline_s - time.monotonic())
        stop()
        # Its loops check for that between polls only. Each is cancelled until all have ended, and
        # the event loop with them: a cancellation at the same time as a poll's end is lost.
        while True:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(POLL_S)

    async def _posted_by(self, deadline_s: float) -> bool:
        while self._num_unposted() > 0:
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(POLL_S)
        return True


def json_ready(value: Any) -> Any:
    """The value as JSON, the only format of the queue: bytes as base64."""
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
