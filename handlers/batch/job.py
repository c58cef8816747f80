"""Runs a job, or the rest of it: `run_job`, and `arun_job` for async callers.

They may be called for the same job any number of times, also concurrently, and killed at any
moment: every record appears once in the end. This module knows no platform: the caller supplies an
instance and a lifetime.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from ...loader.artifact import open_artifact
from ...loader.pin import split_pin
from ...loader.sources.open import open_source
from ...runtime.config import ServeConfig
from ...runtime.errors import CancelledError, DrainingError
from ..function.lifetime import Lifetime, refuse_to_block_a_loop
from .answers import answering
from .finish import Finished, finish_job
from .index import JobIndex, check_same_job
from .meter import JobProgress, Meter
from .open_job import (
    MIN_PART_LINES,
    Opened,
    find_index,
    identity_of,
    model_of,
    publish_index,
    read_index,
    scan_input,
)
from .partial import list_partials
from .parts import PartInfo, list_parts, plan_order
from .places import Places, open_places
from .spec import JobReport, JobSpec, Status
from .worker import Worker

if TYPE_CHECKING:
    from ...runtime.instance import Instance

PROGRESS_S = 0.2

T = TypeVar("T")
OnProgress = Callable[[JobProgress], None]


def run_job(
    spec: JobSpec, host: Instance, *, timeout_s: float | None = None, on_progress: OnProgress | None = None
) -> JobReport:
    """The blocking form of `arun_job`, with a time limit."""
    refuse_to_block_a_loop()
    return asyncio.run(arun_job(spec, host, lifetime=Lifetime(timeout_s), on_progress=on_progress))


async def arun_job(
    spec: JobSpec, host: Instance, *, lifetime: Lifetime | None = None, on_progress: OnProgress | None = None
) -> JobReport:
    """Work on the job until it is complete, this worker's share is done, or the lifetime ends: at
    its deadline, or `spec.drain_s` after it is cancelled. The instance may still be loading.

    Raises `JobMismatchError` if the output is another job's, `ChangedError` if the input was
    replaced meanwhile, the store's errors, and the error that ended the instance. Finished parts
    stay after any error: a later run continues from there. `on_progress` is called regularly, on
    this loop: it must not block.
    """
    lifetime = lifetime or Lifetime()
    meter = Meter()
    with open_places(spec, host.config.source_options) as places:
        job = _Job(spec, host, places, lifetime, meter)
        async with _reporting(meter, on_progress):
            return await job.run()


def finish_computed(spec: JobSpec, config: ServeConfig) -> JobReport | None:
    """Complete a job whose parts all exist, or check that it is complete; None if parts are
    missing.

    Needs no instance: it reads the model's manifest. Blocks. Raises the errors of `arun_job`.
    """
    with open_places(spec, config.source_options) as places:
        index = read_index(places)
        if index is None or len(list_parts(places.work, len(index.parts))) < len(index.parts):
            return None
        info = places.input.look()
        model = spec.model_identity or _model_at(config)
        version = places.input.identity_of(info)
        wanted = identity_of(spec, config, places.input.address, version, model)
        check_same_job(index, wanted, place=places.output)
        return _complete(spec, index, finish_job(places, index, {}), Meter())


class _Job:
    """One run of a job. Lives on one event loop."""

    def __init__(
        self, spec: JobSpec, host: Instance, places: Places, lifetime: Lifetime, meter: Meter
    ) -> None:
        self._spec = spec
        self._host = host
        self._places = places
        self._lifetime = lifetime
        self._meter = meter
        config = host.config
        # Batch work may use half of the engine's queue.
        room = config.max_running + (config.max_queued + 1) // 2
        self._window = max(1, min(2 * config.max_running, room))

    async def run(self) -> JobReport:
        try:
            opened = await self._open()
        except CancelledError:
            return JobReport(
                status=Status.INCOMPLETE, output=self._spec.output, key="", stopped_by=self._stopped_by(None)
            )
        index = opened.index
        self._meter.records, self._meter.parts = index.num_records, len(index.parts)
        done = await asyncio.to_thread(list_parts, self._places.work, len(index.parts))
        for number in done:
            self._meter.part_done(index.parts[number].num_records)
        written: dict[int, PartInfo] = {}
        draining: DrainingError | None = None
        if len(done) < len(index.parts):
            try:
                await self._work(opened, done, written)
            except DrainingError as error:
                draining = error
            done = await asyncio.to_thread(list_parts, self._places.work, len(index.parts))
        if len(done) == len(index.parts):
            finished = await asyncio.to_thread(finish_job, self._places, index, written)
            return _complete(self._spec, index, finished, self._meter)
        return self._unfinished(index, done, draining)

    async def _open(self) -> Opened:
        """Open the job. Raises `CancelledError` if the lifetime ends first."""
        spec, places = self._spec, self._places
        info = await asyncio.to_thread(places.input.look)
        version = places.input.identity_of(info)
        index = await asyncio.to_thread(find_index, places)
        digest = _in_daemon(lambda: spec.model_identity or model_of(self._host.digest, self._host.config))
        if index is None:
            scanned = await asyncio.to_thread(
                scan_input,
                places,
                spec,
                version=info.version,
                size_bytes=info.size_bytes,
                part_lines=spec.part_lines or max(MIN_PART_LINES, self._window),
                lifetime=self._lifetime,
            )
        model = await self._lifetime.wait_async(digest)
        identity = identity_of(spec, self._host.config, places.input.address, version, model)
        if index is not None:
            check_same_job(index, identity, place=places.output)
            return Opened(index, info.version, is_new=False)
        published, is_new = await asyncio.to_thread(
            publish_index,
            places,
            identity,
            scanned,
            size_bytes=info.size_bytes,
            max_line_bytes=spec.max_line_bytes,
        )
        return Opened(published, info.version, is_new=is_new)

    async def _work(self, opened: Opened, done: frozenset[int], written: dict[int, PartInfo]) -> None:
        index = opened.index
        # Later workers begin at a random part: others may be working from the beginning on.
        start = 0 if opened.is_new or self._spec.share else random.randrange(len(index.parts))  # noqa: S311
        partials = frozenset[int]()
        if not opened.is_new:
            partials = await asyncio.to_thread(list_partials, self._places.work)
        async with answering(self._host, index, window=self._window) as answers:
            worker = Worker(
                self._places,
                index,
                answers,
                input_version=opened.version,
                meter=self._meter,
                lifetime=self._lifetime,
                drain_s=self._spec.drain_s,
                window=self._window,
                partials=partials,
            )
            try:
                await worker.run(plan_order(len(index.parts), done, self._spec.share, start))
            finally:
                written.update(worker.written)

    def _unfinished(self, index: JobIndex, done: frozenset[int], draining: DrainingError | None) -> JobReport:
        left = plan_order(len(index.parts), done, self._spec.share, 0)
        is_share_done = self._spec.share is not None and not left
        view = self._meter.view()
        return JobReport(
            status=Status.SHARE_DONE if is_share_done else Status.INCOMPLETE,
            output=self._spec.output,
            key=index.key,
            records=index.num_records,
            records_done=sum(index.parts[number].num_records for number in done),
            parts=len(index.parts),
            parts_done=len(done),
            stopped_by=None if is_share_done else self._stopped_by(draining),
            run_records=view.run_records,
            run_failed=view.run_failed,
            run_tokens=view.run_tokens,
            run_s=view.run_s,
        )

    def _stopped_by(self, draining: DrainingError | None) -> str:
        if self._lifetime.cancelled:
            return "stop"
        return "draining" if draining is not None else "deadline"


def _complete(spec: JobSpec, index: JobIndex, finished: Finished, meter: Meter) -> JobReport:
    view = meter.view()
    return JobReport(
        status=Status.COMPLETE,
        output=spec.output,
        key=index.key,
        records=index.num_records,
        records_done=index.num_records,
        failed=finished.num_failed,
        parts=len(index.parts),
        parts_done=len(index.parts),
        run_records=view.run_records,
        run_failed=view.run_failed,
        run_tokens=view.run_tokens,
        run_s=view.run_s,
    )


def _model_at(config: ServeConfig) -> str:
    """The identity of the model, like `model_of` for an instance that has loaded it."""
    address, digest = split_pin(config.model)
    if digest is None:
        source = open_source(address, config.source_options)
        try:
            digest = open_artifact(source).digest
        finally:
            source.close()
    return model_of(digest, config)


def _in_daemon(function: Callable[[], T]) -> Future[T]:
    """The function's result, from a daemon thread that blocks nothing: not even the end of a loop
    whose job was stopped.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - passed to the waiting caller
            future.set_exception(error)

    threading.Thread(target=run, name="teneral-batch-model", daemon=True).start()
    return future


@asynccontextmanager
async def _reporting(meter: Meter, on_progress: OnProgress | None) -> AsyncIterator[None]:
    """Report progress regularly inside this context, and once at the end."""
    if on_progress is None:
        yield
        return

    async def report() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            on_progress(meter.view())

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()
        on_progress(meter.view())
