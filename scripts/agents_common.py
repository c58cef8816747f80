"""Values, texts and the wire to `conformance_agents.py` of all checks of agent libraries."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

import pydantic

TURNS = 20
VALUE = {"city": "Oslo", "days": 2, "rain": True}
STRUCTURED = f"Rain? %%%{json.dumps(VALUE)}%%%"
TOOL = 'Weather? %%%CALL weather {"city": "Oslo"}||It is sunny in Oslo.%%%'
SUNNY = "It is sunny in Oslo."


class Weather(pydantic.BaseModel):
    """Weather of a city in the next days."""

    city: Literal["Oslo", "Rome"]
    days: Literal[1, 2, 3]
    rain: bool


def called(name: str = "Weather") -> str:
    return f"Rain? %%%CALL {name} {json.dumps(VALUE)}||Done.%%%"


def same(got: Any, expected: Any) -> None:
    if isinstance(got, pydantic.BaseModel):
        got = got.model_dump()
    if got != expected:
        raise AssertionError(f"got {got!r}, not {expected!r}")


# The driver reads the standard output, on which libraries print, too: theirs goes to the other one.
WIRE = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def restart() -> None:
    print("RESTART", file=WIRE, flush=True)
    sys.stdin.readline()


def turns(ask: Callable[[str], str]) -> None:
    """A session whose every answer has the number of turns that the model sees."""
    for number in range(1, TURNS + 1):
        if number == TURNS // 2:
            restart()
        same(ask(f"turn {number}: %%%I know #turns turns.%%%"), f"I know {number} turns.")


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: The city's name.
    """
    same(city, "Oslo")
    return "sunny"
