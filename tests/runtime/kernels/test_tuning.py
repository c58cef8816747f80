"""`tuning.json`: what is written is what is read, by the right machine, and nothing else is believed."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer
from tests.support.aws_environment import use_test_credentials

from teneral.loader.errors import FormatError, UnavailableError
from teneral.loader.sources.base import SourceOptions, Store
from teneral.loader.sources.file import FileStore
from teneral.loader.sources.memory import MemoryStore
from teneral.loader.sources.s3 import S3Store
from teneral.runtime.errors import TuningError
from teneral.runtime.kernels import tuning
from teneral.runtime.kernels.choice import Figures, LinearBackend
from teneral.runtime.kernels.tuning import (
    FILE_NAME,
    MAX_ENTRIES,
    MAX_FILE_BYTES,
    Entry,
    Machine,
    keep_figures,
    parse_tuning,
    read_figures,
    render_tuning,
)

HERE = Machine("a processor", "AVX512 0123", 2, "2.13.0+cpu", "numba 0.62 abcd", "onnxruntime 1.23.0 ef01")
NUM_WRITERS = 6


def machine(number: int) -> Machine:
    return dataclasses.replace(HERE, threads=number)


def figures(time_ns: int = 5) -> Figures:
    times = {LinearBackend.TORCH: time_ns, LinearBackend.ONEDNN: time_ns + 1}
    copies = {LinearBackend.ONNX_RUNTIME: time_ns + 2, LinearBackend.OPENVINO: time_ns + 3}
    return {
        "bfloat16 96x64": {1: times, 128: times},
        "int4/64 96x64": {64: {LinearBackend.TORCH: time_ns, **copies}},
        "layer: x": {1: {LinearBackend.KERNELS: 3}},
    }


@pytest.fixture(params=["memory", "file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
    elif request.param == "file":
        yield FileStore(tmp_path / "artifact")
    else:
        use_test_credentials(monkeypatch)
        server = ThreadedMotoServer(port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
        client.create_bucket(Bucket="models")
        client.close()
        opened = S3Store(
            "s3://models/one", SourceOptions(endpoint_url=f"http://{host}:{port}", max_attempts=1)
        )
        yield opened
        opened.close()
        server.stop()


def test_what_is_kept_is_what_a_machine_like_that_reads(store):
    assert read_figures(store, HERE) == {}
    assert keep_figures(store, Entry(machine(1), figures(1))) == 1
    assert keep_figures(store, Entry(machine(2), figures(2))) == 2
    assert keep_figures(store, Entry(machine(1), figures(3))) == 2  # in the place of the first

    assert read_figures(store, machine(1)) == figures(3)
    assert read_figures(store, machine(2)) == figures(2)
    assert read_figures(store, machine(3)) == {}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Machine)])
def test_every_part_of_a_machine_tells_it_from_others(field):
    other = dataclasses.replace(HERE, **{field: 7 if field == "threads" else "another"})
    store = MemoryStore()
    keep_figures(store, Entry(other, figures()))
    assert read_figures(store, HERE) == {}
    assert read_figures(store, other) == figures()


# As version 1 was written before there were libraries.
OLD = b"""{"format": "teneral-tuning", "version": 1, "entries": [{
 "machine": {"cpu": "a processor", "instructions": "AVX512 0123", "threads": 2, "torch": "2.13.0+cpu",
  "kernels": "numba 0.62 abcd"},
 "times_ns": {"bfloat16 96x64": {"1": {"torch": 6, "onednn": 5}}}}]}"""


def test_a_file_from_before_there_were_libraries_is_that_of_a_machine_without_any():
    store = MemoryStore({FILE_NAME: OLD})
    bare = dataclasses.replace(HERE, libraries="none")
    assert read_figures(store, bare) == {
        "bfloat16 96x64": {1: {LinearBackend.TORCH: 6, LinearBackend.ONEDNN: 5}}
    }
    assert read_figures(store, HERE) == {}

    assert keep_figures(store, Entry(HERE, figures())) == 2
    assert len(read_figures(store, bare)) == 1
    assert read_figures(store, HERE) == figures()


def test_where_no_library_is_the_file_is_one_that_older_versions_read():
    bare = dataclasses.replace(HERE, libraries="none")
    (entry,) = json.loads(render_tuning([Entry(bare, figures())]))["entries"]
    assert entry["machine"].keys() == json.loads(OLD)["entries"][0]["machine"].keys()


def test_libraries_that_are_another_version_measure_anew():
    store = MemoryStore()
    keep_figures(store, Entry(HERE, figures()))
    for other in ("onnxruntime 1.24.0 ef01", "onnxruntime 1.23.0, openvino 2025.1 ef01", "none"):
        assert read_figures(store, dataclasses.replace(HERE, libraries=other)) == {}


def test_the_oldest_entries_go():
    store = MemoryStore()
    for number in range(1, MAX_ENTRIES + 3):
        keep_figures(store, Entry(machine(number), figures()))
    data, _ = store.read(FILE_NAME, max_bytes=MAX_FILE_BYTES)
    assert [entry.machine.threads for entry in parse_tuning(data)] == list(range(3, MAX_ENTRIES + 3))


def test_the_file_never_outgrows_what_is_read():
    kind = {size: dict.fromkeys(LinearBackend, 10**12) for size in tuning.PRODUCT_SIZES}
    large = {f"{number} " + "x" * 200: kind for number in range(tuning.MAX_KINDS)}
    entries = [Entry(machine(number), large) for number in range(1, 9)]
    data = render_tuning(entries)
    assert len(data) <= MAX_FILE_BYTES
    kept = parse_tuning(data)
    assert 0 < len(kept) < 8
    assert kept[-1] == entries[-1]


def test_writers_at_the_same_time_lose_nothing(store):
    failures = []

    def write(number: int) -> None:
        try:
            keep_figures(store, Entry(machine(number), figures(number)))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, NUM_WRITERS + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failures
    for number in range(1, NUM_WRITERS + 1):
        assert read_figures(store, machine(number)) == figures(number)


class Overtaken(MemoryStore):
    """Somebody else always writes between a read and the write that follows."""

    def put(self, name: str, data: bytes, **conditions: Any) -> Any:
        super().put(name, render_tuning([Entry(machine(9), figures(9))]))
        return super().put(name, data, **conditions)


def test_a_writer_who_is_always_too_late_gives_up(monkeypatch):
    monkeypatch.setattr(tuning, "MAX_WRITES", 3)
    store = Overtaken()
    with pytest.raises(UnavailableError, match="without a pause"):
        keep_figures(store, Entry(machine(1), figures()))
    assert read_figures(store, machine(9)) == figures(9)


def document() -> dict[str, Any]:
    return json.loads(render_tuning([Entry(HERE, figures())]))


def changed(change: Callable[[dict[str, Any]], Any]) -> bytes:
    made = document()
    change(made)
    return json.dumps(made).encode()


def times(made: dict[str, Any]) -> dict[str, Any]:
    return made["entries"][0]["times_ns"]


def one_time(value: Any) -> bytes:
    return changed(lambda made: times(made)["bfloat16 96x64"]["1"].update(torch=value))


HOSTILE = {
    "nothing": b"",
    "no JSON": b"{",
    "no object": b"[]",
    "no UTF-8": b"\xff\xfe{}",
    "an object without keys": b"{}",
    "nested deeply": b"[" * 50_000,
    "a key twice": b'{"format": "teneral-tuning", "format": "x"}',
    "another format": changed(lambda made: made.update(format="other")),
    "a newer version": changed(lambda made: made.update(version=2)),
    "an unknown key": changed(lambda made: made.update(run="rm")),
    "entries that are none": changed(lambda made: made.update(entries={})),
    "too many entries": changed(lambda made: made.update(entries=made["entries"] * (MAX_ENTRIES + 1))),
    "two entries of one machine": changed(lambda made: made.update(entries=made["entries"] * 2)),
    "an entry that is a number": changed(lambda made: made.update(entries=[3])),
    "a machine without a processor": changed(lambda made: made["entries"][0]["machine"].pop("cpu")),
    "threads that are a text": changed(lambda made: made["entries"][0]["machine"].update(threads="2")),
    "threads that are true": changed(lambda made: made["entries"][0]["machine"].update(threads=True)),
    "libraries that are a list": changed(lambda made: made["entries"][0]["machine"].update(libraries=["x"])),
    "libraries without a name": changed(lambda made: made["entries"][0]["machine"].update(libraries="")),
    "an unknown key of a machine": changed(lambda made: made["entries"][0]["machine"].update(bios="1")),
    "a machine that is a list": changed(lambda made: made["entries"][0].update(machine=["libraries"])),
    "a processor with control characters": changed(
        lambda made: made["entries"][0]["machine"].update(cpu="\x1b[2J")
    ),
    "times that are a list": changed(lambda made: made["entries"][0].update(times_ns=[])),
    "too many kinds": changed(lambda made: times(made).update({str(number): {} for number in range(65)})),
    "a kind with control characters": changed(lambda made: times(made).update({"\x00": {}})),
    "a kind that is a list": changed(lambda made: times(made).update(x=[])),
    "rows that nobody measures": changed(lambda made: times(made)["bfloat16 96x64"].update({"3": {}})),
    "rows of which nothing is said": changed(lambda made: times(made)["bfloat16 96x64"].update({"2": 5})),
    "an unknown backend": changed(lambda made: times(made)["bfloat16 96x64"]["1"].update(os_system=1)),
    "a time that is NaN": one_time(float("nan")),
    "a time that is infinite": one_time(float("inf")),
    "a time with a fraction": one_time(1.5),
    "no time": one_time(None),
    "a time that is true": one_time(True),
    "a time of nothing": one_time(0),
    "a time below nothing": one_time(-5),
    "an endless time": one_time(10**14),
    "too large": b" " * (MAX_FILE_BYTES + 1),
    "too many items": b'{"entries": [' + b"1," * 100_000 + b"1]}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_none_is_left_alone_and_the_log_says_where_and_why(name, caplog):
    store = MemoryStore({FILE_NAME: HOSTILE[name]}, label="model")
    with caplog.at_level(logging.WARNING):
        assert read_figures(store, HERE) == {}
    (record,) = caplog.records
    assert "memory://model/tuning.json is left alone" in record.getMessage()
    assert len(record.getMessage()) < 400
    assert "\x1b" not in record.getMessage()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_none_is_not_replaced_unasked(name):
    store = MemoryStore({FILE_NAME: HOSTILE[name]})
    with pytest.raises(FormatError):
        keep_figures(store, Entry(HERE, figures()))
    assert store.read(FILE_NAME, max_bytes=1 << 30)[0] == HOSTILE[name]


def test_what_is_refused_is_named_by_its_place():
    with pytest.raises(TuningError, match=r"entries\[0\]\.times_ns\.bfloat16 96x64\.1.*'os_system'"):
        parse_tuning(HOSTILE["an unknown backend"])


def test_a_backend_of_a_newer_version_is_refused_as_such():
    with pytest.raises(TuningError) as caught:
        parse_tuning(HOSTILE["an unknown backend"])
    assert "newer" in str(caught.value.hint)


def test_libraries_are_told_apart_by_version_and_by_our_source(monkeypatch, tmp_path):
    versions = {"onnxruntime": "1.23.0", "openvino": "2025.1"}
    there = set(versions)
    monkeypatch.setattr(tuning.importlib.util, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr(tuning.metadata, "version", lambda name: versions[name])
    both = tuning._libraries_version()
    assert both.startswith("onnxruntime 1.23.0, openvino 2025.1 ")

    versions["openvino"] = "2025.2"
    assert tuning._libraries_version() not in (both, "none")
    there.clear()
    assert tuning._libraries_version() == "none"


def test_a_library_under_another_packages_name_is_told_by_that(monkeypatch):
    def version(name: str) -> str:
        if name == "onnxruntime-gpu":
            return "1.22"
        raise tuning.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(tuning.importlib.util, "find_spec", lambda name: "there")
    monkeypatch.setattr(tuning.metadata, "version", version)
    monkeypatch.setattr(
        tuning.metadata, "packages_distributions", lambda: {"onnxruntime": ["onnxruntime-gpu"]}
    )
    told = tuning._libraries_version()
    assert told.startswith("onnxruntime of onnxruntime-gpu 1.22, openvino of an unknown version ")


def test_this_machine_is_known_by_what_a_measurement_depends_on():
    here = Machine.here(3)
    assert here == Machine.here(3)
    assert here != Machine.here(2)
    assert parse_tuning(render_tuning([Entry(here, figures())]))[0].machine == here
