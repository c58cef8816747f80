"""What the loader brings into a process: bytes must flow before anything heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys

FORBIDDEN = {
    "torch", "aiohttp", "asyncio", "boto3", "botocore", "transformers", "tokenizers", "jinja2", "cupy",
    "http.client", "urllib.request", "ssl", "email", "multiprocessing",
}  # fmt: skip


def modules_after(statement: str) -> set[str]:
    """What is loaded after the statement in a fresh interpreter."""
    program = f"{statement}; import sys, json; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    return set(json.loads(output))


def brought_by(statement: str) -> set[str]:
    """Modules that the statement adds to an interpreter that has numpy, whose own imports are not ours."""
    return modules_after(f"import numpy; {statement}") - modules_after("import numpy")


def test_loading_needs_nothing_heavy() -> None:
    assert brought_by("import teneral.loader.stream.load") & FORBIDDEN == set()


def test_loading_brings_third_party_modules_only_to_decode_and_to_verify() -> None:
    packages = {name.partition(".")[0] for name in brought_by("import teneral.loader.stream.load")}
    third_party = {
        name for name in packages - sys.stdlib_module_names if not name.startswith(("teneral", "__editable"))
    }
    assert third_party <= {"numpy", "blake3", "zstandard"}


def test_the_first_ranges_are_asked_for_before_what_decodes_them_is_imported() -> None:
    statement = "import teneral.loader.stream.child, teneral.loader.stream.load, teneral.loader.sources.s3"
    assert modules_after(statement) & {"numpy", "zstandard", "ctypes"} == set()


def test_sending_for_the_weights_needs_next_to_nothing() -> None:
    modules = modules_after("import teneral.runtime.start, teneral.handlers.http.command")
    own = {name for name in modules if name.startswith("teneral.")}
    assert modules & {"numpy", "subprocess", "logging", "concurrent.futures", "tomllib", "pathlib"} == set()
    assert not any(name.startswith(("teneral.loader.format", "teneral.runtime.instance")) for name in own)


def test_importing_starts_no_thread() -> None:
    program = "import teneral.loader.stream.load, threading; print(threading.active_count())"
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert output.strip() == "1"
