"""The team of threads: made on first use, by each process for itself, and never idle work for others."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.support.load import patience_s
from tests.support.native import each_isa, path_of, product, threads

from teneral.runtime.backends.native.products import Weight

PROGRAM = """
import os, sys
import numpy as np
from teneral.loader.native.library import Library
from teneral.runtime.backends.native.products import Products, Weight

library = Library(sys.argv[1])
assert library.start()
weight, x = Weight(np.ones((640, 512), np.float32)), np.ones((4, 512), np.float32)

def compute():
    out = np.zeros((4, 640), np.float32)
    Products(library).linear(x, weight, out)
    return bool((out == 512).all())

def num_threads():
    return len(os.listdir("/proc/self/task"))
"""


def run(isa: str, rest: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM + rest, path_of(isa)],
        capture_output=True,
        text=True,
        timeout=patience_s(60),
        check=True,
    )
    return done.stdout.strip()


@each_isa
def test_it_is_made_by_the_first_product_that_needs_it(isa: str) -> None:
    rest = """
before = num_threads()
library.functions.tn_set_threads(3)
made = [num_threads() - before]
compute()
made.append(num_threads() - before)
print(made)
"""
    assert run(isa, rest) == "[0, 2]"


@each_isa
def test_a_forked_process_makes_its_own(isa: str) -> None:
    rest = """
library.functions.tn_set_threads(3)
assert compute()
child = os.fork()
if child == 0:
    alone = num_threads() == 1
    os._exit(0 if alone and compute() and num_threads() == 3 else 1)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), compute())
"""
    assert run(isa, rest) == "0 True"


@each_isa
def test_fewer_threads_than_were_made_compute_the_same(isa: str) -> None:
    rest = """
for number in (4, 2, 1, 3, 5, 2):
    library.functions.tn_set_threads(number)
    assert all(compute() for _ in range(50))
print(library.functions.tn_num_threads() <= 2)
"""
    assert run(isa, rest) == "True"


@each_isa
def test_calls_from_several_threads_at_once_are_all_right(isa: str) -> None:
    rng = np.random.default_rng(0)
    values, x = rng.standard_normal((640, 512), np.float32), rng.standard_normal((4, 512), np.float32)
    expected = product(isa, x, Weight(values))
    wrong: list[NDArray[Any]] = []

    def work() -> None:
        for _ in range(30):
            out = product(isa, x, Weight(values))
            if not np.array_equal(out, expected):
                wrong.append(out)

    with threads(isa, 3):
        callers = [threading.Thread(target=work) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not wrong


@each_isa
@pytest.mark.parametrize("number", [0, -3])
def test_there_is_always_one_thread(isa: str, number: int) -> None:
    with threads(isa, number):
        assert product(isa, np.ones((1, 8), np.float32), Weight(np.ones((2, 8), np.float32))).tolist() == [
            [8, 8]
        ]
