"""A server's import of aiohttp leaves the client out, and everything else of aiohttp is there when it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
from tests.support.load import patience_s

CLIENT = "{'aiohttp.client', 'aiohttp.connector'} & set(sys.modules)"


def printed(program: str) -> object:
    """What a fresh interpreter prints, from JSON."""
    program = f"import json, sys\nfrom teneral.handlers.http.lean_aiohttp import import_web\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=patience_s(60)
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_installed_version_is_imported_without_its_client() -> None:
    """Where this fails after an update of aiohttp, servers start as before, only later: adapt the module to it."""
    program = f"lean = import_web()\nimport teneral.handlers.app\nprint(json.dumps([lean, sorted({CLIENT})]))"
    assert printed(program) == [True, []]


@pytest.mark.parametrize(
    "statement",
    [
        "import aiohttp; session = aiohttp.ClientSession",
        "from aiohttp import ClientSession as session",
        "import aiohttp; aiohttp.__all__; session = aiohttp.ClientSession",
        "from aiohttp.client import ClientSession as session",
    ],
)
def test_the_client_is_there_for_a_users_code(statement: str) -> None:
    program = f"""
import_web()
{statement}
import aiohttp
print(json.dumps([session is aiohttp.ClientSession, aiohttp.__version__]))
"""
    assert printed(program) == [True, version("aiohttp")]


@pytest.mark.parametrize("first", ["import_web(); import aiohttp; aiohttp.ClientSession", "import aiohttp"])
def test_the_whole_package_has_the_names_that_it_has_otherwise(first: str) -> None:
    import aiohttp

    program = f"{first}\nprint(json.dumps([name for name in dir(aiohttp) if hasattr(aiohttp, name)]))"
    found = printed(program)
    assert isinstance(found, list)
    assert {name for name in aiohttp.__all__ if hasattr(aiohttp, name)} <= set(found)


def test_names_that_aiohttp_lacks_are_attribute_errors() -> None:
    program = """
import_web()
import aiohttp
print(json.dumps([hasattr(aiohttp, "nothing"), hasattr(aiohttp, "__nothing__"), hasattr(aiohttp, "web")]))
"""
    assert printed(program) == [False, False, True]


def test_threads_that_ask_at_once_all_get_the_client() -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
import_web()
import aiohttp
with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda _: aiohttp.ClientSession, range(8)))
print(json.dumps(len(set(found))))
"""
    assert printed(program) == 1


def test_an_aiohttp_that_is_imported_already_stays_as_it_is() -> None:
    program = f"import aiohttp\nprint(json.dumps([import_web(), len({CLIENT}), 'web' in vars(aiohttp)]))"
    assert printed(program) == [False, 2, True]


def test_a_version_in_another_place_is_imported_whole() -> None:
    program = f"""
import re
from teneral.handlers.http import lean_aiohttp
lean_aiohttp._VERSION = re.compile(b"is not there")
print(json.dumps([import_web(), len({CLIENT})]))
"""
    assert printed(program) == [False, 2]
