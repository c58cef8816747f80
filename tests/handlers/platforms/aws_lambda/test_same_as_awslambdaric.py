"""The same functions under AWS's own runtime for Python and under ours, on one Runtime API: the same bytes come back.

Where they differ on purpose stands in `DELIBERATE`, with both answers, and in docs/lambda.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_runtime_api import FakeRuntimeApi, Outcome
from tests.support.lambda_rig import runtime_process
from tests.support.load import patience_s
from tests.support.tiny_models import save_tiny

HANDLERS = r"""
import asyncio, base64, collections, datetime, decimal, enum, json

class OutOfPaper(Exception):
    pass

class Nested:
    class Inner(ValueError):
        pass

class Color(str, enum.Enum):
    RED = "red"

class Number(enum.IntEnum):
    ONE = 1

Point = collections.namedtuple("Point", "x y")

def deep(n):
    return deep(n - 1) if n else 1 / 0

def chained():
    try:
        {}["missing"]
    except KeyError as error:
        raise OutOfPaper("because of the other") from error

def during():
    try:
        {}["missing"]
    except KeyError:
        raise RuntimeError("while handling")

class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")

def raising(error):
    raise error

VALUES = {
    "null": lambda: None,
    "true": lambda: True,
    "int": lambda: 12345678901234567890,
    "floats": lambda: [0.1, 1e300, 1e-7, -0.0, 1/3, 5e-324, 1.0],
    "text": lambda: "Grüße, 世界 😀 \u2028 \x7f \x00 \" \\ / \n\t",
    "empty": lambda: "",
    "list": lambda: [1, "two", None, [True, {}]],
    "tuple": lambda: (1, (2, 3)),
    "keys": lambda: {1: "a", 2.5: "b", None: "c", True: "d", "ü": "e"},
    "nested": lambda: {"a": {"b": [{"c": {}}]}},
    "ordered": lambda: collections.OrderedDict([("z", 1), ("a", 2)]),
    "enums": lambda: [Color.RED, Number.ONE],
    "bytes": lambda: b"\x00\xff raw",
    "no bytes": lambda: b"",
    "large": lambda: {"data": ["x" * 1000] * 3000},
    "echo": None,
    "raise": lambda: raising(OutOfPaper("the tray is empty")),
    "raise no message": lambda: raising(OutOfPaper()),
    "raise nested": lambda: raising(Nested.Inner("in there")),
    "raise unicode": lambda: raising(ValueError("Grüße 世界 😀\nsecond line")),
    "raise key": lambda: {}["missing"],
    "raise deep": lambda: deep(20),
    "raise chained": lambda: chained(),
    "raise during": lambda: during(),
    "raise os": lambda: open("/nowhere/at/all"),
    "raise group": lambda: raising(ExceptionGroup("several", [ValueError("a"), KeyError("b")])),
    "nan": lambda: float("nan"),
    "decimal": lambda: decimal.Decimal("1.10"),
    "namedtuple": lambda: Point(1, 2),
    "bytes inside": lambda: {"a": b"b"},
    "set": lambda: {1},
    "date": lambda: datetime.date(2026, 1, 1),
    "surrogate": lambda: "\ud800",
    "generator": lambda: (n for n in range(3)),
    "exit": lambda: raising(SystemExit(3)),
    "coroutine": lambda: asyncio.sleep(0),
    "raise unspeakable": lambda: raising(Unspeakable()),
}

def handler(event, context):
    make = VALUES[event["make"]]
    return event if make is None else make()
