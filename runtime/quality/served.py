"""Has a decoder computed as a server computes it: by compiled kernels, a few rows a step, as what it generates, or by a
library over copies of the weights, as prompts may be.

A server uses either for the numbers of rows for which it has measured that they are faster. Here they compute every
step that they can, so that the same figures come out wherever they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...loader.errors import UsageError
from ...loader.host import available_cores
from ...loader.memory import available, check_fits
from ..errors import ModelError
from ..kernels.choice import PRODUCT_SIZES, LinearBackend, table_of
from ..kernels.kinds import ModelProduct, products_of, products_of_layer
from ..kernels.packing import Packing
from ..kernels.prepare import keep_somewhere
from ..kernels.records import MAX_ROWS
from ..kv.kinds import KVKind
from ..models.decoder import Decoder
from ..models.packed import Copy
from .sequences import Steps

KERNELS, TORCH = "kernels", "torch"


@dataclass(frozen=True, slots=True)
class Computing:
    """How an artifact's figures were computed. What they are relative to is always computed by torch, in long steps.

    `layers` is KERNELS or TORCH, in the steps that `steps` counts, and torch in longer ones; or in all steps the
    library that has copies, with a count where it has none of some matrices.
    """

    as_served: bool  # by compiled kernels
    layers: str
    head: str  # likewise
    compute_dtype: str
    kv_dtype: str  # a `KVKind`
    max_rows: int | None  # of such a step, where they are counted
    steps: int

    @classmethod
    def of(cls, decoder: Decoder, steps: Steps, copies: LinearBackend | None = None) -> Computing:
        """Of what was computed so, with this library's copies or with none. Raises `ModelError` where kernels were to
        compute all such steps, and did not.
        """
        kernels = decoder.kernels
        if kernels is not None and steps.kv is KVKind.MODEL and steps.by_kernels < steps.counted:
            raise ModelError(
                f"torch computed {steps.counted - steps.by_kernels} of {steps.counted} steps: the threads of the "
                "kernels did not come together",
                hint="Run it again when the machine has less other work.",
            )
        if copies is not None:
            in_layers = [each for layer in decoder.layers for each in products_of_layer(decoder, layer)]
            in_head = products_of(decoder)[len(in_layers) :]
            layers, head = _by_whom(in_layers, copies), _by_whom(in_head, copies)
            return cls(False, layers, head, _name(decoder.dtype), steps.kv.value, max_rows=None, steps=0)
        row = torch.zeros(1, decoder.config.hidden_size, dtype=decoder.dtype)
        has_head = kernels is not None and kernels.logits(row) is not None
        return cls(
            as_served=kernels is not None,
            layers=KERNELS if steps.by_kernels else TORCH,
            head=KERNELS if has_head else TORCH,
            compute_dtype=_name(decoder.dtype),
            kv_dtype=steps.kv.value,
            max_rows=steps.max_rows,
            steps=steps.counted,
        )

    def describe(self) -> str:
        """In words, for people."""
        kv = f", {self.kv_dtype} keys and values" if self.kv_dtype != KVKind.MODEL.value else ""
        if not self.as_served and self.layers == self.head == TORCH:
            return f"by torch, in {self.compute_dtype}{kv}"
        if not self.as_served:
            return f"over copies: layers by {self.layers}, head by {self.head}{kv}; the original by torch"
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


def install_copies(decoder: Decoder, backend: LinearBackend, url: str, *, reserved_bytes: int) -> None:
    """Have every product that this library has copies for computed over one from now on, whatever the number of rows.

    Its weights are exact by now. `reserved_bytes` of memory are left free. Raises `UsageError` where the library is not
    there or has no such copies, `InsufficientMemoryError` where they do not fit, and `ModelError` where one fails or
    says something else than torch.
    """
    packing = Packing(decoder, limit_bytes=1 << 50, num_threads=available_cores())
    kinds = [kind for kind, backends in packing.candidates.items() if backend in backends]
    if not kinds:
        raise UsageError(
            f"{url} has no weights that {backend} is there for",
            key="copies",
            hint="ONNX Runtime and OpenVINO (pip install 'teneral[onnxruntime]', 'teneral[openvino]') are for "
            "integers; oneDNN comes with torch, and is for bf16.",
        )
    needed_bytes = sum(packing.bytes_of(number, backend) for number in range(len(packing.products)))
    check_fits(
        needed_bytes + reserved_bytes,
        available(),
        what=f"comparing the two over copies by {backend}",
        made_of="the copies, the weights of the other, and room to compute in",
    )
    for kind in kinds:
        packing.accepts(kind, backend, PRODUCT_SIZES)
    for number, product in enumerate(packing.products):
        compute = packing.make(number, backend)
        if compute is not None:
            product.linear.packed = Copy(compute, table_of(PRODUCT_SIZES))
    for (kind, _), why in packing.left_out.items():
        raise ModelError(f"{backend} cannot compute {kind} of {url}: {why}")


def _by_whom(products: Sequence[ModelProduct], backend: LinearBackend) -> str:
    count = sum(product.linear.packed is not None for product in products)
    if count == len(products):
        return backend.value
    return f"{backend} ({count} of {len(products)} matrices)" if count else TORCH


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
