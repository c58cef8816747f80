"""The quantisation settings of a config.json: the tool, and the layout of its integers.

Shapes are those of the tensors, which determine the rest. Unsupported settings are refused by name.
"""

from __future__ import annotations

from msgspec import Struct

from ..errors import ModelError
from .fields import Fields

METHODS = ("teneral", "gptq", "awq", "mxfp4")
COMPUTE_DTYPES = ("bfloat16", "float16", "float32")

_HINT = (
    "Pack the original model with `teneral pack --quantize int8` or `int4`, or take its GPTQ or AWQ weights."
)
_MAX_GROUP = 1 << 20


class QuantizationConfig(Struct, frozen=True):
    """`group_size` None is one group a row."""

    method: str  # one of METHODS
    bits: int  # of most matrices; with "teneral" some have 8 whatever this says
    group_size: int | None
    symmetric: bool  # no zeros of their own are needed
    stores_zero_minus_one: bool = False  # GPTQ's first format
    reorders_columns: bool = False  # GPTQ's `desc_act`: columns are in groups by their order of activation

    @classmethod
    def from_fields(cls, config: Fields) -> QuantizationConfig | None:
        """None of a model that is not quantised. Raises `ModelError` for methods and formats not supported."""
        if "compression_config" in config:
            raise ModelError(
                "config.json has a compression_config: checkpoints of compressed-tensors are not supported",
                hint=_HINT,
            )
        if "quantization_config" not in config:
            return None
        fields = Fields(config.get("quantization_config"), where="quantization_config.")
        method = fields.text("quant_method")
        if method not in METHODS:
            raise fields.wrong("quant_method", "which is not supported", hint=_HINT)
        read = {"teneral": _read_teneral, "gptq": _read_gptq, "awq": _read_awq, "mxfp4": _read_mxfp4}[method]
        return read(fields)


def compute_dtype(config: Fields) -> str:
    """One of COMPUTE_DTYPES: what a model computes in whose embeddings do not tell."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    return config.choice(key, COMPUTE_DTYPES, default=COMPUTE_DTYPES[0])


def _read_teneral(fields: Fields) -> QuantizationConfig:
    return QuantizationConfig(
        "teneral",
        _bits(fields, 4, 8),
        _group_size(fields),
        symmetric=fields.boolean("symmetric", default=True),
    )


def _read_gptq(fields: Fields) -> QuantizationConfig:
    form = fields.choice("checkpoint_format", ("gptq", "gptq_v2"), default="gptq")
    if fields.boolean("is_marlin_format", default=False):
        raise fields.wrong("is_marlin_format", "and only the plain format of GPTQ is supported", hint=_HINT)
    fields.choice("pack_dtype", ("int32",), default="int32")
    return QuantizationConfig(
        "gptq",
        _bits(fields, 4, 8),
        _group_size(fields),
        symmetric=fields.boolean("sym", default=True),
        stores_zero_minus_one=form == "gptq",
        reorders_columns=fields.boolean("desc_act", default=False),
    )


def _read_awq(fields: Fields) -> QuantizationConfig:
    version = fields.get("version")
    if version is not None and (not isinstance(version, str) or version.lower() != "gemm"):
        raise fields.wrong("version", "and only gemm is supported", hint=_HINT)
    if not fields.boolean("zero_point", default=True):
        raise fields.wrong("zero_point", "and only weights with zero points are supported", hint=_HINT)
    return QuantizationConfig("awq", _bits(fields, 4), _group_size(fields), symmetric=False)


def _read_mxfp4(fields: Fields) -> QuantizationConfig:
    return QuantizationConfig("mxfp4", 4, 32, symmetric=True)


def _bits(fields: Fields, *allowed: int) -> int:
    key = "bits" if "bits" in fields else "w_bit"
    bits = fields.integer(key, low=1, high=32)
    if bits not in allowed:
        raise fields.wrong(key, f"but must be {' or '.join(map(str, allowed))}", hint=_HINT)
    return bits


def _group_size(fields: Fields) -> int | None:
    key = "group_size" if "group_size" in fields else "q_group_size"
    size = fields.integer(key, low=-1, high=_MAX_GROUP, default=-1)
    if size == 0:
        raise fields.wrong(key, "but must be a number of columns, or -1 for all of them")
    return None if size == -1 else size
