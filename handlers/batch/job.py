"""Runs a job, or the rest of it: `run_job`, and `arun_job` for async callers.

They may be called for the same job any number of times, also concurrently, and killed at any
moment: every record appears once in the end. This module knows no platform: the caller supplies an
instance and a lifetime.

The opening of a job: an existing index is read, or a new one is written.

The first worker scans the input, in parallel to the load of the model, and writes `job.json` by a
conditional put; all others find it. An output that belongs to another job is refused by name. This
module does not know how parts are processed.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ...loader.artifact import open_artifact
from ...loader.errors import AlreadyExistsError, NotFoundError, UsageError
from ...loader.sources.open import open_source, split_pin
from ...runtime.config import ServeConfig
from ...runtime.errors import CancelledError, DrainingError
from ..function.lifetime import Lifetime, refuse_to_block_a_loop
from .answers import answering
from .finish import MANIFEST_NAME, Finished, finish_job
from .index import (
    INDEX_NAME,
    MAX_INDEX_BYTES,
    JobIdentity,
    JobIndex,
    check_same_job,
    dump_index,
    index_options,
    make_index,
    parse_index,
)
from .input import LineScanner, Scanned
from .parts import Input, PartInfo, Places, list_partials, list_parts, open_places, plan_order, read_input
from .progress import JobProgress, ProgressMeter
from .spec import JobMismatchError, JobReport, JobSpec, Status
from .worker import Worker

if TYPE_CHECKING:
    from ...runtime.instance.instance import Instance


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
    meter = ProgressMeter()
    with open_places(spec, host.config) as places:
        job = _Job(spec, host, places, lifetime, meter)
        async with _reporting(meter, on_progress):
            return await job.run()


def finish_computed(spec: JobSpec, config: ServeConfig) -> JobReport | None:
    """Complete a job whose parts all exist, or check that it is complete; None if parts are
    missing.

    Needs no instance: it reads the model's manifest. Blocks. Raises the errors of `arun_job`.
    """
    with open_places(spec, config) as places:
        index = read_index(places)
        if index is None or len(list_parts(places.work, len(index.parts))) < len(index.parts):
            return None
        info = places.input.look()
        model = spec.model_identity or _model_at(config)
        version = places.input.identity_of(info)
        wanted = identity_of(spec, config, places.input, version, model)
        check_same_job(index, wanted, place=places.output)
        return _complete(spec, index, finish_job(places, index, {}), ProgressMeter())


class _Job:
    """One run of a job. Lives on one event loop."""

    def __init__(
        self, spec: JobSpec, host: Instance, places: Places, lifetime: Lifetime, meter: ProgressMeter
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
        identity = identity_of(spec, self._host.config, places.input, version, model)
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
        files = self._places.input.files
        async with answering(self._host, index, window=self._window, files=files) as answers:
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


def _complete(spec: JobSpec, index: JobIndex, finished: Finished, meter: ProgressMeter) -> JobReport:
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
async def _reporting(meter: ProgressMeter, on_progress: OnProgress | None) -> AsyncIterator[None]:
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


MIN_PART_LINES = 64
COMPRESSED = (
    b"\x1f\x8b",
    b"\x28\xb5\x2f\xfd",
    b"BZh",
    b"\xfd7zXZ",
)  # gzip, zstd, bzip2, xz: each line would fail


@dataclass(frozen=True, slots=True)
class Opened:
    """An open job. `version` is the version of the input for reads from the store."""

    index: JobIndex
    version: str
    is_new: bool  # no worker has started it before


def identity_of(
    spec: JobSpec, config: ServeConfig, given: Input, input_version: str, model: str
) -> JobIdentity:
    """The identity of the answers: from the settings, those that a user chooses and that affect a
    model's answers.
    """
    options = {
        "max_line_bytes": spec.max_line_bytes,
        "name": config.served_name,
        "max_context": config.max_context,
        "first_token": config.first_token,
        "kv_dtype": config.kv_dtype,
        "compute_dtype": config.compute_dtype,
        "batch_audio": config.batch_audio if given.files is not None and given.files.are_input else None,
    }
    return JobIdentity(given.address, input_version, model, index_options(options))


def model_of(digest: bytes | None, config: ServeConfig) -> str:
    """The identity of the model. Plain safetensors have only their address."""
    return split_pin(config.model)[0] if digest is None else digest.hex()


def read_index(places: Places) -> JobIndex | None:
    """The existing index. Blocks. Raises `JobFormatError`."""
    try:
        data, _ = places.work.read(INDEX_NAME, max_bytes=MAX_INDEX_BYTES)
    except NotFoundError:
        return None
    return parse_index(data)


def find_index(places: Places) -> JobIndex | None:
    """The existing index; None only if nothing looks like a job's output. Blocks. Raises
    `JobMismatchError`.
    """
    index = read_index(places)
    if index is not None:
        return index
    found = _what_is_there(places)
    if not found:
        return None
    index = read_index(places)  # another worker of this job may have just started
    if index is not None:
        return index
    raise JobMismatchError(
        f"{found} exists, but without the {INDEX_NAME} of its job",
        source=places.work.url,
        name=INDEX_NAME,
        hint="Move it away, or choose another output.",
    )


def _what_is_there(places: Places) -> str:
    """The address of an object that only a job writes; '' without one."""
    if _is_final_there(places):
        return places.output
    return places.work.url if list_parts(places.work) or _is_manifest_there(places) else ""


def _is_final_there(places: Places) -> bool:
    if places.final is None:
        return False
    try:
        places.final.stat(places.final_name)
    except NotFoundError:
        return False
    return True


def _is_manifest_there(places: Places) -> bool:
    try:
        places.work.stat(MANIFEST_NAME)
    except NotFoundError:
        return False
    return True


def scan_input(
    places: Places, spec: JobSpec, *, version: str, size_bytes: int, part_lines: int, lifetime: Lifetime
) -> Scanned:
    """Read the whole input once. Blocks.

    Raises `CancelledError` once the lifetime has ended, `ChangedError`, and `UsageError` for an
    input that is compressed or has too many lines.
    """
    scanner = LineScanner(max_line_bytes=spec.max_line_bytes, max_lines=spec.max_lines, part_lines=part_lines)
    for number, chunk in enumerate(read_input(places.input, version, 0, size_bytes)):
        lifetime.check()
        if number == 0 and chunk.startswith(COMPRESSED):
            raise UsageError(
                f"{places.input.address} is compressed", key="input", hint="Decompress it to plain JSONL."
            )
        scanner.feed(chunk)
    return scanner.finish()


def publish_index(
    places: Places, identity: JobIdentity, scanned: Scanned, *, size_bytes: int, max_line_bytes: int
) -> tuple[JobIndex, bool]:
    """Publish the index of the job, and return whether it is new. Blocks. Raises `JobMismatchError`
    if another job was first.
    """
    index = make_index(identity, scanned, size_bytes=size_bytes, max_line_bytes=max_line_bytes)
    data = dump_index(index)
    # An index that readers would refuse is not published.
    parse_index(data)
    try:
        places.work.put(INDEX_NAME, data, if_absent=True)
    except AlreadyExistsError:
        found = read_index(places)
        if found is None:
            raise
        check_same_job(found, identity, place=places.output)
        return found, False
    return index, True
