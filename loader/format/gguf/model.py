"""The model in a GGUF file: its config.json, and the tensors of a model directory with the origin
of each.

Names and shapes only; content is read elsewhere. An architecture, a rotary embedding or a tensor
that is not known here is refused by name, since leaving it out would silently change the model.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import CheckpointError
from ..nibbles import RUN
from ..safetensors import TensorSpec
from .blocks import MXFP4
from .families import family_of
from .family import EMBEDDINGS, FLAT, LATENT_PARTS, LATENT_UP, SHARED_GATE, Family
from .fields import GgufFields
from .reader import GgufFile, GgufTensor
from .rope import HINT, ROPE_TENSORS, Table, proportional_rope, rope_scaling
from .settings import MAX_CONTEXT, MAX_HEAD_DIM, MAX_LAYERS, MAX_WIDTH

MAX_HEADS = 4_096
MAX_EXPERTS_OF_ALL_LAYERS = 1 << 15

_FINAL_NORMS = ("output_norm", "token_embd_norm")  # LFM2's files have the second
_TABLES = (EMBEDDINGS, "per_layer_token_embd.weight")  # whose rows are looked up
_LAYER = re.compile(r"blk\.([0-9]{1,4})\.(?:([a-z0-9_.]+)\.(weight|bias|scale)|ssm_[ad]|ffn_norm)")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Ends of names whose floats stay as they are: vectors that are not biases of products, convolutions, positions, streams
_POSITIONS = ("position_embd.weight", "embed_positions.weight")
_KEPT_MATRICES = ("conv.weight", "conv1d.weight", *_POSITIONS, "_coef.weight", "_coefs.weight")
_KEPT = (
    *("norm.weight", "sinks", "dt_bias", ".D", "conv1d.bias", "e_score_correction_bias", "expert_bias"),
    *("layernorm_1.weight", "layernorm_2.weight", "scalar", ".scale", ".per_expert_scale", "output_scale"),
    *_KEPT_MATRICES,
)
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
    LOGS = "logarithms"  # fp32, of negated floats
    LATENTS = "latents"  # floats: each head's rows for keys, turned around, then those for values


class Keeps(enum.IntEnum):
    """The share of a file that stays unchanged: each keeps what those before it keep."""

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
    values: GgufTensor | None = None  # of latents (heads, size, rank); `source` has keys, (heads, rank, size)


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
    family = family_of(fields, file.tensors)
    if fields.integer("split.count", 0, 1 << 16, 0) > 1:
        raise fields.wrong(
            "this is one of several files of a split model", hint="Join them with gguf-split --merge."
        )
    config, tensors = _config(file, fields, family, read_table)
    dtype = _float_dtype(tensors)
    pieces: list[TensorPiece] = []
    for tensor in tensors:
        kind = tensor.name.split(".")[2] if family.has_latents and tensor.name.startswith("blk.") else ""
        if kind in LATENT_PARTS:
            pieces += _latent_pieces(fields, family, file, tensor, config, dtype)
            continue
        for name, part in _named(fields, family, tensor, config):
            head_rows, shift = _head_rows(fields, name, part, config, family), 0.0
            is_shifted = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
            if family.has_shifted_norms and is_shifted:
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
    rows = file.tensors[EMBEDDINGS].shape[0]
    return GgufModel(config, tuple(pieces), rows, tuple(_conversions(pieces)))


def _config(
    file: GgufFile, fields: GgufFields, family: Family, read_table: Table
) -> tuple[dict[str, Any], list[GgufTensor]]:
    """config.json, and the tensors that the model has besides it."""
    own = f"{fields.text('general.architecture')}."
    embeddings = _matrix(file, fields, EMBEDDINGS)
    hidden = fields.integer(own + "embedding_length", 1, MAX_WIDTH)
    heads = fields.integer(own + "attention.head_count", 1, MAX_HEADS)
    predicting = fields.integer(f"{own}nextn_predict_layers", 0, MAX_LAYERS, 0)  # which are not used
    layers = fields.integer(own + "block_count", predicting + 1, MAX_LAYERS) - predicting
    kv_heads, inner_size = _layer_sizes(fields, own, family, heads, layers)
    if heads % kv_heads:
        raise fields.wrong(f"{heads} heads cannot share {kv_heads} heads of keys and values")
    head_dim, turned = _head_columns(fields, own, family, max(2, hidden // heads))
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embeddings.shape[0],
        "hidden_size": hidden,
        "intermediate_size": inner_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": family.activation,
        family.norm_eps: fields.shortest(
            f"{own}attention.layer_norm_{'' if family.has_layer_norms else 'rms_'}epsilon", 0.0, 1.0
        ),
        "max_position_embeddings": fields.integer(own + "context_length", 1, MAX_CONTEXT),
        "rope_theta": fields.shortest(own + "rope.freq_base", 2.0, 1e12, 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    tensors = [
        part for tensor in _used(file, layers, predicting) for part in _apart(fields, family, tensor, config)
    ]
    has_bias = _has_attention_bias(tensors, fields, family)
    if family.always_has_biases and not has_bias:
        raise fields.wrong("the projections of the attention have no biases, which this architecture needs")
    if not family.always_has_biases:
        config[family.bias_setting] = has_bias
    if family.may_turn_partly:
        config["partial_rotary_factor"] = turned / head_dim
    for end, setting in family.optional.items():
        config[setting] = any(tensor.name.endswith(f".{end}") for tensor in tensors)
    config |= {
        key: _matrix(file, fields, name).shape[0] for key, name in family.rows.items() if name in file.tensors
    }
    config |= family.settings(fields, own, config)
    if family.shares_keys:
        tensors = _without_shared_keys(tensors, config)
    if family.has_windowed_heads:
        config["rope_parameters"] = proportional_rope(file, fields, own, config, read_table)
        _check_values(fields, tensors, config)
        return config, tensors
    scaling = rope_scaling(file, fields, own, config, family, read_table)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config, tensors


def _layer_sizes(fields: GgufFields, own: str, family: Family, heads: int, layers: int) -> tuple[int, int]:
    """Heads of keys and columns of an MLP: of the first layer, where layers differ."""
    if family.shares_keys:
        kv_heads = fields.integers(f"{own}attention.head_count_kv", 1, heads, num_layers=layers)
        return kv_heads[0], fields.integers(f"{own}feed_forward_length", 1, MAX_WIDTH, num_layers=layers)[0]
    # Of a mixture in all layers the size of an MLP is not used.
    has_no_mlp = bool(family.experts) and f"{own}feed_forward_length" not in fields
    kv_heads_key, inner_key = (
        "attention.head_count_kv",
        ("expert_" if has_no_mlp else "") + "feed_forward_length",
    )
    return (
        fields.integer(own + kv_heads_key, 1, heads, heads, may_lack=True),
        fields.integer(own + inner_key, 1, MAX_WIDTH, may_lack=True),
    )


def _without_shared_keys(tensors: list[GgufTensor], config: dict[str, Any]) -> list[GgufTensor]:
    """The tensors without keys and values of layers that attend to earlier ones', of which some files have them."""
    end = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    in_vain = tuple(
        f"blk.{layer}.{kind}."
        for layer in range(end, config["num_hidden_layers"])
        for kind in ("attn_k", "attn_v", "attn_k_norm")
    )
    return [tensor for tensor in tensors if not tensor.name.startswith(in_vain)]


