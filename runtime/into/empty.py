"""Construction of a module to be loaded, without the cost of random numbers and memory that are
never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_RANDOM_FILLS = frozenset({
    "normal_", "uniform_", "random_", "bernoulli_", "log_normal_", "exponential_", "geometric_", "cauchy_",
    # The only function of torch.nn.init whose calls a mode does not see.
    "kaiming_uniform_",
})  # fmt: skip
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


@contextmanager
def empty_weights() -> Iterator[None]:
    """Skip the random initialisation of parameters of modules built inside, in this thread.

    Everything else is unchanged: parameters are real and on their usual device, buffers are
    computed, and so are constants, such as a norm's ones. Untouched memory is not taken from the
    system. So

        with teneral.empty_weights():
            model = AutoModel.from_config(config)
        load = teneral.load_into(model, "s3://bucket/model")

    builds a model of any size in the time and memory of its skeleton. Parameters that a file then
    does not fill are undefined.
    """
    with _SkipRandomFills():
        yield


class _SkipRandomFills(TorchFunctionMode):
    """A mode that ignores in-place random fills of parameters, and of `.data` of parameters."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _RANDOM_FILLS:
            target = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes it by name
            if isinstance(target, nn.Parameter) or getattr(target, "_teneral_is_data", False):
                return target
        result = func(*args, **kwargs)
        if func == _GET_DATA and isinstance(args[0], nn.Parameter):
            result._teneral_is_data = True
        return result
