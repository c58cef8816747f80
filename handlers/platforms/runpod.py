"""RunPod's queue: `teneral serve --platform runpod-queue`. A worker of RunPod's own SDK takes jobs and posts their
results; what it calls for each is here: the user's function, or the model itself, with the job's `input` for its event.

Jobs are taken once they can be worked on at once, as soon as the first layers are there: until then they are better off
in the queue, where another worker may take them. How many at a time does not change after that, because the SDK lets
every job end before it changes it. At a signal no job is taken any more, those in work have the drain's time, and who
has none left is told so.

It knows the SDK's public calls, and of its inside only the count of jobs whose result is not posted yet
(`JobsProgress`). The SDK is the extra `runpod`, imported after the load has begun.
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
from contextlib import aclosing, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from ...loader.errors import TeneralError, UsageError
from ...loader.timeline import Timeline
from ...runtime.config import ServeConfig
from ...runtime.errors import CancelledError, DrainingError
from ...runtime.start import launch_helpers
from ..function.lifetime import calling_on_loop
from . import platform_of

if TYPE_CHECKING:
    from ...runtime.instance import Instance
    from ..function.context import Context
    from ..function.handler import Handler
    from . import MakeApp

logger = logging.getLogger("teneral.runpod")

NAME = "runpod-queue"  # of the platform
JOBS_VARIABLE = (
    "RUNPOD_WEBHOOK_GET_JOB"  # where jobs come from; without it the SDK runs one test job and ends
)
PROGRESS_INTERVAL_S = 1.0  # the SDK starts a thread for every word of progress
CUT_GRACE_S = 2.0  # for the results of jobs that were ended to be posted
POLL_S = 0.02  # how often the SDK is asked whether all results are posted, during the drain only
_END = object()


def run_runpod_queue(config: ServeConfig, make_app: MakeApp | None = None) -> int:
    """Work on jobs until a signal ends it. Returns 0; raises the error that ended the instance, and `UsageError` where
    the SDK or its variables are missing. Blocks; changes the process: logging, signal handlers.

    Jobs are no HTTP requests, so `make_app` is not used.
    """
    check_surroundings(os.environ)
    timeline = Timeline()
    launched = launch_helpers(config, timeline, fork=True)
    with launched.adopt(timeline) if launched else nullcontext() as helpers:
        from ...runtime.instance import Instance  # from here on beside the load

        logging.basicConfig(
            level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        logging.getLogger("torch").setLevel(logging.WARNING)
        with Instance(config, timeline=timeline, helpers=helpers) as instance:
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
    """Raises `UsageError` saying what is missing, before anything is begun."""
    if not environment.get(JOBS_VARIABLE):
        raise UsageError(
            f"{JOBS_VARIABLE} is not set: this is no worker of a RunPod queue",
            key="platform",
            hint="To try a function elsewhere, call it with teneral invoke.",
        )
    from importlib.util import find_spec

    if find_spec("runpod") is None:
        raise UsageError(
            "working on RunPod's queue takes its SDK, which is not installed",
            key="platform",
            hint="pip install 'teneral[runpod]'",
        )


def _work(instance: Instance, handler: Handler, drain_timeout_s: float) -> None:
    """Until a signal, or the end of the instance. In the main thread."""
    import runpod  # takes more than a second: beside the load
    from runpod.serverless.modules.worker_state import JobsProgress

    kind = instance.kind.result()
    if kind == "decoder":
        instance.engine.result()
    elif kind == "onnx":
        instance.onnx.result()
    else:
        instance.embedder.result()
    jobs = JobsProgress()
    worker = Worker(
        instance,
        handler,
        drain_timeout_s=drain_timeout_s,
        num_unposted=jobs.get_job_count,
        tell_progress=runpod.serverless.progress_update,
    )
    settings = {"handler": worker.sdk_handler, "concurrency_modifier": worker.concurrency}
    with suppress(asyncio.CancelledError):  # which is how the drain ends the SDK's loop
        runpod.serverless.start({**settings, "return_aggregate_stream": True})


class Worker:
    """What the SDK calls, on its event loop."""

    def __init__(
        self,
        instance: Instance,
        handler: Handler,
        *,
        drain_timeout_s: float,
        num_unposted: Callable[[], int],
        tell_progress: Callable[[dict[str, Any], Any], object],
    ) -> None:
        """`num_unposted` counts the jobs that the SDK has and has not posted results of; `tell_progress` posts it."""
        self._instance = instance
        self._handler = handler
        self._drain_timeout_s = drain_timeout_s
        self._num_unposted = num_unposted
        self._tell_progress = tell_progress
        self._draining: asyncio.Task[None] | None = None
        self._cut = asyncio.Event()  # jobs that still run are to end
        self._begun = False

    @property
    def sdk_handler(self) -> Callable[[dict[str, Any]], Any]:
        """A generator where the function is one by its definition: the SDK asks which before it calls."""
        return self.stream if self._handler.kind.is_generator else self.answer

    def concurrency(self, current: int) -> int:
        """How many jobs the SDK may have at a time; it asks before it takes any. None while draining."""
        if not self._begun:
            self._begun = True
            self._take_over_signals()
        if self._draining is not None or not self._instance.state.can_answer:
            return 0
        return self._instance.config.max_running

    async def answer(self, job: dict[str, Any]) -> Any:
        """The job's result; of a function that gives several values, their list. Errors as results, in the SDK's shape
        but without a traceback, which is for the log.
        """
        try:
            given = [json_ready(value) async for value in self._values(job)]
        except Exception as error:  # noqa: BLE001 - the queue gets an answer, whatever it was
            return {"error": self._told(job, error)}
        return given[0] if len(given) == 1 else given

    async def stream(self, job: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """The values as they come: the SDK streams them, and posts all of them as the job's output."""
        async with aclosing(self._values(job)) as values:
            try:
                async for value in values:
                    yield json_ready(value)
                return
            except Exception as error:  # noqa: BLE001 - as above
                told = self._told(job, error)
        yield {"error": told}

    async def _values(self, job: dict[str, Any]) -> AsyncGenerator[Any, None]:
        from ..function.handler import run

        context = self._context(job)
        async with aclosing(run(self._handler, job.get("input"), context)) as values:  # type: ignore[type-var]
            while (value := await self._next(values)) is not _END:
                yield value

    async def _next(self, values: AsyncIterator[Any]) -> Any:
        """The next value, or `_END`. Raises `DrainingError` where time is up before it comes."""
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
                await asyncio.wait({step})  # the invocation has ended when this has

    def _context(self, job: dict[str, Any]) -> Context:
        from ..function.context import Context

        last_s = -PROGRESS_INTERVAL_S

        def tell(value: Any) -> None:
            nonlocal last_s
            json.dumps(value, allow_nan=False)  # here, where who gave it learns that it is no JSON
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

    def _told(self, job: dict[str, Any], error: Exception) -> str:
        from ..http.errors import as_api_error

        told = as_api_error(error)
        if not isinstance(error, TeneralError) or told.status >= 500:
            logger.warning("job %s: %s", job["id"], error, exc_info=error.__cause__ or error)
        kind = "request_timeout" if isinstance(error, CancelledError) else told.code or told.kind
        return json.dumps({"error_type": kind, "error_message": told.message}, ensure_ascii=False)

    # ending

    def _take_over_signals(self) -> None:
        """The SDK's own way to end would wait for its next job, up to 90 s, and then drop that job."""
        loop = asyncio.get_running_loop()
        sdk_stops = signal.getsignal(signal.SIGTERM)

        def drain(timeout_s: float) -> None:
            if self._draining is None:
                self._draining = loop.create_task(self._drain(timeout_s, stop))

        def stop() -> None:
            if callable(sdk_stops):
                sdk_stops(signal.SIGTERM, None)

        def on_signal(number: int) -> None:
            if self._draining is not None:  # the second one: at once
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            drain(self._drain_timeout_s)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        self._instance.ended.add_done_callback(calling_on_loop(loop, lambda _: drain(0.0)))

    async def _drain(self, timeout_s: float, stop: Callable[[], None]) -> None:
        """Let jobs end, or end them; then stop the SDK. Ends with the event loop."""
        logger.info("draining: %d jobs in work, %g s", self._num_unposted(), timeout_s)
        deadline_s = time.monotonic() + timeout_s
        if not await self._posted_by(deadline_s):
            self._cut.set()
            await self._posted_by(time.monotonic() + CUT_GRACE_S)
        await asyncio.to_thread(self._instance.save_snapshot, deadline_s - time.monotonic())
        stop()
        # Its loops look at that between polls only. Each is cancelled until all have ended, and the event loop with
        # them: a cancellation that comes together with a poll's end is lost.
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
    """What can stand in JSON, which is all that a queue takes: bytes as base64."""
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
