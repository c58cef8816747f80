"""Has a decoder computed as a server computes what it generates: by compiled kernels, a few rows a step.

A server uses kernels for the numbers of rows for which it has measured that they are faster. Here they compute every
step that they can, so that the same figures come out wherever they are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...loader.errors import UsageError
from ...loader.host import available_cores
from ..errors import ModelError
from ..kernels.prepare import keep_somewhere
from ..kernels.records import MAX_ROWS
from ..kv.kinds import KVKind
from ..models.decoder import Decoder
from .sequences import Steps

KERNELS, TORCH = "kernels", "torch"


@dataclass(frozen=True, slots=True)
class Computing:
    """How an artifact's figures were computed. What they are relative to is always computed by torch, in long steps."""

    as_served: bool
    layers: str  # KERNELS or TORCH, in the steps that `steps` counts; in longer ones always torch
    head: str
    compute_dtype: str
    kv_dtype: str  # a `KVKind`
    max_rows: int | None  # of such a step, where they are counted
    steps: int

    @classmethod
    def of(cls, decoder: Decoder, steps: Steps) -> Computing:
        """Of what was computed so. Raises `ModelError` where kernels were to compute all such steps, and did not."""
        kernels = decoder.kernels
        if kernels is not None and steps.kv is KVKind.MODEL and steps.by_kernels < steps.counted:
            raise ModelError(
                f"torch computed {steps.counted - steps.by_kernels} of {steps.counted} steps: the threads of the "
                "kernels did not come together",
                hint="Run it again when the machine has less other work.",
            )
        row = torch.zeros(1, decoder.config.hidden_size, dtype=decoder.dtype)
        has_head = kernels is not None and kernels.logits(row) is not None
        return cls(
            as_served=kernels is not None,
            layers=KERNELS if steps.by_kernels else TORCH,
            head=KERNELS if has_head else TORCH,
            compute_dtype=str(decoder.dtype).removeprefix("torch."),
            kv_dtype=steps.kv.value,
            max_rows=steps.max_rows,
            steps=steps.counted,
        )

    def describe(self) -> str:
        """In words, for people."""
        kv = f", {self.kv_dtype} keys and values" if self.kv_dtype != KVKind.MODEL.value else ""
        if not self.as_served:
            return f"by torch, in {self.compute_dtype}{kv}"
        what = f"{self.steps:,} steps of up to {self.max_rows} tokens{kv}"
        return f"as served: layers by {self.layers}, head by {self.head}, {what}; the original by torch"


def check_kernels_can_be_made() -> None:
    """Before anything is read: raises `UsageError` without numba. Finds it a folder for what it compiles."""
    keep_somewhere()
    try:
        from ..kernels import decoder  # noqa: F401 numba comes with it, which nobody else here needs
    except ImportError as error:
        raise UsageError(
            f"--as-served needs numba, which compiles the kernels: {error}",
            key="as_served",
            hint="Install it: pip install 'teneral[cpu]'. Without it a server has torch compute everything, and so "
            "does this command without --as-served.",
        ) from error


def install_kernels(decoder: Decoder, url: str) -> Steps:
    """Have kernels compute all steps that they can from now on, and say how to drive the decoder so.

    Its weights are exact by now. What was not compiled on this machine before is compiled in the first steps, which
    takes tens of seconds. Raises `UsageError` with the reason where there are no kernels for this decoder, or for how
    it computes.
    """
    from ..kernels.decoder import DecoderKernels, NotCompiledError

    try:
        kernels = DecoderKernels(decoder, num_threads=available_cores())
    except NotCompiledError as error:
        raise UsageError(
            f"{url} is not served by kernels: {error}",
            key="as_served",
            hint="Leave --as-served out: a server has torch compute this model, too.",
        ) from error
    kernels.use_for(range(1, MAX_ROWS + 1))
    kernels.install()
    return Steps(max_rows=MAX_ROWS)
