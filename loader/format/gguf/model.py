"""The model in a GGUF file: its config.json, and the tensors of a model directory with the origin
of each.

Names and shapes only; content is read elsewhere. An architecture, a rotary embedding or a tensor
that is not known here is refused by name, since leaving it out would silently change the model.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...errors import CheckpointError
from ..nibbles import RUN
from ..safetensors import TensorSpec
from .blocks import MXFP4
from .families import Family, family_of
from .fields import GgufFields
from .reader import GgufFile, GgufTensor

MAX_LAYERS = 1_024
MAX_WIDTH = 1 << 20
MAX_HEADS = 4_096
MAX_HEAD_DIM = 1_024
MAX_CONTEXT = 1 << 24
MAX_EXPERTS_OF_ALL_LAYERS = 1 << 15

_HINT = "Pack the original model, as Hugging Face has it."

Table = Callable[[GgufTensor], list[float]]  # the content of a small tensor


_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FREQUENCIES = "rope_freqs.weight"
_ROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
_LAYER = re.compile(r"blk\.([0-9]{1,4})\.([a-z_]+)\.(weight|bias)")
# transformers' name of the dtype that floats are stored in
_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class Form(enum.Enum):
    """The form into which a tensor's rows are converted."""

    FLOATS = "floats"
    INT8 = "int8"
    INT4 = "int4"
    SCALES = "scales"
    E2M1 = "MXFP4"
    E8M0 = "exponents"
    BLOCKS = "blocks"


class Keeps(enum.IntEnum):
    """How much of a file stays as it is: each keeps what those before it keep."""

    FLOATS = 0  # all numbers become floats
    INTEGERS = 1  # blocks of integers stay integers where our own layout holds the same numbers
    BLOCKS = 2  # other blocks of integers stay as they are, which the native core alone reads


class TensorPiece(NamedTuple):
    """A tensor of the model directory, made of one of the file's."""

    spec: TensorSpec
    source: GgufTensor
    form: Form
    head_rows: int = 0  # rows of a head whose pairs are taken apart; 0: rows stay in their order
    shift: float = 0.0  # added to floats, in fp32


@dataclass(frozen=True, slots=True)
class GgufModel:
    """`conversions` describes in words how each type of block is converted."""

    config: dict[str, Any]
    pieces: tuple[TensorPiece, ...]
    vocab_size: int
    conversions: tuple[str, ...]


def describe_model(file: GgufFile, read_table: Table, keeps: Keeps = Keeps.BLOCKS) -> GgufModel:
    """The model in a file. Raises `CheckpointError` for what is not supported."""
    fields = GgufFields(file.where, file.metadata)
    family = family_of(fields)
    if fields.integer("split.count", 0, 1 << 16, 0) > 1:
        raise fields.wrong(
            "this is one of several files of a split model", hint="Join them with gguf-split --merge."
        )
    config = _config(file, fields, family, read_table)
    dtype = _float_dtype(file)
    pieces: list[TensorPiece] = []
    for tensor in file.tensors.values():
        if tensor.name in (_ROPE_FREQUENCIES, *_ROPE_FACTORS):
            continue
        for name, part in _named(fields, family, tensor, config):
            head_rows, shift = _head_rows(fields, name, part, config, family), 0.0
            if family.has_shifted_norms and name.endswith("norm.weight"):
                shift = -1.0
            pieces += _pieces_of(name, part, dtype, head_rows, shift, keeps)
    config["torch_dtype"] = _TORCH_NAMES[dtype]
    bits = {Form.INT8: 8, Form.INT4: 4, Form.E2M1: 4, Form.BLOCKS: 8}  # of blocks more than 4
    kept = {bits[piece.form] for piece in pieces if piece.form in bits}
    if kept:
        config["quantization_config"] = {
            "quant_method": "teneral",
            "bits": min(kept),
            "group_size": 32,
            "symmetric": True,
        }
    rows = file.tensors["token_embd.weight"].shape[0]
    return GgufModel(config, tuple(pieces), rows, tuple(_conversions(pieces)))


