"""A handler's address: files and modules, and errors in them."""

from __future__ import annotations

import sys

import pytest

from teneral.handlers.function.handler import HandlerKind, load_handler
from teneral.runtime.errors import HandlerError

# Finding it.


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a Python file and gives its path; `sys.path` and `sys.modules` are as before afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.chdir(tmp_path)

    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_function_is_found_in_a_file(module):
    path = module("def handler(event, context):\n    return event\n")
    handler = load_handler(f"{path}:handler")
    assert handler.function(1, None) == 1
    assert handler.name == f"{path}:handler"


def test_a_function_is_found_in_a_module_of_the_working_directory(module):
    module("class Outer:\n    @staticmethod\n    def handler(event, context):\n        return event\n")
    assert load_handler("mine:Outer.handler").function(1, None) == 1


def test_a_shipped_handler_is_found_by_its_module():
    assert load_handler("teneral.handlers.generate:handler").kind is HandlerKind.SYNC


def test_a_file_may_import_modules_of_its_folder(module):
    module("VALUE = 7\n", name="neighbour.py")
    path = module("import neighbour\ndef handler(event, context):\n    return neighbour.VALUE\n")
    assert load_handler(f"{path}:handler").function(None, None) == 7


def test_a_file_does_not_take_the_name_of_a_module(module):
    path = module("def handler(event, context):\n    return 1\n", name="json.py")
    load_handler(f"{path}:handler")
    import json

    assert json.loads("1") == 1


def test_a_dataclass_in_a_file_works(module):
    path = module(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Point:\n    x: int\n"
        "def handler(event, context):\n    return Point(1).x\n"
    )
    assert load_handler(f"{path}:handler").function(None, None) == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "does not name a function"),
        ("mine:", "does not name a function"),
        (":handler", "does not name a function"),
        ("missing.py:handler", "there is no file"),
        ("./missing:handler", "there is no file"),
        ("no_such_module_here:handler", "there is no module 'no_such_module_here'"),
        ("mine.missing:handler", "there is no module 'mine.missing'|is not a package"),
        ("mine.py:missing", "has no 'missing'"),
        ("mine.py:NUMBER", "is an int, not a function"),
        ("mine.py:one", "cannot be called with"),
        ("mine.py:three", "cannot be called with"),
        ("mine.py:keywords", "cannot be called with"),
    ],
)
def test_an_invalid_handler_is_an_error(module, spec, message):
    module(
        "NUMBER = 1\ndef one(event): pass\ndef three(event, context, more): pass\n"
        "def keywords(*, event, context): pass\n"
    )
    with pytest.raises(HandlerError, match=message):
        load_handler(spec)


def test_the_functions_that_a_file_has_are_named(module):
    path = module("import json\ndef handle(event, context): pass\n")
    with pytest.raises(HandlerError) as caught:
        load_handler(f"{path}:handler")
    assert "It has handle." in caught.value.hint


@pytest.mark.parametrize("statement", ["1 / 0", "import no_such_thing", "raise SystemExit(1)", "def"])
def test_a_failed_import_keeps_the_users_own_error(module, statement):
    path = module(f"{statement}\n")
    sys.modules.pop("teneral_handler_mine", None)  # of another file's tests
    before = set(sys.modules)
    for spec in (f"{path}:handler", "mine:handler"):
        with pytest.raises(HandlerError, match="could not be imported") as caught:
            load_handler(spec)
        assert caught.value.__cause__ is not None
        assert caught.value.__cause__.__traceback__ is not None
    assert set(sys.modules) == before
