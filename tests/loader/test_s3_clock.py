"""S3: a machine whose clock is wrong signs by the store's, against our own server."""

from __future__ import annotations

import calendar
import email.utils
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.aws_environment import use_test_credentials
from tests.support.load import patience_s
from tests.support.s3_blob import DATA, read, record
from tests.support.store_faults import Fault
from tests.support.store_http import Request
from tests.support.store_server import StoreServer

from teneral.loader.errors import AccessDeniedError
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.s3.store import S3Store

THREADS = 8


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    use_test_credentials(monkeypatch)
    (tmp_path / "models" / "m").mkdir(parents=True)
    (tmp_path / "models" / "m" / "blob").write_bytes(DATA)
    with StoreServer(tmp_path) as started:
        yield started


@pytest.fixture
def store(server: StoreServer) -> Iterator[S3Store]:
    options = SourceOptions(endpoint_url=server.url, max_attempts=2, outage_s=0.0, hedge_after_s=0)
    store = S3Store("s3://models/m", options)
    yield store
    store.close()


def skewed(request: Request, ahead_s: float) -> Fault | None:
    """The fault of a store whose clock is `ahead_s` ahead of this machine's."""
    now_s = time.time() + ahead_s
    signed_s = calendar.timegm(time.strptime(request.headers["x-amz-date"], "%Y%m%dT%H%M%SZ"))
    if abs(signed_s - now_s) <= 900:
        return None
    return Fault(
        status=403, code="RequestTimeTooSkewed", headers={"Date": email.utils.formatdate(now_s, usegmt=True)}
    )


@pytest.mark.parametrize("ahead_s", [-86_400.0, 3_600.0, 86_400.0 * 400])
def test_a_wrong_clock_is_corrected_once_by_the_stores(
    server: StoreServer, store: S3Store, ahead_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    seen = record(server, lambda request: skewed(request, ahead_s))
    assert read(store) == DATA
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: read(store), range(8))) == [DATA] * 8
    assert len(seen) == 10
    assert len([each for each in caplog.records if "clock" in each.getMessage()]) == 1


def test_threads_that_ask_at_once_with_a_wrong_clock_all_get_their_answers(
    server: StoreServer, store: S3Store
) -> None:
    all_refused = threading.Barrier(8)

    def refuse(request: Request) -> Fault | None:
        fault = skewed(request, 7_200.0)
        if fault is not None:
            all_refused.wait(patience_s(10))
        return fault

    record(server, refuse)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: read(store), range(8))) == [DATA] * 8


@pytest.mark.parametrize("date", ["", "nonsense", "now"])
def test_a_store_that_refuses_its_own_time_is_an_error(
    server: StoreServer, store: S3Store, date: str
) -> None:
    headers = {"Date": email.utils.formatdate(usegmt=True) if date == "now" else date} if date else {}
    seen = record(server, lambda _: Fault(status=403, code="RequestTimeTooSkewed", headers=headers))
    with pytest.raises(AccessDeniedError, match="clock differs"):
        read(store)
    assert len(seen) <= 2
