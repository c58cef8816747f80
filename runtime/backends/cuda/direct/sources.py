"""The kernels' sources, as modules that are compiled and loaded one by one.

A model needs few of them: what all have, a module a format of its matrices and of its experts', and
one for the size of its heads. Each has the dtype of activations compiled in. This module compiles
nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ....errors import ModelError
from ....tensors import DType

FOLDER = Path(__file__).with_name("kernels")
ROWS, CHOOSE, BLOCKS, EXPERTS, LATENT = "rows", "choose", "blocks", "experts", "latent"
HEAD_DIMS = (32, 64, 128, 256)
LATENT_DIM, LATENT_RANK = 576, 512  # at most: of a latent and its key together, and of the latent
FORMATS = {
    **{"float": "Float", "wide": "Wide", "int8": "Int8", "int4": "Int4", "fp8": "Fp8"},
    **{"gptq": "Gptq", "awq": "Awq", "packed": "Packed"},
}
NAMES = (
    ROWS,
    CHOOSE,
    BLOCKS,
    EXPERTS,
    LATENT,
    *(f"{kind}_{name}" for kind in ("product", "experts") for name in FORMATS),
    *(f"attention_{heads}{kind}" for kind in ("", "_int8") for heads in (*HEAD_DIMS, LATENT)),
)
DTYPES = (DType.BF16, DType.F16)
_BEFORE, _BEHIND = {LATENT: ("product",)}, {ROWS: ("adapters",)}  # the sources that a source needs


class KernelModule(NamedTuple):
    """One compilation unit."""

    name: str  # of NAMES
    dtype: DType  # of activations, keys and values

    @property
    def text(self) -> str:
        """The source, after which the compiler's messages name the files."""
        kind, _, variant = self.name.partition("_")
        own = "product" if variant in FORMATS else kind
        text = "".join(
            f'#line 1 "{name}.cuh"\n{(FOLDER / f"{name}.cuh").read_text(encoding="utf-8")}'
            for name in ("device", *_BEFORE.get(own, ()), own, *_BEHIND.get(own, ()))
        )
        if kind == "product":
            text += f"PRODUCTS({variant}, {FORMATS[variant]})\n"
        elif kind == EXPERTS and variant:
            text += f"EXPERT_PRODUCTS({variant}, {FORMATS[variant]})\n"
        elif kind == "attention":
            heads, _, of_codes = variant.partition("_")
            kind = "Latents" if heads == LATENT else f"Heads<{heads}>"
            pool = "Int8Pool" if of_codes else "FloatPool"
            pairs = (16,) if heads == LATENT else (16, 64)
            text += "".join(f"ATTENTION_{num}({variant}, {kind}, {pool})\n" for num in pairs)
        return "#define IN_F16\n" + text if self.dtype is DType.F16 else text


def product_module(format_name: str, *, of_experts: bool = False) -> str:
    return f"{EXPERTS if of_experts else 'product'}_{format_name}"


def attention_module(head_dim: int, *, of_int8: bool = False, of_latents: bool = False) -> str:
    """The module for heads of this size, or for latents, in pools of floats or of int8. Raises `ModelError` for
    larger ones.
    """
    heads = LATENT if of_latents else str(padded_dim(head_dim))
    return f"attention_{heads}{'_int8' if of_int8 else ''}"


def padded_dim(head_dim: int) -> int:
    """The size that kernels have for such heads. Raises `ModelError` for larger ones."""
    for dim in HEAD_DIMS:
        if head_dim <= dim:
            return dim
    raise ModelError(
        f"heads of {head_dim} numbers are too large for the device's kernels, which take up to {HEAD_DIMS[-1]}"
    )
