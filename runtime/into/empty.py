"""Building a module that is about to be loaded, without paying for random numbers and memory that nobody reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_RANDOM_FILLS = frozenset({
    "normal_", "uniform_", "random_", "bernoulli_", "log_normal_", "exponential_", "geometric_", "cauchy_",
    "kaiming_uniform_",  # of torch.nn.init, and the only one there whose inside a mode does not see
})  # fmt: skip
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


@contextmanager
def empty_weights() -> Iterator[None]:
    """Modules built inside leave the random initialisation of their parameters out, in this thread.

    Everything else is as always: parameters are real and on their usual device, buffers are computed, and so are
    constants, such as a norm's ones. Memory that is not touched is not taken from the system. So

        with teneral.empty_weights():
            model = AutoModel.from_config(config)
        load = teneral.load_into(model, "s3://bucket/model")

    builds a model of any size in the time and memory of its skeleton. What a file then does not fill holds anything.
    """
    with _SkipRandomFills():
        yield


class _SkipRandomFills(TorchFunctionMode):
    """Turns in-place random fills of parameters, and of `.data` of parameters, into nothing."""

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
