"""Threads that go through one piece of work together, each with its share of every stage, and wait for one another in
between.

Waking OpenMP's threads, which sleep while there is nothing for them (docs/decisions/0007), takes longer than many a
product of one row. So they are woken once for many stages: all of them first `assemble`, and `meet` after each stage.
Those who wait spin, for a moment; then they offer their core to whoever wants it, so that a thread that was put off its
core gets it back.

The state of a team is an array that `new_team` makes. It must not be used by two teams at once.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# Places in a team's state, each in a cache line of its own.
ARRIVED, GENERATION, WAITING = 0, 16, 32
BROKEN = 1 << 40  # added to the number of those who arrived, when somebody has given up waiting for the rest
NUM_SPINS = 4_000  # before a core is offered to others: some tens of microseconds
PATIENCE_CYCLES = 2_000_000_000  # for all to assemble: about a second

_COMPILED = {"nogil": True, "error_model": "numpy", "cache": True}


def new_team() -> np.ndarray:
    """The state of a team that nobody has assembled yet."""
    return np.zeros(48, np.int64)


@intrinsic
def _add(typing: Any, array: Any, place: Any, number: Any) -> Any:
    """Atomically: what was there before, and adds the number."""

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _pointer(ctx, builder, sig, args), args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), generate


@intrinsic
def _seen(typing: Any, array: Any, place: Any) -> Any:
    """What is there now, and with it all that was written before it was."""

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(ctx, builder, sig, args), "seq_cst", 8)

    return types.int64(array, types.intp), generate


@intrinsic
def _publish(typing: Any, array: Any, place: Any, number: Any) -> Any:
    """Write, after all that was written before."""

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _pointer(ctx, builder, sig, args), "seq_cst", 8)
        return ctx.get_dummy_value()

    return types.none(array, types.intp, types.int64), generate


@intrinsic
def _replace(typing: Any, array: Any, place: Any, expected: Any, number: Any) -> Any:
    """Atomically: whether what was expected was there, and has been replaced."""

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _pointer(ctx, builder, sig, args)
        return builder.extract_value(builder.cmpxchg(pointer, args[2], args[3], "seq_cst", "seq_cst"), 1)

    return types.boolean(array, types.intp, types.int64, types.int64), generate


@intrinsic
def _yield(typing: Any) -> Any:
    """Let another thread have this core, if one wants it."""

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.IntType(32), []), "sched_yield"
        )
        builder.call(function, [])
        return ctx.get_dummy_value()

    return types.none(), generate


@intrinsic
def _cycles(typing: Any) -> Any:
    """A clock that counts about as fast as the processor."""

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])

    return types.int64(), generate


def _pointer(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.gep(ctx.make_array(sig.args[0])(ctx, builder, args[0]).data, [args[1]])


@numba.njit(**_COMPILED)
def assemble(team: Any, size: int) -> bool:
    """Wait until `size` threads are here, each having called this once since the team's state was reset. False, for all
    of them, when they are not within about a second: then nothing may be done together.
    """
    if _add(team, ARRIVED, 1) >= BROKEN:
        return False
    began = _cycles()
    num_spins = 0
    while True:
        arrived = _seen(team, ARRIVED)
        if arrived >= BROKEN:
            return False
        if arrived == size:
            return True
        num_spins += 1
        if num_spins > NUM_SPINS:
            _yield()
            late = _cycles() - began > PATIENCE_CYCLES
            if late and _replace(team, ARRIVED, arrived, arrived + BROKEN):
                return False


@numba.njit(**_COMPILED)
def meet(team: Any, size: int) -> None:
    """Wait until all of the team are here, and have written what they had to write. Only after `assemble`."""
    generation = _seen(team, GENERATION)
    if _add(team, WAITING, 1) == size - 1:
        _publish(team, WAITING, 0)
        _publish(team, GENERATION, generation + 1)
        return
    num_spins = 0
    while _seen(team, GENERATION) == generation:
        num_spins += 1
        if num_spins > NUM_SPINS:
            _yield()


@numba.njit(**_COMPILED)
def reset(team: Any) -> None:
    """Before the threads are woken."""
    _publish(team, ARRIVED, 0)
    _publish(team, WAITING, 0)


@numba.njit(**_COMPILED)
def share(num_items: int, thread: int, size: int) -> tuple[int, int]:
    """This thread's share [begin, end) of the items."""
    return num_items * thread // size, num_items * (thread + 1) // size