def _check_values(fields: GgufFields, tensors: list[GgufTensor], config: dict[str, Any]) -> None:
    """Says in the config whether keys without a window are values, which have no tensors then."""
    names = {tensor.name for tensor in tensors}
    own = range(config["num_hidden_layers"] - config["num_kv_shared_layers"])
    lacking = [layer for layer in own if f"blk.{layer}.attn_v.weight" not in names]
    whole = [layer for layer in own if config["layer_types"][layer] == "full_attention"]
    if lacking not in ([], whole):
        raise fields.wrong(f"has no blk.{lacking[0]}.attn_v.weight", hint=HINT)
    if not lacking and config["num_global_key_value_heads"] != config["num_key_value_heads"]:
        raise fields.wrong("other heads of keys without a window, but values of their own, are not supported")
    config["attention_k_eq_v"] = bool(lacking)


def _head_columns(fields: GgufFields, own: str, family: Family, default: int) -> tuple[int, int]:
    """Of a head, and how many of them are turned."""
    end = "_swa" if family.has_windowed_heads else ""
    length_key = "rope.dimension_count" if family.has_latents else f"attention.key_length{end}"
    head_dim = fields.integer(own + length_key, 2, MAX_HEAD_DIM, default)
    turned = fields.integer(f"{own}rope.dimension_count{end}", 2, head_dim, head_dim)
    if head_dim % 2 or turned % 2:
        raise fields.wrong(f"{turned} of a head's {head_dim} columns are turned; both must be even")
    equal = () if family.has_latents else (f"attention.value_length{end}", f"rope.dimension_count{end}")
    for key in equal[:1] if family.may_turn_partly else equal:
        if fields.integer(own + key, 1, MAX_HEAD_DIM, head_dim) != head_dim:
            raise fields.wrong(
                f"{own}{key} differs from the {head_dim} columns of a head, which is not supported"
            )
    return head_dim, turned


def _used(file: GgufFile, layers: int, predicting: int) -> Iterator[GgufTensor]:
    """All tensors but those that became settings, and those of layers that predict further tokens."""
    prefixes = tuple(f"blk.{layer}." for layer in range(layers, layers + predicting))
    for tensor in file.tensors.values():
        if tensor.name not in ROPE_TENSORS and not tensor.name.startswith(prefixes):
            yield tensor


