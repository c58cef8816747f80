"""Kernels, the dimensions of a decoder that select them, and the variants that a model uses: values
shared by the compiler and the launchers.

A variant is a kernel with the types of its arguments and its constants, the unit of compilation.
Numbers that vary between steps, or that cost nothing at run time, are not constants, so that few
variants serve many models. This module does not import Triton: a process that finds its kernels
compiled never does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...models.spec import DecoderSpec
from ...tensors import DType

if TYPE_CHECKING:
    import torch

    from ...models.decoder_config import DecoderConfig
    from ..torch.decoder import TorchExecutor

MAX_SPLITS = 64  # of a sequence's keys in one step
# Stages of loading keys and values while earlier ones are used.
DECODE_STAGES = (3, 5)
PIECE = 1024  # elements that a program of `gate` and `race` computes
INTEGER_ROWS = (16, 64)  # of x, that a program of an integer product has at most
PLACED_HEADS = 8  # heads of a row that a program of `place_heads` computes
# Rows times query heads a key head that a program of `chunk_attention` computes.
TILE_ROWS = 64
MAX_HEAD_DIM = 256
MAX_GROUP = 64  # query heads that share a key head
MAX_SIZE = 1 << 15  # elements that a program can normalise
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}  # by `Activation`, as `gate` numbers them
DTYPES = ("bf16", "fp16", "fp32")

_POINTERS_TO_INTEGERS = {
    "starts", "lengths", "contexts", "table_starts", "blocks", "spans", "tiles", "slots", "tokens", "seeds", "indexes",
    "best_places",
}  # fmt: skip
_POINTERS_TO_FP32 = {"split_out", "split_scale", "scores"}
# Their dtype is that of the variant's norms, or of its scales.
_POINTERS_TO_NORMS = {"weight", "query_norm", "key_norm", "scale"}
_FLOATS = {"scale", "eps"}
_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function of `kernels/`, and its arguments in order, with a type each; `dtype` stands for
    the model's.
    """

    module: str
    name: str
    arguments: tuple[tuple[str, str], ...]


def _kernel(module: str, name: str, pointers: str, numbers: str) -> Kernel:
    def type_of(pointer: str) -> str:
        if pointer in _POINTERS_TO_INTEGERS:
            return "*i64"
        if pointer == "best_quotients":
            return "*fp64"
        if pointer in _POINTERS_TO_FP32:
            return "*fp32"
        if pointer in ("levels", "zero"):
            return "*i8" if name == "int8_product" else "*u8"
        return "*norm" if pointer in _POINTERS_TO_NORMS else "*dtype"

    arguments = [(pointer, type_of(pointer)) for pointer in pointers.split()]
    arguments += [(number, "fp32" if number in _FLOATS else "i32") for number in numbers.split()]
    return Kernel(module, name, tuple(arguments))


KERNELS = {
    kernel.name: kernel
    for kernel in (
        _kernel(
            "attention",
            "decode_attention",
            "queries keys values out split_out split_scale starts contexts table_starts blocks spans",
            "scale row_heads num_heads num_kv_heads window num_splits split_keys",
        ),
        _kernel(
            "attention", "merge_splits", "split_out split_scale out starts spans", "num_heads num_splits"
        ),
        _kernel(
            "attention",
            "chunk_attention",
            "queries keys values out starts lengths contexts table_starts blocks tiles",
            "scale row_heads num_heads num_kv_heads window",
        ),
        _kernel("rows", "rms_norm", "x added weight out", "eps"),
        _kernel(
            "rows",
            "place_heads",
            "heads cos sin query_norm key_norm keys values slots",
            "num_heads num_kv_heads eps",
        ),
        _kernel("rows", "gate", "product out", ""),
        _kernel("products", "row_product", "x matrix added out", "num_out"),
        _kernel(
            "integers",
            "int4_product",
            "x levels scale zero out",
            "num_rows num_out",
        ),
        _kernel("integers", "int8_product", "x levels scale out", "num_rows num_out"),
        _kernel("race", "race", "scores tokens seeds indexes best_quotients best_places", "size"),
    )
}


