from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.support.inspection import idle_threads_of
from tests.support.load import patience_s

from teneral.handlers.function import calls as threads_module
from teneral.handlers.function.calls import MAX_IDLE, CallThreads

NAME = "a-test-of-threads"


@pytest.fixture
def threads() -> Any:
    made = CallThreads(NAME)
    yield made
    made.close()


def living() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def run_and_wait(threads: CallThreads) -> threading.Thread:
    ran: list[threading.Thread] = []
    done = threading.Event()

    def call() -> None:
        ran.append(threading.current_thread())
        done.set()

    threads.run(call)
    assert done.wait(patience_s(10))
    return ran[0]


def until(condition: Any) -> None:
    pause = threading.Event()
    while not condition():
        pause.wait(0.002)


def test_a_thread_that_is_done_takes_the_next_call(threads: CallThreads) -> None:
    first = run_and_wait(threads)
    until(lambda: len(idle_threads_of(threads)) == 1)
    assert run_and_wait(threads) is first


def test_calls_that_wait_for_one_another_have_threads_of_their_own(threads: CallThreads) -> None:
    barrier = threading.Barrier(2 * MAX_IDLE + 1)
    for _ in range(2 * MAX_IDLE):
        threads.run(lambda: barrier.wait(patience_s(20)))
    barrier.wait(patience_s(20))
    until(lambda: len(living()) == MAX_IDLE)  # the others end


def test_closing_ends_the_idle_at_once_and_the_busy_when_they_are_done(threads: CallThreads) -> None:
    run_and_wait(threads)
    until(lambda: len(idle_threads_of(threads)) == 1)
    go_on = threading.Event()
    threads.run(lambda: go_on.wait(patience_s(10)))
    threads.run(lambda: None)
    threads.close()
    until(lambda: len(living()) == 1)
    go_on.set()
    until(lambda: not living())


def test_an_idle_thread_ends_after_a_while(threads: CallThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "IDLE_S", 0.01)
    for _ in range(50):  # also while it is just ending
        run_and_wait(threads)
    until(lambda: not living())
    assert run_and_wait(threads).name == NAME


def test_what_a_call_held_is_let_go_when_it_is_done(threads: CallThreads) -> None:
    class Held:
        pass

    gone = threading.Event()
    held = Held()
    import weakref

    weakref.finalize(held, gone.set)
    threads.run(lambda held=held: None)  # type: ignore[misc]
    del held
    assert gone.wait(patience_s(10))
