"""One blob in a bucket of our own server, read through S3."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.store_faults import Fault
from tests.support.store_http import Request
from tests.support.store_server import StoreServer

from teneral.loader.sources.s3.store import S3Store

DATA = bytes(range(256)) * 40


def record(server: StoreServer, answer: Callable[[Request], Fault | None] = lambda _: None) -> list[Request]:
    """The requests that arrive from now on, each answered as `answer` says."""
    seen: list[Request] = []

    def hook(request: Request) -> Fault | None:
        seen.append(request)
        return answer(request)

    server.set_fault(hook)
    return seen


def read(store: S3Store) -> bytes:
    return store.read("blob", max_bytes=len(DATA))[0]
