"""One function over many things in a few threads.

Imports nothing: the standard library's executors bring logging along, for which a cold start would
wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def parallel_map(function: Callable[[T], R], things: Iterable[T], *, num_threads: int) -> list[R]:
    """The results, in the order of the things. Blocks; this thread is one of those that work.

    Raises the error of the first thing that has one, when all calls that were begun have ended; no
    more are begun then.
    """
    given = list(things)
    results: dict[int, R] = {}
    errors: dict[int, Exception] = {}
    lock = threading.Lock()
    numbers = iter(range(len(given)))

    def work() -> None:
        while True:
            with lock:
                number = None if errors else next(numbers, None)
            if number is None:
                return
            try:
                results[number] = function(given[number])
            except Exception as error:  # noqa: BLE001 - raised below
                errors[number] = error

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(num_threads, len(given)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(given))]
