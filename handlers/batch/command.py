"""`teneral batch`: one job, with a model of its own.

SIGTERM ends it within the drain time; finished parts stay, and the next run continues from there.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import sys

from ...loader.errors import UsageError
from ...runtime.config import ServeConfig
from ...runtime.instance.instance import Instance
from ..function.lifetime import Lifetime
from .job import arun_job, finish_computed
from .progress import ProgressLines
from .spec import JobReport, JobSpec

EXIT_INCOMPLETE = 75  # EX_TEMPFAIL: run it again
EXIT_TERMINATED = 143


def run_batch(
    spec: JobSpec, config: ServeConfig, *, deadline_s: float | None = None, quiet: bool = False
) -> JobReport:
    """Run a job. Blocks until it is complete, its time is over, or SIGTERM. Raises the errors of
    `arun_job`.

    Changes the process: logging, and while it runs, the handler of SIGTERM.
    """
    if deadline_s is not None and not (0 < deadline_s < math.inf):
        raise UsageError("--deadline-s must be a number of seconds above 0", key="deadline_s")
    lifetime = Lifetime(deadline_s)
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # Otherwise each line of the input would be logged.
    logging.getLogger("teneral.http.access").setLevel(logging.WARNING)
    report = finish_computed(spec, config)  # a job that is complete already needs no model
    if report is not None:
        return report
    with Instance(config) as instance, ProgressLines(quiet=quiet) as lines:
        return asyncio.run(_until_signal(spec, instance, lifetime, lines))


def exit_code(report: JobReport) -> int:
    """0 if nothing is left for this worker; other statuses are worth another run."""
    if report.ok:
        return 0
    return EXIT_TERMINATED if report.stopped_by == "stop" else EXIT_INCOMPLETE


async def _until_signal(
    spec: JobSpec, instance: Instance, lifetime: Lifetime, lines: ProgressLines
) -> JobReport:
    """Run the job until the first SIGTERM; a second one ends the process."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGTERM)
        lifetime.cancel()

    loop.add_signal_handler(signal.SIGTERM, stop)
    try:
        return await arun_job(spec, instance, lifetime=lifetime, on_progress=lines.update)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
