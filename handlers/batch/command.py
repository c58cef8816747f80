"""`teneral batch`: one job, here and now, with a model of its own.

SIGTERM ends it within the drain time; what is finished stays, and the next run goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import sys

from ...loader.errors import UsageError
from ...runtime.config import ServeConfig
from ...runtime.instance import Instance
from ..function.lifetime import Lifetime
from .job import arun_job, finish_computed
from .progress import ProgressLines
from .spec import JobReport, JobSpec

EXIT_INCOMPLETE = 75  # EX_TEMPFAIL: run it again
EXIT_TERMINATED = 143


def run_batch(
    spec: JobSpec, config: ServeConfig, *, deadline_s: float | None = None, quiet: bool = False
) -> JobReport:
    """Blocks until the job is complete, or its time is up, or SIGTERM comes. Raises what `arun_job` does.

    Changes the process: logging, and while it works, what SIGTERM does.
    """
    if deadline_s is not None and not (0 < deadline_s < math.inf):
        raise UsageError("--deadline-s must be a number of seconds above 0", key="deadline_s")
    lifetime = Lifetime(deadline_s)
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("teneral.http.access").setLevel(
        logging.WARNING
    )  # or each line of the input would be one
    report = finish_computed(spec, config)  # a job that was asked for twice needs no model
    if report is not None:
        return report
    with Instance(config) as instance, ProgressLines(quiet=quiet) as lines:
        return asyncio.run(_until_told(spec, instance, lifetime, lines))


def exit_code(report: JobReport) -> int:
    """0 when there is nothing left for this worker to do; what else it may be is worth another run."""
    if report.ok:
        return 0
    return EXIT_TERMINATED if report.stopped_by == "stop" else EXIT_INCOMPLETE


async def _until_told(
    spec: JobSpec, instance: Instance, lifetime: Lifetime, lines: ProgressLines
) -> JobReport:
    """The first SIGTERM stops the job; a second one ends the process."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGTERM)
        lifetime.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        return await arun_job(spec, instance, lifetime=lifetime, on_progress=lines.update)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
