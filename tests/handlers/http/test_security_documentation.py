"""docs/security.md says what is so: its tests exist, and its bounds have the numbers that it gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from teneral.handlers.app import edge_rules
from teneral.handlers.http import inflight, json_bodies, limits, listening
from teneral.handlers.http.limits import Limits
from teneral.handlers.platforms import HTTP
from teneral.runtime.config import ServeConfig

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
PROOFS = sorted(set(re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", PAGE)))
BOUNDS = re.findall(
    r"^\| [^|]+ \| ([^|]+) \| `(Limits|limits|json_bodies|inflight|listening)\.(\w+)`", PAGE, re.MULTILINE
)
UNITS = {"": 1, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20}

OPEN_PATHS = edge_rules(HTTP).open_paths


@pytest.mark.parametrize(("file", "test"), PROOFS)
def test_what_it_points_at_is_there(file: str, test: str) -> None:
    source = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert re.search(rf"def {test or 'test_'}", source)


@pytest.mark.parametrize(("default", "place", "name"), BOUNDS)
def test_a_bound_has_the_number_that_it_says(default: str, place: str, name: str) -> None:
    owner = {
        "Limits": Limits.from_config(ServeConfig(model="m")),
        "limits": limits,
        "json_bodies": json_bodies,
        "inflight": inflight,
        "listening": listening,
    }[place]
    if default == "none":
        assert hasattr(owner, name)
        return
    number, _, unit = default.partition(" ")
    assert float(number.replace(",", "")) * UNITS[unit] == getattr(owner, name)


def test_every_bound_and_every_open_route_stands_there() -> None:
    assert len(PROOFS) > 40
    assert len(BOUNDS) > 15
    internal = {"keepalive_s"}  # bounds no client
    assert {f"`Limits.{name}`" for name in Limits.__slots__ if name not in internal} <= set(
        re.findall(r"`Limits\.\w+`", PAGE)
    )
    for path in OPEN_PATHS:
        assert f"`{path}`" in PAGE