def _apart(
    fields: GgufFields, family: Family, tensor: GgufTensor, config: dict[str, Any]
) -> Iterator[GgufTensor]:
    """A tensor with rows of queries, keys and values as one for each; any other as it is."""
    found = _LAYER.fullmatch(tensor.name)
    parts = family.merged.get(found[2], ()) if found is not None else ()
    if not parts or found is None:
        yield tensor
        return
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    sizes = (config["num_attention_heads"] * config["head_dim"], kv_rows, kv_rows)
    rows, first = tensor.shape[0], 0
    if rows != sum(sizes):
        raise fields.wrong(f"{tensor.name} of shape {tensor.shape} does not have {sum(sizes)} rows")
    for part, size in zip(parts, sizes, strict=True):
        own = tensor.part(first, size, size, *tensor.shape[1:])
        yield own._replace(name=f"blk.{found[1]}.{part}.{found[3]}")
        first += size


def _matrix(file: GgufFile, fields: GgufFields, name: str) -> GgufTensor:
    tensor = file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        raise fields.wrong(f"has no matrix {name}", hint="The file is incomplete: convert the model again.")
    return tensor


def _has_attention_bias(tensors: list[GgufTensor], fields: GgufFields, family: Family) -> bool:
    names = {tensor.name for tensor in tensors}
    has = {
        kind: any(name.startswith("blk.") and name.endswith(f".{kind}.bias") for name in names)
        for kind in family.biases
    }
    if len(set(has.values())) > 1:
        raise fields.wrong(
            "some projections of the attention have a bias and others none, which is not supported"
        )
    return any(has.values())


def _named(
    fields: GgufFields, family: Family, tensor: GgufTensor, config: dict[str, Any]
) -> Iterator[tuple[str, GgufTensor]]:
    """A tensor by its name of transformers; one with all experts of a layer is one for each of
    them.
    """
    if tensor.name in family.outer:
        yield family.outer[tensor.name], tensor
        return
    if tensor.name in family.stacked:
        for number, part in enumerate(_matrices_of(fields, tensor, config["altup_num_inputs"] - 1)):
            yield family.stacked[tensor.name].format(number), part
        return
    outer, _, suffix = tensor.name.partition(".")
    if outer in _FINAL_NORMS and (suffix == "weight" or (suffix == "bias" and family.norms_have_biases)):
        yield f"model.{family.final_norm}.{suffix}", tensor
        return
    found = _LAYER.fullmatch(tensor.name)
    if found is None or int(found[1]) >= config["num_hidden_layers"] or str(int(found[1])) != found[1]:
        raise _useless(fields, tensor)
    layer, kind, suffix = f"model.layers.{found[1]}.", found[2], found[3]
    is_bias = suffix == "bias"
    if kind in (family.experts or {}) and (suffix == "weight" or (is_bias and family.experts_have_biases)):
        assert family.experts is not None
        for number, part in enumerate(_experts_of(fields, tensor, config, 3 if suffix == "weight" else 2)):
            names = [name.format(number, number) for name in family.experts[kind].split()]
            for name, rows in zip(names, _shares_of(fields, part, len(names)), strict=True):
                yield f"{layer}{name}.{suffix}", rows
    elif (end := tensor.name.split(".", 2)[2]) in family.whole:
        yield f"{layer}{family.whole[end]}", _flat(tensor) if end in FLAT else tensor
    elif kind in family.inner and (suffix == "weight" or (is_bias and _may_have_bias(family, kind))):
        # One row, which files have as a vector.
        is_row = kind == SHARED_GATE and len(tensor.shape) == 1
        shape = (1, *tensor.shape) if is_row else tensor.shape
        yield f"{layer}{family.inner[kind]}.{suffix}", tensor._replace(shape=shape)
    else:
        raise _useless(fields, tensor)


def _flat(tensor: GgufTensor) -> GgufTensor:
    """Its numbers as a vector."""
    return tensor._replace(shape=(math.prod(tensor.shape),))


def _latent_pieces(
    fields: GgufFields,
    family: Family,
    file: GgufFile,
    tensor: GgufTensor,
    config: dict[str, Any],
    dtype: str,
) -> Iterator[TensorPiece]:
    """The one matrix for keys and values, made at the tensor for keys."""
    _, layer, kind, suffix = tensor.name.split(".")
    keys, values = (file.tensors.get(f"blk.{layer}.{each}.{suffix}") for each in LATENT_PARTS)
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    plain, size = config["qk_nope_head_dim"], config["v_head_dim"]
    if (
        keys is None
        or values is None
        or suffix != "weight"
        or (keys.shape, values.shape) != ((heads, rank, plain), (heads, size, rank))
    ):
        raise fields.wrong(
            f"{tensor.name} of shape {tensor.shape} is not one of two matrices for keys and values of "
            f"{heads} heads, ({rank}, {plain}) and ({size}, {rank})"
        )
    if kind == LATENT_PARTS[0]:
        name = f"model.layers.{layer}.{family.inner[LATENT_UP]}.weight"
        spec = TensorSpec(name, dtype, (heads * (plain + size), rank))
        yield TensorPiece(spec, keys, Form.LATENTS, values=values)


