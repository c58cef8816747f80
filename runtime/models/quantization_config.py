"""The quantisation settings of a config.json: the tool, and the layout of its integers.

Shapes are those of the tensors, which determine the rest. Unsupported settings are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from msgspec import Struct

from .fields import QUANTIZATION_KEYS, Fields

COMPUTE_DTYPES = ("bfloat16", "float16", "float32")

_HINT = (
    "Pack the original model with `teneral pack --quantize int8` or `int4`, or take its GPTQ or AWQ weights."
)
_MAX_GROUP = 1 << 20
_MAX_CONFIG_GROUPS = 1_024

# Fields that say which matrices are quantised, which the tensors show, and how the checkpoint was made.
_GPTQ_FIELDS = {
    "quant_method", "bits", "w_bit", "group_size", "q_group_size", "sym", "desc_act", "format", "checkpoint_format",
    "is_marlin_format", "pack_dtype", "data_type", "act_bits",
    # Which matrices
    "dynamic", "extra_config", "lm_head", "quant_lm_head", "modules_to_not_convert", "modules_in_block_to_quantize",
    "block_name_to_quantize", "module_name_preceding_first_block", "to_quant_block_names", "inside_layer_modules",
    # How it was made
    "tokenizer", "dataset", "damp_percent", "damp_auto_increment", "static_groups", "act_group_aware", "hyb_act",
    "true_sequential", "model_name_or_path", "model_file_base_name", "model_seqlen", "batch_size", "pad_token_id",
    "max_input_length", "cache_block_outputs", "meta", "mse", "v2", "v2_alpha", "parallel_packing", "quantizer",
    "uri", "version", "versionable", "autoround_version", "provider", "iters", "lr", "minmax_lr", "nsamples", "seqlen",
    "low_gpu_mem_usage", "low_cpu_mem_usage", "enable_quanted_input", "enable_minmax_tuning", "enable_norm_bias_tuning",
    "gradient_accumulate_steps", "not_use_best_mse", "scale_dtype", "amp", "sampler", "train_bs", "use_quant_input",
    # How tools run it
    "backend", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "awq_gemm_checkpoint", "do_fuse",
    "modules_to_fuse", "fuse_max_seq_len",
}  # fmt: skip
_AWQ_FIELDS = {*_GPTQ_FIELDS, "zero_point", "q_backend"}
_FP8_FIELDS = {
    "quant_method", "fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers",
    "scale_fmt", "expert_dtype", "dequantize", "kv_cache_scheme", "is_checkpoint_fp8_serialized",
}  # fmt: skip
_BITNET_FIELDS = {
    "quant_method", "modules_to_not_convert", "linear_class", "quantization_mode", "use_rms_norm", "rms_norm_eps",
}  # fmt: skip
_BITSANDBYTES_FIELDS = {
    "quant_method", "load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage", "llm_int8_threshold",
    "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
}  # fmt: skip
_COMPRESSED_FIELDS = {
    "quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "quantization_status",
    "global_compression_ratio", "sparsity_config", "transform_config", "version", "run_compressed", "dequantize",
}  # fmt: skip
_GROUP_FIELDS = {"targets", "weights", "input_activations", "output_activations", "format"}
_WEIGHTS_FIELDS = {
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "observer",
    "observer_kwargs", "zp_dtype", "scale_dtype",
}  # fmt: skip
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


_TERNARY_FAMILIES = ("bitnet", "llama")  # whose layers' inputs come from norms


class QuantizationConfig(Struct, frozen=True):
    """`group_size` None is one group a row."""

    method: str  # one of _READERS
    bits: int  # of most matrices; with "teneral" some have 8 whatever this says
    group_size: int | None
    symmetric: bool  # no zeros of their own are needed
    stores_zero_minus_one: bool = False  # GPTQ's first format
    reorders_columns: bool = False  # GPTQ's `desc_act`: columns are in groups by their order of activation
    block: tuple[int, int] | None = None  # rows and columns of fp8 that share a scale, where they are blocks
    rounds_inputs: bool = (
        False  # asks for inputs in 8 bits, too; they are used as they are, unless `is_ternary`
    )
    is_online: bool = False  # of BitNet: weights are stored as floats, and made ternary
    divides_by_scale: bool = False  # of BitNet: a scale is what weights are divided by

    @property
    def is_ternary(self) -> bool:
        return self.method == "bitnet"

    @classmethod
    def from_fields(cls, config: Fields) -> QuantizationConfig | None:
        """None of a model that is not quantised. Raises `ModelError` for methods and formats not supported."""
        key = next((key for key in QUANTIZATION_KEYS if key in config), None)
        if key is None:
            return None
        fields = Fields(config.get(key), where=f"{key}.")
        method = fields.text("quant_method")
        if method not in _READERS:
            raise fields.wrong("quant_method", "which is not supported", hint=_HINT)
        if method == "bitnet" and config.get("model_type") not in _TERNARY_FAMILIES:
            raise config.wrong("model_type", "which is not supported with the ternary weights of BitNet")
        return _READERS[method](fields)


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
    _refuse_unknown(fields, _GPTQ_FIELDS)
    form = fields.choice("format", ("gptq", "gptq_v2"), default="gptq")  # of newer tools
    form = fields.choice("checkpoint_format", ("gptq", "gptq_v2"), default=form)
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
    _refuse_unknown(fields, _AWQ_FIELDS)
    fields.choice("format", ("gemm",), default="gemm")
    version = fields.get("version")
    if version is not None and (not isinstance(version, str) or version.lower() != "gemm"):
        raise fields.wrong("version", "and only gemm is supported", hint=_HINT)
    if not fields.boolean("zero_point", default=True):
        raise fields.wrong("zero_point", "and only weights with zero points are supported", hint=_HINT)
    return QuantizationConfig("awq", _bits(fields, 4), _group_size(fields), symmetric=False)


def _refuse_unknown(fields: Fields, known: Collection[str]) -> None:
    """Raises `ModelError` for a field of GPTQ or AWQ that could change the result, such as `rotation`."""
    fields.refuse_others(known, hint=_HINT)
    fields.choice("data_type", ("int",), default="int")
    fields.integer("act_bits", low=16, high=32, default=16)


def _read_mxfp4(fields: Fields) -> QuantizationConfig:
    return QuantizationConfig("mxfp4", 4, 32, symmetric=True)


def _read_fp8(fields: Fields) -> QuantizationConfig:
    fields.refuse_others(_FP8_FIELDS, hint=_HINT)
    fields.choice("fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
    fields.choice("expert_dtype", ("fp8",), default="fp8")
    scheme = fields.choice("activation_scheme", ("dynamic", "static"), default="dynamic")
    return QuantizationConfig(
        "fp8",
        8,
        None,
        symmetric=True,
        block=_block(fields, "weight_block_size"),
        rounds_inputs=bool(scheme),
    )


def _read_compressed(fields: Fields) -> QuantizationConfig:
    fields.refuse_others(_COMPRESSED_FIELDS, hint=_HINT)
    form = fields.choice("format", (*_COMPRESSED_FORMATS, "mixed-precision"))
    for key in ("sparsity_config", "transform_config"):
        if fields.get(key) and fields.get(key) != {"format": "dense"}:
            raise fields.wrong(key, "which is not supported", hint=_HINT)
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not 0 < len(groups) <= _MAX_CONFIG_GROUPS:
        raise fields.wrong("config_groups", f"but must be an object of 1 to {_MAX_CONFIG_GROUPS} groups")
    read = [_read_group(group, form, where=f"config_groups.{name:.80}.") for name, group in groups.items()]
    blocks = {group.block for group in read if group.block is not None}
    if len(blocks) > 1:
        raise fields.wrong("config_groups", "with blocks of several sizes", hint=_HINT)
    return QuantizationConfig(
        "compressed-tensors",
        min(group.bits for group in read),
        None,
        symmetric=any(group.symmetric for group in read),
        reorders_columns=any(group.reorders_columns for group in read),
        block=next(iter(blocks), None),
        rounds_inputs=any(group.rounds_inputs for group in read),
    )


def _read_group(group: object, form: str, *, where: str) -> QuantizationConfig:
    """One scheme of compressed-tensors. `form` is that of the whole checkpoint."""
    where = f"quantization_config.{where}"
    fields = Fields(group, where=where)
    fields.refuse_others(_GROUP_FIELDS, hint=_HINT)
    form = fields.choice("format", _COMPRESSED_FORMATS, default=form)
    weights = Fields(fields.get("weights"), where=f"{where}weights.")
    weights.refuse_others(_WEIGHTS_FIELDS, hint=_HINT)
    is_float = weights.choice("type", ("int", "float"), default="int") == "float"
    bits = weights.integer("num_bits", low=1, high=32, default=8)
    if bits not in ((8,) if is_float or form != "pack-quantized" else (4, 8)):
        raise weights.wrong("num_bits", f"which is not supported with {form}", hint=_HINT)
    if is_float and form in ("pack-quantized", "int-quantized"):
        raise weights.wrong("type", f"which is not supported with {form}", hint=_HINT)
    symmetric = weights.boolean("symmetric", default=True)
    if not symmetric and form != "pack-quantized":
        raise weights.wrong("symmetric", f"which is not supported with {form}", hint=_HINT)
    if weights.boolean("dynamic", default=False):
        raise weights.wrong("dynamic", "which is not supported of weights", hint=_HINT)
    weights.choice("strategy", ("tensor", "channel", "group", "block"), default="tensor")
    order = weights.get("actorder")
    if order not in (None, True, False, "group", "weight", "static", "dynamic"):
        raise weights.wrong("actorder", "which is not supported", hint=_HINT)
    return QuantizationConfig(
        "compressed-tensors",
        bits,
        None,
        symmetric=symmetric,
        reorders_columns=order in (True, "group", "dynamic"),
        block=_block(weights, "block_structure"),
        rounds_inputs="input_activations" in fields,
    )


def _read_bitnet(fields: Fields) -> QuantizationConfig:
    fields.refuse_others(_BITNET_FIELDS, hint=_HINT)
    if not set(fields.texts("modules_to_not_convert") or ()) <= {"lm_head"}:
        raise fields.wrong("modules_to_not_convert", "and only lm_head may stay as it is", hint=_HINT)
    if fields.boolean("use_rms_norm", default=False):
        raise fields.wrong("use_rms_norm", "which is not supported", hint=_HINT)
    kind = fields.choice("linear_class", ("bitlinear", "autobitlinear"), default="bitlinear")
    mode = fields.choice("quantization_mode", ("online", "offline"), default="offline")
    divides = kind == "bitlinear"
    return QuantizationConfig(
        "bitnet",
        2,
        None,
        symmetric=True,
        is_online=not divides and mode == "online",
        divides_by_scale=divides,
    )


def _read_bitsandbytes(fields: Fields) -> QuantizationConfig:
    """The tensors show which matrices are quantised, and which codes they have."""
    fields.refuse_others(_BITSANDBYTES_FIELDS, hint=_HINT)
    is_4_bits = fields.boolean("load_in_4bit", default=False)
    if is_4_bits == fields.boolean("load_in_8bit", default=False):
        raise fields.wrong("load_in_4bit", "but either this or load_in_8bit must be true")
    fields.choice("bnb_4bit_quant_type", ("nf4", "fp4"), default="fp4")
    fields.choice("bnb_4bit_quant_storage", ("uint8",), default="uint8")
    if fields.boolean("llm_int8_has_fp16_weight", default=False):
        raise fields.wrong("llm_int8_has_fp16_weight", "which is not supported", hint=_HINT)
    return QuantizationConfig(
        "bitsandbytes", 4 if is_4_bits else 8, None, symmetric=True, rounds_inputs=not is_4_bits
    )


def _block(fields: Fields, key: str) -> tuple[int, int] | None:
    """Rows and columns of a block; older tools write "128x128"."""
    value = fields.get(key)
    if value is None:
        return None
    sides = value.split("x") if isinstance(value, str) else value
    if not isinstance(sides, list) or len(sides) != 2:
        raise fields.wrong(key, "but must be a number of rows and one of columns")
    try:
        rows, columns = (int(side) for side in sides)
    except (TypeError, ValueError):
        rows = columns = 0
    if not (0 < rows <= _MAX_GROUP and 0 < columns <= _MAX_GROUP):
        raise fields.wrong(key, f"but must be two whole numbers from 1 to {_MAX_GROUP}")
    return rows, columns


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


_READERS: dict[str, Callable[[Fields], QuantizationConfig]] = {
    "teneral": _read_teneral,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "mxfp4": _read_mxfp4,
    "fp8": _read_fp8,
    "bitnet": _read_bitnet,
    "bitsandbytes": _read_bitsandbytes,
    "compressed-tensors": _read_compressed,
}
