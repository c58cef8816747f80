"""A small packed artifact behind the store server, and whole loads of it: what arrives must be what was packed."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.artifacts import BuiltArtifact, Layout, build_artifact
from tests.support.inspection import connections_of
from tests.support.paced import WAIT_S
from tests.support.store_faults import Fault, FaultHook
from tests.support.store_http import Request
from tests.support.store_server import StoreServer

from teneral.loader.load.accounting import LoadStatistics
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.http.outage import HttpStatistics
from teneral.loader.sources.http.source import HttpSource

LAYERS: Layout = [(f"layers.{number}", {f"w{number}": ("BF16", (300, 300))}) for number in range(8)]


@dataclass(frozen=True)
class Loaded:
    web: HttpStatistics
    load: LoadStatistics


def check_load(load: WeightLoad, built: BuiltArtifact) -> None:
    """Run the load to its end, and compare every tensor, bit for bit. Raises the load's error."""
    load.start()
    for group in built.manifest.groups:
        load.wait(group.index, timeout_s=WAIT_S)
    for name, original in built.originals.items():
        assert load.array(name).tobytes() == original.tobytes(), name
    assert load.join(WAIT_S)
    load.check_integrity()


class FaultyStore:
    """Serves one artifact from `folder`."""

    def __init__(self, folder: Path, built: BuiltArtifact, server: StoreServer) -> None:
        self.built = built
        self.server = server
        self.folder = folder
        self.url = f"{server.url}/models"

    def set_fault(self, fault: FaultHook | None) -> None:
        self.server.set_fault(fault)

    def load(self, *, connections: int = 8, range_bytes: int = 30_000, **options: object) -> Loaded:
        """Load everything, compare every tensor, bit for bit. Raises the load's error."""
        source = HttpSource(
            self.url, SourceOptions(**{"hedge_after_s": 0.1, "read_timeout_s": 5.0} | options)
        )
        load_options = LoadOptions(connections=connections, range_bytes=range_bytes)
        try:
            with WeightLoad(source, self.built.manifest, options=load_options) as load:
                check_load(load, self.built)
                assert connections_of(source).statistics().in_use == 0  # losers are closed, winners kept
                return Loaded(source.statistics(), load.statistics())
        finally:
            source.close()


@contextmanager
def faulty_store(
    folder: Path,
    layout: Layout = LAYERS,
    *,
    tls: ssl.SSLContext | None = None,
    rate_mb_s: float | None = None,
    connection_rate_mb_s: float | None = None,
    built: BuiltArtifact | None = None,
) -> Iterator[FaultyStore]:
    built = built or build_artifact(layout, draft_elements=30_000, refine_elements=30_000)
    for blob in built.manifest.blobs:
        path = folder / "models" / blob.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(built.store.read(blob.name, max_bytes=1 << 30)[0])
    with StoreServer(
        folder, tls=tls, rate_mb_s=rate_mb_s, connection_rate_mb_s=connection_rate_mb_s
    ) as server:
        yield FaultyStore(folder / "models", built, server)


def first_ranges(number: int, fault: Fault, *, after: int = 0) -> FaultHook:
    """Apply the fault to `count` range requests, after `after` good ones, and then no more."""
    seen = iter(range(1_000_000))

    def hook(request: Request) -> Fault | None:
        if request.range is None:
            return None
        return fault if after <= next(seen) < after + number else None

    return hook