"""

SAME = [
    "null", "true", "int", "floats", "text", "empty", "list", "tuple", "keys", "nested", "ordered", "enums",
    "bytes", "no bytes", "large", "echo", "raise", "raise no message", "raise nested", "raise unicode", "raise key",
    "raise deep", "raise chained", "raise during", "raise os", "raise group",
]  # fmt: skip

# What they make of it, theirs and ours: the whole body where it is an answer, the type where it is an error.
DELIBERATE: dict[str, tuple[str, str]] = {
    "nan": ("NaN", "Runtime.MarshalError"),  # no JSON: Lambda's callers could not read it
    "decimal": ("1.10", "Runtime.MarshalError"),  # one contract on all platforms: JSON's own types
    "namedtuple": ('{"x": 1, "y": 2}', "[1, 2]"),  # as Python's own json has it
    "bytes inside": ('{"a": "b"}', "Runtime.MarshalError"),  # bytes are not text
    "generator": ("Runtime.MarshalError", "[0, 1, 2]"),  # what is yielded is a list, or a stream
    "coroutine": ("Runtime.MarshalError", "Runtime.MarshalError"),  # with another text
    "set": ("Runtime.MarshalError", "Runtime.MarshalError"),  # the same
    "date": ("Runtime.MarshalError", "Runtime.MarshalError"),  # the same
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("same")
    (folder / "mine.py").write_text(HANDLERS)
    save_tiny("llama", folder / "model")
    return folder


class Pair:
    """Both runtimes, each on an API of its own that speaks the same."""

    def __init__(self, theirs: FakeRuntimeApi, ours: FakeRuntimeApi) -> None:
        self.apis = (theirs, ours)

    def invoke(self, event: Any, **headers: Any) -> tuple[Outcome, Outcome]:
        submitted = [api.submit(event, **headers) for api in self.apis]
        return submitted[0].wait(), submitted[1].wait()


def renumbered(outcome: Outcome, other: Outcome) -> bytes:
    """The outcome's body, with the other's request id: a test may have called one of the two alone."""
    return outcome.body.replace(outcome.request_id.encode(), other.request_id.encode())


# What AWS's image for Python sets: texts are then UTF-8, not escapes.
IMAGE = {"AWS_EXECUTION_ENV": "AWS_Lambda_python3.12"}


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    with (
        FakeRuntimeApi() as theirs,
        FakeRuntimeApi() as ours,
        runtime_process(theirs, "awslambdaric", "mine.handler", folder=folder, is_heard=False, **IMAGE),
        runtime_process(
            ours,
            "teneral",
            "serve",
            "model",
            "--handler",
            "mine.handler",
            folder=folder,
            is_heard=False,
            **IMAGE,
        ),
    ):
        yield Pair(theirs, ours)


@pytest.mark.parametrize("name", SAME)
def test_the_same_bytes_come_back(pair: Pair, name: str) -> None:
    theirs, ours = pair.invoke({"make": name, "text": "Ünïcode 😀", "number": 1.5})
    assert (ours.kind, ours.body) == (theirs.kind, renumbered(theirs, ours))
    if ours.kind == "response":
        assert ours.headers["content-type"] == theirs.headers["content-type"]


@pytest.mark.parametrize("name", DELIBERATE)
def test_where_they_differ_they_differ_as_is_written_down(pair: Pair, name: str) -> None:
    reported = [
        outcome.body.decode() if outcome.kind == "response" else outcome.json["errorType"]
        for outcome in pair.invoke({"make": name})
    ]
    assert tuple(reported) == DELIBERATE[name]


def test_the_cause_that_x_ray_gets_is_the_same(pair: Pair) -> None:
    header = "lambda-runtime-function-xray-error-cause"
    theirs, ours = (json.loads(outcome.headers[header]) for outcome in pair.invoke({"make": "raise deep"}))
    assert ours == theirs


@pytest.mark.parametrize("body", [b"", b"{", b'{"a": 1', b"\xff", b"[1,]"])
def test_an_event_that_is_no_json_is_refused_alike(pair: Pair, body: bytes) -> None:
    theirs, ours = (outcome.json for outcome in pair.invoke(body))
    assert ours["errorType"] == theirs["errorType"] == "Runtime.UnmarshalError"
    assert ours["stackTrace"] == theirs["stackTrace"] == []


@pytest.mark.parametrize("name", ["Lambda_Runtime_Client_Context", "Lambda_Runtime_Cognito_Identity"])
def test_headers_that_are_no_json_are_refused_alike(pair: Pair, name: str) -> None:
    theirs, ours = pair.invoke({"make": "null"}, **{name: "{nonsense"})
    assert ours.body == renumbered(theirs, ours)
    assert ours.json["errorType"] == "Runtime.LambdaContextUnmarshalError"


@pytest.mark.parametrize(
    ("name", "error_type"),
    [
        ("exit", "SystemExit"),
        ("surrogate", "Runtime.MarshalError"),
        ("raise unspeakable", "Unspeakable"),
    ],
)
def test_what_ends_their_process_is_an_error_of_one_invocation_here(
    folder: Path, pair: Pair, name: str, error_type: str
) -> None:
    ours = pair.apis[1]
    assert ours.invoke({"make": name}).json["errorType"] == error_type
    assert ours.invoke({"make": "true"}).json is True
    with (
        FakeRuntimeApi() as theirs,
        runtime_process(theirs, "awslambdaric", "mine.handler", folder=folder, **IMAGE) as process,
    ):
        theirs.submit({"make": name})
        process.communicate(timeout=patience_s(60))
        assert process.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("handler", "error_type"),
    [
        ("nowhere.handler", "Runtime.ImportModuleError"),
        ("mine.nothing", "Runtime.HandlerNotFound"),
        ("broken.handler", "Runtime.UserCodeSyntaxError"),
        ("raising.handler", "OutOfInk"),
    ],
)
def test_a_handler_that_cannot_be_imported_is_reported_alike(
    folder: Path, handler: str, error_type: str
) -> None:
    (folder / "broken.py").write_text("def handler(event, context):\n    return 1 +\n")
    (folder / "raising.py").write_text("class OutOfInk(Exception): pass\nraise OutOfInk('at import')\n")
    reported = []
    for arguments in (["awslambdaric", handler], ["teneral", "serve", "model", "--handler", handler]):
        with FakeRuntimeApi() as api, runtime_process(api, *arguments, folder=folder, **IMAGE) as process:
            headers, body = api.init_errors.get(timeout=patience_s(60))
            process.communicate(timeout=patience_s(60))
            reported.append(
                (headers["lambda-runtime-function-error-type"], body["errorType"], process.returncode)
            )
    assert reported[1] == reported[0] == (error_type, error_type, 1)
