"""Launches kernels in Triton's interpreter: on CPU tensors, in numpy, exactly as they are written.

The interpreter is meant to be turned on for a whole process, before Triton is imported. Here it is turned on for a
launch, so that the same process can compile kernels as well, and importing order does not matter.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from tests.support.reference_kernels import check_argument
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from teneral.runtime.backends.cuda.compile import function_of
from teneral.runtime.backends.cuda.variants import Variant


class Interpreter:
    """A `Launcher`. Counts what it was asked for."""

    def __init__(self) -> None:
        self.launched: Counter[Variant] = Counter()
        self._functions: dict[str, Any] = {}

    def __call__(self, variant: Variant, grid: tuple[int, ...], *arguments: Any) -> None:
        self.launched[variant] += 1
        assert len(arguments) == len(variant.signature)
        for argument, (name, kind) in zip(arguments, variant.signature, strict=True):
            check_argument(variant, name, kind, argument)
        function = self._functions.get(variant.kernel)
        if function is None:
            function = self._functions[variant.kernel] = InterpretedFunction(function_of(variant))
        # Not a warning about what is at hand: exponents of -inf, and lanes that a mask hides.
        with _standard_functions_interpreted(), _gaps_filled(), np.errstate(all="ignore"):
            function[grid](*arguments, **dict(variant.constants))

    def prepare(self, variants: Iterable[Variant]) -> None:
        pass


@contextlib.contextmanager
def _standard_functions_interpreted() -> Iterator[None]:
    """`tl.max` and the like are compiled functions themselves, which only the compiler can call."""
    with _language_restored():
        for name, value in list(vars(tl).items()):
            if isinstance(value, JITFunction) and name in ("max", "min", "sum", "zeros", "cdiv"):
                setattr(tl, name, InterpretedFunction(value.fn))
        yield


@contextlib.contextmanager
def _language_restored() -> Iterator[None]:
    """The language as the compiler knows it, afterwards.

    The interpreter puts back what a launch replaces, and not what a function that the kernel calls does.
    """
    places = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
    before = [dict(vars(place)) for place in places]
    try:
        yield
    finally:
        for place, values in zip(places, before, strict=True):
            for name in [name for name in vars(place) if name not in values]:
                delattr(place, name)
            for name, value in values.items():
                if vars(place)[name] is not value:
                    setattr(place, name, value)


@contextlib.contextmanager
def _gaps_filled() -> Iterator[None]:
    """What the interpreter lacks: its scalars are arrays of one number, which numpy no longer takes for an integer by
    itself; and products of bf16 numbers, which it keeps as their bits.
    """
    builder = interpreter.InterpreterBuilder
    original_patch, original_dot = interpreter._patch_lang_tensor, builder.create_dot

    def patch(tensor: Any, scope: Any) -> None:
        original_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return original_dot(self, _widened(a), _widened(b), *others)

    interpreter._patch_lang_tensor, builder.create_dot = patch, create_dot
    try:
        yield
    finally:
        interpreter._patch_lang_tensor, builder.create_dot = original_patch, original_dot


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)
