"""One load of a model's weights by Teneral; prints its time, CPU time and bytes as JSON.

    python -m benchmarks.own_load WAY ADDRESS

    process      in another process, forked before anything is imported, as `teneral serve` does
    threads      by the threads of this process
    standby      the same, when it has imported all and holds memory for the weights, as a standby does
    load_file    `teneral.load_file`, with torch imported before the clock starts
    …+torch      process or threads, while this process imports torch
    torch        the import of torch alone

Afterwards a byte of every page has been read. This module imports nothing that the way itself does not need first.
"""

import gc
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teneral.loader.memory.arena import Reserve

PAGE_BYTES = 4096
STANDBY_BYTES = 1 << 30


def main() -> None:
    way, _, other = sys.argv[1].partition("+")
    importing = threading.Thread(target=_import_torch) if other or way == "torch" else None
    ways: dict[str, Callable[[str, threading.Thread | None], dict[str, Any]]] = {
        "process": by_process,
        "standby": by_standby,
        "threads": by_threads,
        "load_file": by_load_file,
        "torch": by_import_alone,
    }
    result = ways[way](sys.argv[2], importing)
    if importing is not None:
        importing.join()
        result["import_s"] = _imported_s[0]
    print(json.dumps(result))


def by_process(address: str, other: threading.Thread | None) -> dict[str, Any]:
    from teneral.loader.load.launch import Prepared

    clock = Clock()
    prepared = Prepared(fork=True)
    if other is not None:
        other.start()  # after the fork: one is safe only where there is one thread
    return _by_prepared(address, prepared, clock)


def by_standby(address: str, other: threading.Thread | None) -> dict[str, Any]:
    from teneral.handlers.serve import import_server
    from teneral.handlers.standby.pool import import_everything
    from teneral.loader.memory.arena import Reserve

    import_everything(import_server)
    gc.collect()
    gc.freeze()  # as the pool does: what a collection looks at would be copied, page by page
    reserve = Reserve(STANDBY_BYTES)
    while reserve.taken_bytes < STANDBY_BYTES:
        time.sleep(0.01)
    return by_threads(address, other, reserve=reserve)


def _by_prepared(address: str, prepared: Any, clock: "Clock") -> dict[str, Any]:
    from teneral.loader.load.launch import Task, launch
    from teneral.loader.load.options import LoadOptions
    from teneral.loader.sources.base import SourceOptions

    launched = launch(Task(address, None, SourceOptions(), LoadOptions(), time.monotonic()), prepared)
    from teneral.loader.load.process_load import ProcessLoad

    with ProcessLoad(launched) as load:
        for group in load.manifest.groups:
            load.wait(group.index)
            load.slab(group.index)[::PAGE_BYTES].max()
        clock.stop()
        load.join()
        return clock.result(load.manifest.weight_bytes)


def by_threads(
    address: str, other: threading.Thread | None, *, reserve: "Reserve | None" = None
) -> dict[str, Any]:
    if other is not None:
        other.start()
    from contextlib import closing

    from teneral.loader.artifact import open_artifact
    from teneral.loader.load.load import WeightLoad
    from teneral.loader.load.targets.base import HostTarget
    from teneral.loader.sources.open import open_source

    clock = Clock()
    with closing(open_source(address)) as source:
        manifest = open_artifact(source)
        with WeightLoad(source, manifest, target=HostTarget(manifest, reserve=reserve)) as load:
            load.start()
            for group in manifest.groups:
                load.wait(group.index)
                load.slab(group.index)[::PAGE_BYTES].max()
            clock.stop()
            load.join()
            return clock.result(manifest.weight_bytes)


def by_import_alone(_: str, other: threading.Thread | None) -> dict[str, Any]:
    assert other is not None
    other.start()
    return {}


def by_load_file(address: str, _: threading.Thread | None) -> dict[str, Any]:
    import torch

    import teneral

    load_file = teneral.load_file
    clock = Clock()
    tensors = load_file(address)
    for tensor in tensors.values():
        tensor.reshape(-1).view(torch.uint8)[::PAGE_BYTES].max()
    clock.stop()
    return clock.result(sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors.values()}.values()))


class Clock:
    """Starts when it is made. CPU time counts the helpers that have been waited for when the result is made."""

    def __init__(self) -> None:
        self._cpu_s, self._start_s = _cpu_s(), time.monotonic()
        self._elapsed_s = 0.0

    def stop(self) -> None:
        self._elapsed_s = time.monotonic() - self._start_s

    def result(self, weight_bytes: int) -> dict[str, Any]:
        cpu_s = _cpu_s() - self._cpu_s
        return {"elapsed_s": self._elapsed_s, "cpu_s": cpu_s, "weight_bytes": weight_bytes}


def _cpu_s() -> float:
    own, helpers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + helpers.ru_utime + helpers.ru_stime


_imported_s: list[float] = []


def _import_torch() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    start_s = time.monotonic()
    import torch  # noqa: F401

    _imported_s.append(time.monotonic() - start_s)


if __name__ == "__main__":
    main()
