"""Shared parts of the tests of batch jobs: instances with tiny models that answer, and a nursery of
workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.batch_jobs import Workers, config_of, workers_of
from tests.support.tiny_models import save_tiny

from teneral.handlers.batch.job import run_job
from teneral.handlers.batch.spec import JobReport, JobSpec
from teneral.runtime.instance.instance import Instance


@pytest.fixture(scope="session")
def decoder_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("batch") / "tiny-llama")


@pytest.fixture(scope="session")
def decoder(decoder_dir: Path, one_thread: None) -> Iterator[Instance]:
    with Instance(config_of(decoder_dir, max_queued=64)) as instance:
        yield instance


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Instance]:
    directory = save_tiny("bert", tmp_path_factory.mktemp("batch") / "tiny-bert")
    with Instance(config_of(directory)) as instance:
        yield instance


@pytest.fixture(scope="session")
def workers(decoder_dir: Path) -> Iterator[Workers]:
    with workers_of(decoder_dir) as workers:
        yield workers


@pytest.fixture
def run(decoder: Instance) -> Callable[..., JobReport]:
    """Runs a job to its end: `run(input, output, **fields of JobSpec)`."""

    def run_here(
        given: Path | str,
        output: Path | str,
        *,
        host: Instance = decoder,
        timeout_s: float | None = None,
        on_progress: Any = None,
        **fields: Any,
    ) -> JobReport:
        spec = JobSpec(input=str(given), output=str(output), **fields)
        return run_job(spec, host, timeout_s=timeout_s, on_progress=on_progress)

    return run_here
