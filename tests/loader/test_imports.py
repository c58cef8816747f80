"""The modules that the loader brings into a process: bytes must flow before anything heavy is
imported.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.load import patience_s

FORBIDDEN = {
    "torch", "aiohttp", "asyncio", "boto3", "botocore", "transformers", "tokenizers", "jinja2", "cupy",
    "http.client", "urllib.request", "ssl", "email", "multiprocessing",
}  # fmt: skip


def modules_after(statement: str) -> set[str]:
    """What is loaded after the statement in a fresh interpreter."""
    program = f"{statement}; import sys; names = sorted(sys.modules); import json; print(json.dumps(names))"
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=patience_s(60)
    ).stdout
    return set(json.loads(output))


def brought_by(statement: str) -> set[str]:
    """Modules that the statement adds to an interpreter that has numpy, whose own imports are not ours."""
    return modules_after(f"import numpy; {statement}") - modules_after("import numpy")


def test_loading_needs_nothing_heavy() -> None:
    assert brought_by("import teneral.loader.load.load") & FORBIDDEN == set()


def test_loading_brings_third_party_modules_only_to_decode_and_to_verify() -> None:
    packages = {name.partition(".")[0] for name in brought_by("import teneral.loader.load.load")}
    third_party = {
        name for name in packages - sys.stdlib_module_names if not name.startswith(("teneral", "__editable"))
    }
    assert third_party <= {"numpy", "blake3", "zstandard"}


def test_the_first_ranges_are_asked_for_before_what_decodes_them_is_imported() -> None:
    statement = "import teneral.loader.load.child, teneral.loader.load.load, teneral.loader.sources.s3.store"
    assert modules_after(statement) & {"numpy", "zstandard", "ctypes"} == set()


UNSEEN_SO_FAR = {
    "dataclasses",
    "inspect",
    "ast",
    "dis",
    "pathlib",
    "json",
    "copy",
    "shutil",
    "logging",
    "subprocess",
}


def test_the_manifest_is_asked_for_before_anything_is_imported_that_only_reading_it_needs() -> None:
    modules = modules_after("import teneral.loader.load.child, teneral.loader.sources.s3.store")
    assert modules & (UNSEEN_SO_FAR | {"numpy", "blake3", "ssl", "mmap"}) == set()
    assert {name for name in modules if name.startswith("teneral.loader.format.")} <= {
        "teneral.loader.format.limits"
    }


def test_the_first_ranges_are_asked_for_without_what_makes_dataclasses() -> None:
    """It reads source code, and takes longer to import than all of the loader's own modules up to the manifest."""
    statement = (
        "import teneral.loader.load.child, teneral.loader.load.load, teneral.loader.sources.s3.store, "
        "teneral.loader.format.manifest_json"
    )
    assert modules_after(statement) & (UNSEEN_SO_FAR - {"json"}) == set()


def test_a_plain_checkpoint_is_looked_through_without_what_makes_dataclasses_and_executors() -> None:
    modules = modules_after("import teneral.loader.format.checkpoint, teneral.loader.sources.http.xml")
    assert modules & (UNSEEN_SO_FAR - {"json"} | {"concurrent.futures"}) == set()


def test_reading_the_flags_imports_nothing_that_only_help_needs() -> None:
    modules = modules_after("from teneral.cli_flags import parse; parse(['serve', 's3://bucket/model'])")
    assert modules & {"shutil", "bz2", "lzma", "zlib", "subprocess", "logging"} == set()


def test_sending_for_the_weights_needs_next_to_nothing() -> None:
    modules = modules_after("import teneral.runtime.instance.helpers, teneral.handlers.serve")
    own = {name for name in modules if name.startswith("teneral.")}
    heavy = {
        "numpy",
        "subprocess",
        "logging",
        "concurrent.futures",
        "tomllib",
        "pathlib",
        "dataclasses",
        "msgspec",
    }
    assert modules & heavy == set()
    assert not any(
        name.startswith(("teneral.loader.format", "teneral.runtime.instance.instance")) for name in own
    )


def test_a_remote_models_manifest_is_requested_before_the_instances_modules_are_imported() -> None:
    modules = modules_after(
        "import teneral.handlers.serve, teneral.runtime.text.launch, teneral.runtime.instance.loading, "
        "teneral.loader.sources.s3.store"
    )
    heavy = {"logging", "json", "concurrent.futures", "numpy", "msgspec", "dataclasses", "blake3", "asyncio"}
    assert modules & heavy == set()
    assert (
        not {"teneral.runtime.instance.instance", "teneral.runtime.files", "teneral.handlers.console.early"}
        & modules
    )


def test_a_local_model_is_read_without_what_only_writing_needs() -> None:
    modules = modules_after(
        "import teneral.loader.artifact, teneral.loader.sources.file.store, teneral.runtime.files, "
        "teneral.runtime.text.tokenizer_child, teneral.runtime.text.settings"
    )
    assert modules & {"secrets", "hmac", "random", "_hashlib", "dataclasses", "msgspec", "logging"} == set()


def test_importing_starts_no_thread() -> None:
    program = "import teneral.loader.load.load, threading; print(threading.active_count())"
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=patience_s(60)
    ).stdout
    assert output.strip() == "1"


ROOT = Path(__file__).parents[2]
MAPPERS = {"mmap", "memmap", "open_memmap", "mmap_mode", "from_file"}  # of Python, numpy and torch


def mapping_in(program: str) -> list[str]:
    """What in a program could map a file: names that are imported, called, or given as arguments."""
    found = []
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.keyword):
            names = [node.arg or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]  # import_module("mmap"), getattr(libc, "mmap")
        else:
            continue
        found += [name for name in names if MAPPERS & set(name.split("."))]
    return found


@pytest.mark.parametrize("folder", ["loader/sources", "loader/cache", "loader/format", "runtime/into"])
def test_files_are_read_and_never_mapped(folder: str) -> None:
    """Of a mapped file on a networked disk each page is a round trip, and one that is cut short ends the process."""
    programs = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")}
    assert len(programs) > 3
    # The name of safetensors' default, which says nothing about ours.
    allowed = ["mmap"] * 2 if folder == "runtime/into" else []
    assert [name for program in programs.values() for name in mapping_in(program)] == allowed


@pytest.mark.parametrize(
    "program",
    [
        "import mmap",
        "import mmap as m",
        "from mmap import mmap",
        "from importlib import import_module; import_module('mmap')",
        "import numpy; numpy.memmap('weights')",
        "from numpy.lib.format import open_memmap",
        "import numpy; numpy.load('weights', mmap_mode='r')",
        "import torch; torch.load('weights', mmap=True)",
        "import torch; torch.UntypedStorage.from_file('weights')",
        "import ctypes; ctypes.CDLL(None).mmap(0)",
    ],
)
def test_ways_to_map_a_file_are_seen(program: str) -> None:
    assert mapping_in(program)