@dataclass(frozen=True, slots=True)
class Variant:
    """The key of one binary. `key` is its name."""

    kernel: str
    dtype: str  # of activations, keys and values
    constants: tuple[tuple[str, int], ...]
    # Of the norms' weights, or of the integers' scales, where relevant.
    norm_dtype: str = ""
    num_warps: int = 4
    num_stages: int = 2

    @property
    def key(self) -> str:
        constants = "-".join(f"{name.lower()}{value}" for name, value in self.constants)
        norm = f"-{self.norm_dtype}" if self.norm_dtype else ""
        return f"{self.kernel}-{self.dtype}{norm}-{constants}-w{self.num_warps}s{self.num_stages}"

    @property
    def signature(self) -> tuple[tuple[str, str], ...]:
        """Names and types of the non-constant arguments, in order, as Triton writes them."""
        own = {"*dtype": f"*{self.dtype}", "*norm": f"*{self.norm_dtype or self.dtype}"}
        return tuple((name, own.get(kind, kind)) for name, kind in KERNELS[self.kernel].arguments)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a model that select its variants."""

    dtype: str
    norm_dtype: str
    hidden_size: int
    attended_size: int  # of all query heads
    inner_size: int  # of the gated products
    head_dim: int
    rotary_dim: int
    group: int  # query heads that share a key head
    has_head_norms: bool
    activation: str
    block_size: int


def why_not(shape: ModelShape) -> str | None:
    """The reason why the kernels do not support a model of this shape; None: they do."""
    if shape.dtype not in DTYPES or shape.norm_dtype not in DTYPES:
        return f"the kernels support {', '.join(DTYPES)}, but this model computes in {shape.dtype}"
    if not (16 <= shape.head_dim <= MAX_HEAD_DIM and shape.head_dim % 8 == 0):
        return f"the kernels support head_dim 16 to {MAX_HEAD_DIM}, but this model has {shape.head_dim}"
    if shape.group > MAX_GROUP:
        return f"{shape.group} query heads share a key head; the kernels support up to {MAX_GROUP}"
    if shape.hidden_size > MAX_SIZE:
        return f"hidden_size is {shape.hidden_size}; the kernels support up to {MAX_SIZE}"
    if shape.activation not in ACTIVATIONS:
        return f"the kernels do not support the activation {shape.activation}"
    return None


def decode_variant(shape: ModelShape, *, is_split: bool, num_stages: int = 3) -> Variant:
    padded = power_of_2(shape.head_dim)
    constants = {
        "HEAD_DIM": shape.head_dim,
        "PADDED_DIM": padded,
        "BLOCK_SIZE": shape.block_size,
        "ROWS": max(16, power_of_2(shape.group)),  # the minimum of a product
        "KEYS": decode_keys(shape),
        "IS_SPLIT": int(is_split),
    }
    return Variant(
        "decode_attention", shape.dtype, tuple(constants.items()), num_warps=4, num_stages=num_stages
    )


def decode_stages(architecture: int) -> int:
    """Pipeline stages, one of `DECODE_STAGES`, by 10 · major + minor of a device.

    From Hopper on keys and values are loaded ahead, which Triton 3.6 does from 5 stages on; earlier
    devices have less memory for it.
    """
    return max(DECODE_STAGES) if architecture >= 90 else min(DECODE_STAGES)


def decode_keys(shape: ModelShape) -> int:
    """The number of keys that a program of `decode_attention` reads at a time."""
    return 64 if power_of_2(shape.head_dim) <= 128 and shape.dtype != "fp32" else 32


def merge_variant(shape: ModelShape) -> Variant:
    padded = power_of_2(shape.head_dim)
    constants = {"HEAD_DIM": shape.head_dim, "PADDED_DIM": padded, "SPLITS": MAX_SPLITS}
    return Variant("merge_splits", shape.dtype, tuple(constants.items()), num_warps=8 if padded > 128 else 4)


def chunk_variant(shape: ModelShape) -> Variant:
    padded = power_of_2(shape.head_dim)
    constants = {
        "HEAD_DIM": shape.head_dim,
        "PADDED_DIM": padded,
        "BLOCK_SIZE": shape.block_size,
        "ROWS": TILE_ROWS,
        "KEYS": 64 if padded <= 128 and shape.dtype != "fp32" else 32,
    }
    num_warps = 8 if padded > 128 else 4
    return Variant("chunk_attention", shape.dtype, tuple(constants.items()), num_warps=num_warps)


def norm_variant(shape: ModelShape, *, adds: bool) -> Variant:
    padded = power_of_2(shape.hidden_size)
    constants = {"SIZE": shape.hidden_size, "PADDED": padded, "ADDS": int(adds)}
    num_warps = 16 if padded > 8192 else 8 if padded > 2048 else 4
    return Variant("rms_norm", shape.dtype, tuple(constants.items()), shape.norm_dtype, num_warps=num_warps)


def place_variant(shape: ModelShape) -> Variant:
    num_rest = shape.head_dim - shape.rotary_dim
    constants = {
        "HEAD_DIM": shape.head_dim,
        "ROTARY": shape.rotary_dim,
        "PADDED_HALF": power_of_2(shape.rotary_dim // 2),
        "PADDED_REST": power_of_2(num_rest) if num_rest else 0,
        "HEADS": PLACED_HEADS,
        "NORMS": int(shape.has_head_norms),
    }
    norm_dtype = shape.norm_dtype if shape.has_head_norms else shape.dtype
    return Variant("place_heads", shape.dtype, tuple(constants.items()), norm_dtype)


def gate_variant(shape: ModelShape) -> Variant:
    constants = {"SIZE": shape.inner_size, "KIND": ACTIVATIONS[shape.activation], "PIECE": PIECE}
    return Variant("gate", shape.dtype, tuple(constants.items()))


def product_rows(num_in: int) -> int:
    """The number of a matrix's rows that a program of `row_product` computes: more where rows are
    short.
    """
    return 2 if num_in <= PIECE else 1


def product_variant(dtype: str, num_in: int, *, adds: bool) -> Variant:
    constants = {"SIZE": num_in, "ROWS": product_rows(num_in), "PIECE": PIECE, "ADDS": int(adds)}
    return Variant("row_product", dtype, tuple(constants.items()))


def integer_variant(
    dtype: str,
    scale_dtype: str,
    *,
    bits: int,
    num_rows: int,
    num_in: int,
    num_out: int,
    group_size: int,
    has_zero: bool = False,
) -> Variant | None:
    """The product of `num_rows` rows with integers; None: the kernels do not take it."""
    rows = next((rows for rows in INTEGER_ROWS if num_rows <= rows), None)
    if rows is None or dtype not in DTYPES or scale_dtype not in DTYPES:
        return None
    tiles = _int4_tiles(rows) if bits == 4 else _int8_tiles(rows, num_out)
    piece = _integer_piece(bits, num_in, group_size, tiles.most_piece)
    if piece is None:
        return None
    constants = {"SIZE": num_in, "GROUP": group_size, "ROWS": rows, "COLUMNS": tiles.columns, "PIECE": piece}
    constants |= {"HAS_ZERO": int(has_zero)} if bits == 4 else {}
    return Variant(
        f"int{bits}_product",
        dtype,
        tuple(constants.items()),
        scale_dtype,
        num_warps=tiles.num_warps,
        num_stages=3,
    )


class _IntegerTiles(NamedTuple):
    """The fastest of 160 on an H200 (2026-11-27), for the matrices of an 8B model."""

    columns: int
    most_piece: int  # bytes
    num_warps: int


def _int4_tiles(rows: int) -> _IntegerTiles:
    return _IntegerTiles(32, 64, 2 if rows == min(INTEGER_ROWS) else 4)


def _int8_tiles(rows: int, num_out: int) -> _IntegerTiles:
    if num_out <= 8192:  # few columns a program, so that more processors take part
        return _IntegerTiles(16, 256, 4)
    return _IntegerTiles(64, 128 if rows == min(INTEGER_ROWS) else 64, 4)


def _integer_piece(bits: int, num_in: int, group_size: int, most: int) -> int | None:
    """The bytes of a row of integers that a program reads at a time, whose numbers have one scale:
    of 4 bits and the shortest piece, each half of them. None: there are no such pieces.
    """
    if bits == 4:
        return None if num_in % 64 or group_size % 32 else most if group_size % (2 * most) == 0 else 32
    sizes = (most >> shift for shift in range(4))
    return next(
        (size for size in sizes if size >= 32 and (group_size == num_in or group_size % size == 0)), None
    )


def race_variant(*, has_tokens: bool) -> Variant:
    return Variant("race", "fp32", (("HAS_TOKENS", int(has_tokens)), ("PIECE", PIECE)))


def variants_of(shape: ModelShape) -> tuple[Variant, ...]:
    """All variants that generation with such a model may launch."""
    products = dict.fromkeys(
        product_variant(shape.dtype, num_in, adds=adds)
        for num_in in (shape.hidden_size, shape.attended_size, shape.inner_size)
        for adds in (False, True)
    )
    return (
        *(
            decode_variant(shape, is_split=is_split, num_stages=num_stages)
            for num_stages in DECODE_STAGES
            for is_split in (False, True)
        ),
        merge_variant(shape),
        chunk_variant(shape),
        norm_variant(shape, adds=False),
        norm_variant(shape, adds=True),
        place_variant(shape),
        gate_variant(shape),
        race_variant(has_tokens=False),
        race_variant(has_tokens=True),
        *products,
    )


def usual_variants(block_size: int = 16) -> tuple[Variant, ...]:
    """The variants of the most served models, compiled unless a model is named."""
    found: dict[Variant, None] = {}
    for dtype in ("bf16", "fp16"):
        for head_dim, group, hidden_size, attended_size, inner_size, has_head_norms in (
            (64, 7, 896, 896, 4864, False),  # Qwen2.5-0.5B
            (128, 6, 1536, 1536, 8960, False),  # Qwen2.5-1.5B
            (128, 7, 3584, 3584, 18944, False),  # Qwen2.5-7B
            (128, 5, 5120, 5120, 13824, False),  # Qwen2.5-14B
            (64, 4, 2048, 2048, 8192, False),  # Llama-3.2-1B
            (128, 3, 3072, 3072, 8192, False),  # Llama-3.2-3B
            (128, 4, 4096, 4096, 14336, False),  # Llama-3.1-8B, Mistral-7B
            (128, 8, 8192, 8192, 28672, False),  # Llama-3.1-70B
            (128, 2, 1024, 2048, 3072, True),  # Qwen3-0.6B
            (128, 2, 2048, 2048, 6144, True),  # Qwen3-1.7B
            (128, 4, 2560, 4096, 9728, True),  # Qwen3-4B
            (128, 4, 4096, 4096, 12288, True),  # Qwen3-8B
            (128, 5, 5120, 5120, 17408, True),  # Qwen3-14B
        ):
            shape = ModelShape(
                dtype=dtype,
                norm_dtype=dtype,
                hidden_size=hidden_size,
                attended_size=attended_size,
                inner_size=inner_size,
                head_dim=head_dim,
                rotary_dim=head_dim,
                group=group,
                has_head_norms=has_head_norms,
                activation="silu",
                block_size=block_size,
            )
            found.update(dict.fromkeys(variants_of(shape)))
    return tuple(found)


def is_aligned(name: str, kind: str) -> bool:
    """True if this argument is aligned to 16 bytes, as all computed tensors are.

    Weights lie at the loader's addresses, and integers next to each other.
    """
    return kind.startswith("*") and kind != "*i64" and name not in (*_POINTERS_TO_NORMS, "zero")


def power_of_2(number: int) -> int:
    """The smallest power of 2 not below `number`."""
    return 1 << max(0, number - 1).bit_length()


@cache
def sources_digest() -> str:
    """The digest of the binaries' installed sources; binaries of another digest are rejected."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in (here / "variants.py", *sorted((here / "kernels").glob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def short_name(dtype: torch.dtype) -> str:
    """Triton's name of the dtype, or torch's name if no kernel supports it."""
    name = str(dtype).removeprefix("torch.")
    return _NAMES.get(name, name)