def _config(file: GgufFile, fields: GgufFields, family: Family, read_table: Table) -> dict[str, Any]:
    own = f"{fields.text('general.architecture')}."
    embeddings = _matrix(file, fields, "token_embd.weight")
    hidden = fields.integer(own + "embedding_length", 1, MAX_WIDTH)
    heads = fields.integer(own + "attention.head_count", 1, MAX_HEADS)
    kv_heads = fields.integer(own + "attention.head_count_kv", 1, heads, heads)
    if heads % kv_heads:
        raise fields.wrong(f"{heads} heads cannot share {kv_heads} heads of keys and values")
    layers = fields.integer(own + "block_count", 1, MAX_LAYERS)
    head_dim = fields.integer(own + "attention.key_length", 2, MAX_HEAD_DIM, max(2, hidden // heads))
    turned = fields.integer(own + "rope.dimension_count", 2, head_dim, head_dim)
    if turned % 2:
        raise fields.wrong(f"{own}rope.dimension_count is {turned}, but must be even")
    for key in ("attention.value_length", "rope.dimension_count"):
        if key == "rope.dimension_count" and family.may_turn_partly:
            continue
        if fields.integer(own + key, 1, MAX_HEAD_DIM, head_dim) != head_dim:
            raise fields.wrong(
                f"{own}{key} differs from the {head_dim} columns of a head, which is not supported"
            )
    if head_dim % 2:
        raise fields.wrong(f"heads have {head_dim} columns, but must have an even number")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embeddings.shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.integer(own + "feed_forward_length", 1, MAX_WIDTH),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": family.activation,
        "rms_norm_eps": fields.shortest(own + "attention.layer_norm_rms_epsilon", 0.0, 1.0),
        "max_position_embeddings": fields.integer(own + "context_length", 1, MAX_CONTEXT),
        "rope_theta": fields.shortest(own + "rope.freq_base", 2.0, 1e12, 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    has_bias = _has_attention_bias(file, fields, family)
    if family.always_has_biases and not has_bias:
        raise fields.wrong("the projections of the attention have no biases, which this architecture needs")
    if not family.always_has_biases:
        config["attention_bias"] = has_bias
    if turned != head_dim:
        config["partial_rotary_factor"] = turned / head_dim
    config |= family.settings(fields, own, config)
    scaling = _rope_scaling(file, fields, own, config, family, read_table)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _matrix(file: GgufFile, fields: GgufFields, name: str) -> GgufTensor:
    tensor = file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        raise fields.wrong(f"has no matrix {name}", hint="The file is incomplete: convert the model again.")
    return tensor


def _has_attention_bias(file: GgufFile, fields: GgufFields, family: Family) -> bool:
    has = {
        kind: any(name.startswith("blk.") and name.endswith(f".{kind}.bias") for name in file.tensors)
        for kind in family.biases
    }
    if len(set(has.values())) > 1:
        raise fields.wrong(
            "some projections of the attention have a bias and others none, which is not supported"
        )
    return any(has.values())


def _rope_scaling(
    file: GgufFile,
    fields: GgufFields,
    own: str,
    config: dict[str, Any],
    family: Family,
    read_table: Table,
) -> dict[str, Any] | None:
    turned = round(config.get("partial_rotary_factor", 1.0) * config["head_dim"])
    if _ROPE_FREQUENCIES in file.tensors:
        tensor = file.tensors[_ROPE_FREQUENCIES]
        if tensor.type.name != "F32" or tensor.shape != (config["head_dim"] // 2,):
            raise fields.wrong(f"{_ROPE_FREQUENCIES} must be {config['head_dim'] // 2} numbers of F32")
        return _llama3_scaling(fields, read_table(tensor), config)
    if family.model_type == "phi3" and any(name in file.tensors for name in _ROPE_FACTORS):
        return _longrope_scaling(file, fields, own, turned, read_table)
    kind = fields.text(own + "rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = fields.shortest(own + "rope.scaling.factor", 1e-3, 1e6, 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = fields.integer(own + "rope.scaling.original_context_length", 1, MAX_CONTEXT)
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        return yarn | ({"truncate": False} if family.model_type == "gpt_oss" else {})
    raise fields.wrong(
        f"the rotary embedding is stretched by {kind[:40]!r}, which is not supported", hint=_HINT
    )


def _longrope_scaling(
    file: GgufFile, fields: GgufFields, own: str, turned: int, read_table: Table
) -> dict[str, Any]:
    """Both sets of factors, and the multiplier of scores at stretched positions."""
    factors = []
    for name in _ROPE_FACTORS:
        tensor = file.tensors.get(name)
        if tensor is None or tensor.type.name != "F32" or tensor.shape != (turned // 2,):
            raise fields.wrong(f"{name} must be {turned // 2} numbers of F32")
        factors.append(read_table(tensor))
    scaling: dict[str, Any] = {"rope_type": "longrope", "long_factor": factors[0], "short_factor": factors[1]}
    if f"{own}rope.scaling.attn_factor" in fields:
        scaling["attention_factor"] = fields.shortest(f"{own}rope.scaling.attn_factor", 0.0, 1e6)
    return scaling


def _llama3_scaling(fields: GgufFields, divisors: list[float], config: dict[str, Any]) -> dict[str, Any]:
    """The parameters of Llama 3.1's stretching that give these divisors of the frequencies."""
    found = {
        "rope_type": "llama3",
        "factor": float(str(np.float32(max(divisors)))),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(_llama3_divisors(found, config), divisors, rtol=1e-4):
        raise fields.wrong(f"{_ROPE_FREQUENCIES} is not what Llama 3.1 has", hint=_HINT)
    return found


def _llama3_divisors(scaling: dict[str, Any], config: dict[str, Any]) -> list[float]:
    """The divisor of each frequency: 1 of short waves, the factor of long ones, and between them a
    mixture.
    """
    divisors = []
    for index in range(config["head_dim"] // 2):
        wave = 2 * math.pi * config["rope_theta"] ** (2 * index / config["head_dim"])
        share = scaling["original_max_position_embeddings"] / wave - scaling["low_freq_factor"]
        share = min(1.0, max(0.0, share / (scaling["high_freq_factor"] - scaling["low_freq_factor"])))
        divisors.append(1 / ((1 - share) / scaling["factor"] + share))
    return divisors


def _named(
    fields: GgufFields, family: Family, tensor: GgufTensor, config: dict[str, Any]
) -> Iterator[tuple[str, GgufTensor]]:
    """A tensor by its name of transformers; one with all experts of a layer is one for each of
    them.
    """
    if tensor.name in _OUTER:
        yield _OUTER[tensor.name], tensor
        return
    found = _LAYER.fullmatch(tensor.name)
    if found is None or int(found[1]) >= config["num_hidden_layers"] or str(int(found[1])) != found[1]:
        raise _useless(fields, tensor)
    layer, kind, suffix = f"model.layers.{found[1]}.", found[2], found[3]
    if kind in (family.experts or {}) and (suffix == "weight" or family.experts_have_biases):
        assert family.experts is not None
        for number, part in enumerate(_experts_of(fields, tensor, config, 3 if suffix == "weight" else 2)):
            yield f"{layer}{family.experts[kind].format(number)}.{suffix}", part
    elif kind == "attn_sinks" and suffix == "weight" and kind in family.inner:
        yield f"{layer}{family.inner[kind]}", tensor
    elif kind in family.inner and (suffix == "weight" or kind in family.biases):
        yield f"{layer}{family.inner[kind]}.{suffix}", tensor
    else:
        raise _useless(fields, tensor)


def _useless(fields: GgufFields, tensor: GgufTensor) -> CheckpointError:
    return fields.wrong(f"the tensor {tensor.name} is of no known use", hint=_HINT)


def _experts_of(
    fields: GgufFields, tensor: GgufTensor, config: dict[str, Any], dimensions: int
) -> Iterator[GgufTensor]:
    """The matrices or vectors of a tensor (experts, …) with this number of dimensions."""
    num = config.get("num_experts", config.get("num_local_experts"))
    if len(tensor.shape) != dimensions or tensor.shape[0] != num:
        raise fields.wrong(f"{tensor.name} of shape {tensor.shape} does not hold {num} experts")
    if num * config["num_hidden_layers"] > MAX_EXPERTS_OF_ALL_LAYERS:
        raise fields.wrong(f"{num} experts in {config['num_hidden_layers']} layers are too many")
    size_bytes = tensor.size_bytes // num
    for number in range(num):
        begin = tensor.begin + number * size_bytes
        yield tensor._replace(shape=tensor.shape[1:], begin=begin, size_bytes=size_bytes)


def _head_rows(
    fields: GgufFields, name: str, tensor: GgufTensor, config: dict[str, Any], family: Family
) -> int:
    is_turned = name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias"))
    if not (family.is_permuted and is_turned):
        return 0
    head_rows = int(config["head_dim"])
    if tensor.shape[0] % head_rows:
        raise fields.wrong(
            f"{tensor.name} of shape {tensor.shape} does not consist of heads of {head_rows} rows"
        )
    return head_rows


def _float_dtype(file: GgufFile) -> str:
    """Of all matrices and biases that are no integers: theirs, where they have one in common; else
    BF16.
    """
    found = {tensor.type.dtype for tensor in file.tensors.values() if len(tensor.shape) > 1}
    dtype = found.pop() if len(found) == 1 else None
    return dtype or "BF16"


def _pieces_of(
    name: str, tensor: GgufTensor, dtype: str, head_rows: int, shift: float, keeps: Keeps
) -> Iterator[TensorPiece]:
    shape = tensor.shape
    is_matrix = len(shape) == 2 and name.endswith(".weight")
    if keeps >= Keeps.BLOCKS and tensor.type.is_kept and is_matrix:
        block = tensor.type
        stored = (shape[0], shape[1] // block.elements, block.block_bytes)
        yield TensorPiece(TensorSpec(name, "U8", stored), tensor, Form.BLOCKS, head_rows)
        return
    if keeps >= Keeps.INTEGERS and tensor.type.bits is not None and is_matrix:
        is_table = name == _OUTER["token_embd.weight"]  # whose rows are looked up
        if tensor.type.bits == 4 and shape[1] % RUN == 0 and not is_table:
            yield TensorPiece(TensorSpec(name, "U8", (shape[0], shape[1] // 2)), tensor, Form.INT4, head_rows)
        else:
            yield TensorPiece(TensorSpec(name, "I8", shape), tensor, Form.INT8, head_rows)
        scales = TensorSpec(f"{name}_scale", "F16", (shape[0], shape[1] // tensor.type.elements))
        yield TensorPiece(scales, tensor, Form.SCALES, head_rows)
        return
    if (
        keeps >= Keeps.INTEGERS
        and tensor.type.name == MXFP4
        and len(shape) == 2
        and name != _OUTER["token_embd.weight"]
    ):
        yield TensorPiece(TensorSpec(name, "U8", (shape[0], shape[1] // 2)), tensor, Form.E2M1, head_rows)
        exponents = TensorSpec(f"{name}_scale", "U8", (shape[0], shape[1] // tensor.type.elements))
        yield TensorPiece(exponents, tensor, Form.E8M0, head_rows)
        return
    is_norm = name.endswith(("norm.weight", "sinks"))
    own = tensor.type.dtype if is_norm and tensor.type.dtype is not None else dtype
    if head_rows and len(shape) == 1:
        shape = (shape[0], 1)  # a bias: a row a number
    if shift:
        own = "F32"  # which holds the differences
    spec = TensorSpec(name, own, tensor.shape)
    yield TensorPiece(spec, tensor._replace(shape=shape), Form.FLOATS, head_rows, shift)


def _conversions(pieces: list[TensorPiece]) -> Iterator[str]:
    """A line for each type of block: its conversion."""
    counts: dict[tuple[str, str], set[str]] = {}
    for piece in pieces:
        if piece.form in (Form.SCALES, Form.E8M0):
            continue
        kind, stored = piece.source.type, piece.spec.dtype
        if piece.form is Form.BLOCKS:
            what = "as they are, the same numbers"
        elif piece.form is Form.E2M1:
            what = "MXFP4, the same numbers"
        elif piece.form is not Form.FLOATS:
            what = f"{piece.form.value} in groups of {kind.elements}, the same numbers"
        elif piece.shift:
            what = "F32, less the 1 that their weights are stored with"
        elif kind.dtype == stored:
            what = "as they are"
        else:
            what = f"{stored}, rounded to {'8 bits' if stored == 'BF16' else 'the nearest'}"
            if stored == "F32" or (kind.dtype == "F16" and stored == "F32"):
                what = f"{stored}, the same numbers"
        counts.setdefault((kind.name, what), set()).add(piece.source.name)
    for (name, what), names in sorted(counts.items()):
        number = len(names)
        yield f"{name}: {number} tensor{'s' if number > 1 else ''} → {what}"