def _may_have_bias(family: Family, kind: str) -> bool:
    return kind in family.biases or (family.norms_have_biases and kind in ("attn_norm", "ffn_norm"))


def _useless(fields: GgufFields, tensor: GgufTensor) -> CheckpointError:
    return fields.wrong(f"the tensor {tensor.name} is of no known use", hint=HINT)


def _experts_of(
    fields: GgufFields, tensor: GgufTensor, config: dict[str, Any], dimensions: int
) -> Iterator[GgufTensor]:
    """The matrices or vectors of a tensor (experts, …) with this number of dimensions."""
    num = next(config[key] for key in _NUM_EXPERTS if key in config)
    if num * config["num_hidden_layers"] > MAX_EXPERTS_OF_ALL_LAYERS:
        raise fields.wrong(f"{num} experts in {config['num_hidden_layers']} layers are too many")
    return _matrices_of(fields, tensor, num, dimensions, what="experts")


def _matrices_of(
    fields: GgufFields, tensor: GgufTensor, num: int, dimensions: int = 3, what: str = "matrices"
) -> Iterator[GgufTensor]:
    """The `num` equal parts of a tensor with this number of dimensions, the first of which counts them."""
    if len(tensor.shape) != dimensions or tensor.shape[0] != num:
        raise fields.wrong(f"{tensor.name} of shape {tensor.shape} does not hold {num} {what}")
    for number in range(num):
        yield tensor.part(number, 1, *tensor.shape[1:])


def _shares_of(fields: GgufFields, tensor: GgufTensor, num: int) -> Iterator[GgufTensor]:
    """Equal shares of a matrix' rows, in their order."""
    rows, rest = divmod(tensor.shape[0], num)
    if rest:
        raise fields.wrong(f"the rows of {tensor.name} of shape {tensor.shape} are not {num} equal shares")
    for number in range(num):
        yield tensor.part(number * rows, rows, rows, *tensor.shape[1:])


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


def _float_dtype(tensors: list[GgufTensor]) -> str:
    """Of all matrices and biases that are no integers: theirs, where they have one in common; else
    BF16.
    """
    found = {
        tensor.type.dtype
        for tensor in tensors
        if len(tensor.shape) > 1 and not tensor.name.endswith(_KEPT_MATRICES)
    }
    dtype = found.pop() if len(found) == 1 else None
    return dtype or "BF16"


def _pieces_of(
    name: str, tensor: GgufTensor, dtype: str, head_rows: int, shift: float, keeps: Keeps
) -> Iterator[TensorPiece]:
    shape = tensor.shape
    is_matrix = len(shape) == 2 and name.endswith(".weight")
    if keeps >= Keeps.BLOCKS and tensor.type.is_kept and is_matrix:
        block = tensor.type
        blocks = (shape[0], shape[1] // block.elements, block.block_bytes)
        yield TensorPiece(TensorSpec(name, "U8", blocks), tensor, Form.BLOCKS, head_rows)
        return
    if keeps >= Keeps.INTEGERS and tensor.type.bits is not None and is_matrix:
        if tensor.type.bits == 4 and shape[1] % RUN == 0 and tensor.name not in _TABLES:
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
        and tensor.name not in _TABLES
    ):
        yield TensorPiece(TensorSpec(name, "U8", (shape[0], shape[1] // 2)), tensor, Form.E2M1, head_rows)
        exponents = TensorSpec(f"{name}_scale", "U8", (shape[0], shape[1] // tensor.type.elements))
        yield TensorPiece(exponents, tensor, Form.E8M0, head_rows)
        return
    if name.endswith("A_log"):
        yield TensorPiece(TensorSpec(name, "F32", shape), tensor, Form.LOGS)
        return
    own = tensor.type.dtype if name.endswith(_KEPT) and tensor.type.dtype is not None else dtype
    if head_rows and len(shape) == 1:
        shape = (shape[0], 1)  # a bias: a row a number
    if shift:
        own = "F32"  # which holds the differences
    stored = (shape[0], 1, shape[1]) if name.endswith(("conv.conv.weight", "conv1d.weight")) else tensor.shape
    spec = TensorSpec(name, own, stored)
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
        elif piece.form is Form.LATENTS:
            what = f"{stored}, those for keys turned around"
        elif piece.form is Form.LOGS:
            what = "F32, the logarithms of what decays"
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
