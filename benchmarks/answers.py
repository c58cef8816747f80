"""One answer with the time of each token: from a stream of server-sent events, or from a program's lines.

Each token gets the time at which the line that brought it was there; tokens that came in one line have one time. Pure
but for the clock that it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.processes import RunError

DATA = b"data: "
TOKEN = b"TOKEN"

Clock = Callable[[], float]


@dataclass(frozen=True)
class Answer:
    """`token_times_s` is not empty. The counts are those of the usage's details, 0 where it has none; `num_cached` of
    the prompt's tokens were not computed.
    """

    token_times_s: tuple[float, ...]
    num_drafted: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_cached: int = 0


def of_stream(lines: Iterable[bytes], clock: Clock, on_first_token: Callable[[], None]) -> Answer:
    """The answer of a completion that was asked for with log-probabilities, by which its tokens are counted: text
    may be held back, or that of several tokens be one. Raises `RunError` for one that failed, or brought no token.
    """
    times_s: list[float] = []
    details: dict[str, int] = {}
    for line in lines:
        if not line.startswith(DATA) or line.startswith(DATA + b"[DONE]"):
            continue
        now_s = clock()
        chunk = json.loads(line.removeprefix(DATA))
        if "error" in chunk:
            raise RunError(f"the answer ended with an error: {chunk['error']}")
        num_tokens = sum(map(_num_tokens, chunk["choices"]))
        if num_tokens and not times_s:
            on_first_token()
        times_s += [now_s] * num_tokens
        usage = chunk.get("usage") or {}
        for part in ("completion_tokens_details", "prompt_tokens_details"):
            details |= usage.get(part) or {}
    return _answer(times_s, details)


def of_program(lines: Iterable[bytes], clock: Clock, on_first_token: Callable[[], None]) -> Answer:
    """The same of `peers/first_token.py`."""
    times_s: list[float] = []
    for line in lines:
        if line.startswith(TOKEN):
            times_s.append(clock())
            if len(times_s) == 1:
                on_first_token()
    return _answer(times_s, {})


def _num_tokens(choice: dict[str, Any]) -> int:
    return len((choice.get("logprobs") or {}).get("tokens", ()))


def _answer(times_s: list[float], details: dict[str, int]) -> Answer:
    if not times_s:
        raise RunError("it ended without a token")
    return Answer(
        tuple(times_s),
        num_drafted=details.get("drafted_tokens", 0),
        num_accepted=details.get("accepted_prediction_tokens", 0),
        num_rejected=details.get("rejected_prediction_tokens", 0),
        num_cached=details.get("cached_tokens", 0),
    )