def shape_of(executor: TorchExecutor, block_size: int) -> ModelShape:
    # That all norms are stored alike is checked elsewhere.
    norm = executor.norm.weight
    return _shape(executor.spec, short_name(executor.dtype), short_name(norm.dtype), block_size)


def shape_of_config(config: DecoderConfig, block_size: int) -> tuple[ModelShape, ...]:
    """The shapes of a model known only by its config: in the config's dtype, with norms in that and
    in fp32.
    """
    dtype = DType.of_label(config.dtype or "bfloat16")
    spec, name = DecoderSpec.of(config, dtype), _NAMES.get(dtype.label, "bf16")
    return tuple(_shape(spec, name, norm, block_size) for norm in dict.fromkeys((name, "fp32")))


def _shape(spec: DecoderSpec, dtype: str, norm_dtype: str, block_size: int) -> ModelShape:
    return ModelShape(
        dtype=dtype,
        norm_dtype=norm_dtype,
        hidden_size=spec.hidden_size,
        attended_size=spec.num_heads * spec.head_dim,
        inner_size=spec.intermediate_size,
        head_dim=spec.head_dim,
        rotary_dim=spec.rotary.dim,
        group=spec.num_heads // spec.num_kv_heads,
        has_head_norms=spec.head_norms,
        activation=spec.activation.value,
        block_size=block_size,
    )
