"""The matrices of a checkpoint that become integers, and a reader that quantizes them as they are
packed.

`X.weight` becomes `X.weight` of integers, `X.weight_scale` and, with zeros of their own,
`X.weight_zero` (docs/quantize.md). Names and shapes decide; only config.json is read for it, in
which the artifact states its quantization.

The reader is asked for the pieces of a matrix in any stretches, by several threads, each stretch
once. Rows are quantized when their integers are read, and their scales and zeros kept until they
are read, which waits for that. Invariant: no job waits for a later one, for the integers lie before
their scales. Memory: the scales of matrices in work, and for each thread `READ_ELEMENTS` of the
source and a few MiB.
"""

from __future__ import annotations

import enum
import json
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import CheckpointError, LoadCancelledError, UsageError
from ...format.checkpoint import Checkpoint
from ...format.layout import Stretch
from ...format.limits import MAX_SMALL_FILE_BYTES
from ...format.manifest import DTYPE_BITS
from ...format.nibbles import RUN
from ...format.safetensors import decode_object
from ...sources.base import Source
from .quantize import (
    CHUNK_ELEMENTS,
    SOURCE_DTYPES,
    InputMoments,
    Quantized,
    first_unusable,
    quantize_int4,
    quantize_int8,
    to_float32,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .quantize import Bits, Bytes, Floats

# Of a matrix' name: the moments of its inputs; None where they are not known. Requested once for each
# matrix, in the order of a forward pass; matrices of neighbouring layers may swap places.
MomentsOf = Callable[[str], InputMoments | None]
# Of the names of all matrices whose moments will be requested.
Calibrate = Callable[[Collection[str]], MomentsOf | None]

CONFIG_NAME = "config.json"
GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP_SIZE = 32  # of 4 bits; with 8 a whole row shares one scale
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
# Few weights, whose errors count most: docs/quantize.md, "The choice of bits".
DEFAULT_INT8 = ("v",)
_KINDS = {"q_a": "q", "q_b": "q", "kv_a": "v", "kv_b": "v"}  # of latents, which values are made of

# What may stand before the names of a decoder's tensors, alone or next to a tower.
DECODER = (
    r"(?:(?:model|backbone)\.(?:(?:text|language)_model\.|decoder\.)?|"
    r"language_model\.model\.|gpt_neox\.|transformer\.)?"
)
_EMBEDDINGS = re.compile(rf"{DECODER}(?:embed_(?:tokens|in)|embeddings|wte)\.weight")
_HEAD = re.compile(r"(?:(?:language_model\.)?lm_head|embed_out|proj_out)\.weight")
_PROJECTION = re.compile(
    rf"{DECODER}(?:layers|h)\.[0-9]+\.(?:"
    r"self_attn\.(?:(?:[qkvo]|qkv|out|q_[ab]|kv_b)_proj|kv_a_proj_with_mqa|dense)|encoder_attn\.(?:[qkv]|out)_proj|fc[12]|"
    r"attention\.(?:query_key_value|dense)|mlp\.dense_(?:h_to_4h|4h_to_h)|attn\.c_(?:attn|proj)|conv\.(?:in|out)_proj|"
    r"mamba\.(?:in|out)_proj|feed_forward\.(?:gate|up|down)_proj|"
    r"(?:shared_mlp|block_sparse_moe\.experts\.[0-9]+)\.(?:input|output)_linear|"
    r"(?:tiled_)?linear_attn\.(?:in_proj_qkvz?|in_proj_z|out_proj)|"
    r"(?:(?:mlp|feed_forward)\.(?:experts\.[0-9]+\.|shared_experts?\.)?|experts\.[0-9]+\.)(?:gate|up|gate_up|down)_proj|"
    r"mixer\.(?:(?:[qkvo]|in|out)_proj|(?:experts\.[0-9]+\.|shared_experts\.)?(?:up|down)_proj)|"
    r"mlp\.(?:fc[12]|c_fc|c_proj)|"
    r"(?:block_sparse_moe|feed_forward)\.(?:experts\.[0-9]+\.)?w[123])\.weight"
)
_OF_MAMBA = re.compile(r"\.mixer\.(?:in|out)_proj\.weight$")  # models of these alone have them, too
# Of layers' own inputs: few weights, but for a table whose rows hold all layers' numbers.
_INPUT_TABLE = re.compile(rf"{DECODER}embed_tokens_per_layer\.weight")
_OF_INPUTS = re.compile(
    rf"{DECODER}(?:per_layer_model_projection|layers\.[0-9]+\.per_layer_(?:input_gate|projection))\.weight"
)
_INPUT_TABLE_GROUP = 128  # columns: of one layer, or half of one
_INPUTS_FIRST = re.compile(rf"{DECODER}h\.[0-9]+\.(?:attn|mlp)\.c_(?:attn|fc|proj)\.weight")  # GPT-2's
_OF_EXPERT = re.compile(r"(.*\.experts\.[0-9]+\.)(?:gate_up|down)_proj\.weight")
_STACKED_EXPERTS = re.compile(r"\.(?:mlp|feed_forward|[0-9]+)\.experts\.(?:gate_up|down)_proj(?:_blocks)?$")
_TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """The options of `pack --quantize`. Raises `UsageError` for invalid ones."""

    bits: int  # 8 or 4
    # Columns that share a scale; None: a row's with 8 bits, 32 with 4.
    group_size: int | None = None
    asymmetric: bool = False  # every group has a zero of its own
    # Of `PROJECTIONS`, those that get 8 bits instead of 4; None: `DEFAULT_INT8`.
    int8: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise UsageError(f"weights cannot have {self.bits} bits", key="quantize", hint="int8 or int4.")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise UsageError(
                f"--group-size {self.group_size} is not supported",
                key="group_size",
                hint=f"Give one of {', '.join(map(str, GROUP_SIZES))}.",
            )
        unknown = set(self.int8 or ()) - set(PROJECTIONS)
        if unknown:
            raise UsageError(
                f"there is no projection {min(unknown)!r}",
                key="int8",
                hint=f"--int8 takes some of {', '.join(PROJECTIONS)}.",
            )
        if self.int8 is not None and self.bits == 8:
            raise UsageError(
                "--int8 is for int4: with int8 all projections have 8 bits",
                key="int8",
                hint="Leave it out, or give --quantize int4.",
            )
        if self.asymmetric and self.bits == 8:
            raise UsageError(
                "--asymmetric is for int4: with int8 it would gain nothing",
                key="asymmetric",
                hint="Leave it out, or give --quantize int4.",
            )


class Piece(enum.Enum):
    """The tensors that replace a matrix, in the order of their memory."""

    WEIGHT = "weight"
    SCALE = "weight_scale"
    ZERO = "weight_zero"


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """One matrix of the checkpoint, `name`, (rows, columns), and how it is quantised. With `is_transposed` the
    checkpoint has (columns, rows).
    """

    name: str
    rows: int
    columns: int
    bits: int
    group_size: int  # divides `columns`
    has_zero: bool
    is_transposed: bool = False

    @property
    def groups(self) -> int:
        """Of one row."""
        return self.columns // self.group_size

    def pieces(self) -> Iterator[tuple[Piece, str, tuple[int, int]]]:
        """Each with its dtype and shape."""
        if self.bits == 8:
            yield Piece.WEIGHT, "I8", (self.rows, self.columns)
        else:
            yield Piece.WEIGHT, "U8", (self.rows, self.columns // 2)
        yield Piece.SCALE, "BF16", (self.rows, self.groups)
        if self.has_zero:
            yield Piece.ZERO, "U8", (self.rows, self.groups)

    def piece_name(self, piece: Piece) -> str:
        return piece_name(self.name, piece)


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """`matrices` by their names in the checkpoint; `config` is what the artifact has as
    config.json.
    """

    matrices: Mapping[str, QuantizedMatrix]
    pieces: Mapping[str, tuple[QuantizedMatrix, Piece]]  # by their names in the artifact
    config: bytes

    @property
    def of_4_bits(self) -> list[str]:
        return [name for name, matrix in self.matrices.items() if matrix.bits == 4]

    def aliases(self, aliases: Mapping[str, str]) -> dict[str, str]:
        """The aliases of the checkpoint and of the pieces: tied matrices share their scales, too."""
        found = dict(aliases)
        for alias, name in aliases.items():
            if name in self.matrices:
                found |= {
                    piece_name(alias, piece): piece_name(name, piece)
                    for piece, _, _ in self.matrices[name].pieces()
                }
        return found


def plan_quantize(source: Source, checkpoint: Checkpoint, options: QuantizeOptions) -> QuantizePlan:
    """Raises `UsageError` for a model whose matrices are not known by their names (all but decoders
    of the families in docs/models.md), or are integers already, and `CheckpointError` for a damaged
    config.json.
    """
    names = [name for name in checkpoint.tensors if _find_options(name, options) is not None]
    known = [name for name in names if _PROJECTION.fullmatch(name) and not _OF_MAMBA.search(name)]
    if not known or not any(map(_EMBEDDINGS.fullmatch, names)):
        raise UsageError(
            f"{checkpoint.url} is not a decoder of a family that --quantize is for",
            key="quantize",
            hint="Pack it without --quantize (docs/models.md has the families). GPTQ and AWQ checkpoints are packed "
            "as they are.",
        )
    stacked = next(filter(_STACKED_EXPERTS.search, checkpoint.tensors), None)
    if stacked is not None:
        raise UsageError(
            f"{checkpoint.url} has all experts of a layer in one tensor, {stacked}, "
            "which --quantize does not take apart",
            key="quantize",
            hint="Pack it without --quantize: gpt-oss is published in MXFP4, and served in it.",
        )
    matrices = {name: _plan_matrix(checkpoint, name, options) for name in names}
    pieces = {
        matrix.piece_name(piece): (matrix, piece)
        for matrix in matrices.values()
        for piece, _, _ in matrix.pieces()
    }
    for name in pieces.keys() & checkpoint.tensors.keys() - matrices.keys():
        raise UsageError(f"{checkpoint.url} has a tensor {name} already: it is quantised", key="quantize")
    embeddings = next(filter(_EMBEDDINGS.fullmatch, names))
    dtype = checkpoint.tensors[embeddings].entry.dtype
    return QuantizePlan(matrices, pieces, _quantized_config(source, checkpoint, options, dtype))


def piece_name(name: str, piece: Piece) -> str:
    """Of a matrix `X.weight`: `X.weight`, `X.weight_scale` or `X.weight_zero`."""
    return name.removesuffix("weight") + piece.value


def is_scale(name: str, checkpoint: Checkpoint) -> bool:
    """True if these are the scales of integers: they must be exact as soon as they are there, as
    those are.
    """
    if name.endswith(".scales"):  # GPTQ and AWQ
        return f"{name.removesuffix('.scales')}.qweight" in checkpoint.tensors
    weight = checkpoint.tensors.get(name.removesuffix("_scale")) if name.endswith(".weight_scale") else None
    return weight is not None and weight.entry.dtype in ("I8", "U8")


def _find_options(name: str, options: QuantizeOptions) -> QuantizeOptions | None:
    """How a tensor is to be quantised, by its name; None for what stays as it is.

    Rows of embeddings are read one by one, and as the head they decide the answer: they have 8 bits
    either way, and so has what layers' own inputs are made of and go through.
    """
    if _PROJECTION.fullmatch(name):
        kind = name.removesuffix(".weight").rpartition(".")[2].partition("_proj")[0]
        kind = _KINDS.get(kind, kind)
        has_4_bits = kind not in (DEFAULT_INT8 if options.int8 is None else options.int8)
        return options if has_4_bits or options.bits == 8 else QuantizeOptions(8)
    if _INPUT_TABLE.fullmatch(name):
        return QuantizeOptions(8, group_size=_INPUT_TABLE_GROUP)
    has_8_bits = any(each.fullmatch(name) for each in (_EMBEDDINGS, _HEAD, _OF_INPUTS))
    return QuantizeOptions(8) if has_8_bits else None


def _plan_matrix(checkpoint: Checkpoint, name: str, options: QuantizeOptions) -> QuantizedMatrix:
    entry = checkpoint.tensors[name].entry
    if entry.dtype not in SOURCE_DTYPES:
        raise UsageError(
            f"tensor {name} is {entry.dtype}, and only {', '.join(SOURCE_DTYPES)} can be quantised",
            key="quantize",
            hint="Give the original model. GPTQ and AWQ checkpoints are packed as they are, without --quantize.",
        )
    if len(entry.shape) != 2 or 0 in entry.shape:
        raise CheckpointError(f"tensor {name} of shape {list(entry.shape)} is no matrix", where=name)
    is_transposed = _INPUTS_FIRST.fullmatch(name) is not None or _is_of_columns(checkpoint, name)
    rows, columns = reversed(entry.shape) if is_transposed else entry.shape
    if name.endswith(".c_attn.weight") and rows != 3 * columns:
        raise UsageError(
            f"tensor {name} of shape {list(entry.shape)} is none of GPT-2's, whose inputs come first",
            key="quantize",
            hint="Pack the model without --quantize.",
        )
    own = _find_options(name, options)
    assert own is not None  # as for all names that come here
    group_size = own.group_size or (DEFAULT_GROUP_SIZE if own.bits == 4 else columns)
    if own.bits == 4 and columns % max(group_size, RUN):
        own, group_size = QuantizeOptions(8), columns
    if columns % group_size:
        group_size = columns
    return QuantizedMatrix(name, rows, columns, own.bits, group_size, own.asymmetric, is_transposed)


def _is_of_columns(checkpoint: Checkpoint, name: str) -> bool:
    """True of an expert's matrix that `with_experts_apart` took from a tensor with the inputs first."""
    found = _OF_EXPERT.fullmatch(name)
    return found is not None and f"{found[1]}gate_up_proj.weight" in checkpoint.tensors


def _quantized_config(source: Source, checkpoint: Checkpoint, options: QuantizeOptions, dtype: str) -> bytes:
    """config.json with a note of what was done, and the dtype of computation, which integer
    embeddings no longer show.
    """
    info = next((info for info in checkpoint.files if info.name == CONFIG_NAME), None)
    if info is None:
        raise UsageError(
            f"{checkpoint.url} has no {CONFIG_NAME}, in which to say that its weights are quantised",
            key="quantize",
        )
    data, _ = source.read(CONFIG_NAME, max_bytes=MAX_SMALL_FILE_BYTES)
    config: dict[str, Any] = decode_object(data, where=CONFIG_NAME)
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            raise UsageError(
                f"{CONFIG_NAME} has a {key}: this model is quantised already",
                key="quantize",
                hint="Give the original model, or pack this one without --quantize.",
            )
    config["dtype" if "dtype" in config else "torch_dtype"] = _TORCH_NAMES[dtype]
    config["quantization_config"] = {
        "quant_method": "teneral",
        "bits": options.bits,
        "group_size": options.group_size or (DEFAULT_GROUP_SIZE if options.bits == 4 else -1),
        "symmetric": not options.asymmetric,
    }
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


READ_ELEMENTS = 4 << 20  # of the source, at a time


@dataclass(slots=True)
class _Kept:
    """The state of a matrix that is being quantised."""

    scale: Bits  # (rows, groups)
    zero: Bytes | None
    is_known: NDArray[np.bool_]  # of each row
    left_elements: int  # of all its pieces, to be asked for
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards the moments being made
    moments: InputMoments | None = None
    has_moments: bool = False  # they were requested
    transposed: Bytes | None = (
        None  # (columns, rows, bytes of an element): all of a transposed matrix, once it is read
    )


class QuantizingReader:
    """Thread-safe."""

    def __init__(
        self, source: Source, checkpoint: Checkpoint, plan: QuantizePlan, moments_of: MomentsOf | None = None
    ) -> None:
        self._moments_of = moments_of
        self._source = source
        self._checkpoint = checkpoint
        self._pieces = plan.pieces
        self._kept: dict[str, _Kept] = {}
        self._changed = threading.Condition()
        self._is_stopped = False

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def stop(self) -> None:
        """End all waits with `LoadCancelledError`."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def read(self, stretch: Stretch, data: Bytes) -> None:
        """Fill `data` with a stretch of a piece. Raises `CheckpointError` naming a row with a NaN
        or an infinity, and the source's errors.
        """
        matrix, piece = self._pieces[stretch.tensor.name]
        kept = self._keep(matrix)
        row_elements = stretch.tensor.num_elements // matrix.rows
        begin, end = stretch.start // row_elements, -(-(stretch.start + stretch.count) // row_elements)
        if piece is Piece.WEIGHT:
            self._read_weight(matrix, kept, stretch, begin, end, data)
        else:
            self._wait(kept, begin, end)
            values = kept.scale if piece is Piece.SCALE else kept.zero
            assert values is not None  # or the matrix has no such piece
            first = stretch.start - begin * row_elements
            content = np.ascontiguousarray(values[begin:end]).reshape(-1)[first : first + stretch.count]
            data[:] = content.view(np.uint8)
        self._drop(matrix, kept, stretch.count)

    def _read_weight(
        self, matrix: QuantizedMatrix, kept: _Kept, stretch: Stretch, begin: int, end: int, data: Bytes
    ) -> None:
        row_bytes = stretch.tensor.size_bytes // matrix.rows
        moments = self._moments(matrix, kept)
        step = max(1, (CHUNK_ELEMENTS if moments is None else READ_ELEMENTS) // matrix.columns)
        read_rows = max(1, READ_ELEMENTS // matrix.columns)
        dtype = self._checkpoint.tensors[matrix.name].entry.dtype
        for first in range(begin, end, read_rows):
            stored = self._read_rows(matrix, kept, first, min(end, first + read_rows))
            for row in range(first, first + len(stored), step):
                some = stored[row - first : row - first + step]
                weights = to_float32(some.reshape(-1), dtype).reshape(len(some), matrix.columns)
                quantized = _quantize(matrix, weights, row, moments)
                self._learn(kept, row, quantized)
                _copy_overlap(quantized.weight, row * row_bytes, data, stretch.offset_bytes)

    def _moments(self, matrix: QuantizedMatrix, kept: _Kept) -> InputMoments | None:
        """The moments of the matrix' inputs, made once; None if they are unused or unknown."""
        if self._moments_of is None or matrix.bits == 8:
            return None
        with kept.lock:
            if not kept.has_moments:
                kept.moments, kept.has_moments = self._moments_of(matrix.name), True
            return kept.moments

    def _read_rows(self, matrix: QuantizedMatrix, kept: _Kept, begin: int, end: int) -> Bytes:
        """(end - begin, bytes of a row), as the checkpoint has them. All of a transposed matrix is kept in memory."""
        stored = self._checkpoint.tensors[matrix.name]
        shard = self._checkpoint.shards[stored.shard]
        item_bytes = DTYPE_BITS[stored.entry.dtype] // 8
        row_bytes = matrix.columns * item_bytes
        if matrix.is_transposed:
            with kept.lock:
                whole = kept.transposed
                if whole is None:
                    whole = np.empty((matrix.columns, matrix.rows, item_bytes), np.uint8)
                    data = whole.reshape(-1).data
                    self._source.read_into(shard.name, stored.entry.begin, data, version=shard.version)
                    kept.transposed = whole
            return np.ascontiguousarray(whole[:, begin:end].swapaxes(0, 1)).reshape(end - begin, row_bytes)
        rows = np.empty((end - begin, row_bytes), np.uint8)
        at = stored.entry.begin + begin * row_bytes
        self._source.read_into(shard.name, at, rows.reshape(-1).data, version=shard.version)
        return rows

    def _keep(self, matrix: QuantizedMatrix) -> _Kept:
        with self._changed:
            if matrix.name not in self._kept:
                shape = matrix.rows, matrix.groups
                num_elements = sum(rows * columns for _, _, (rows, columns) in matrix.pieces())
                self._kept[matrix.name] = _Kept(
                    np.zeros(shape, np.uint16),
                    np.zeros(shape, np.uint8) if matrix.has_zero else None,
                    np.zeros(matrix.rows, bool),
                    num_elements,
                )
            return self._kept[matrix.name]

    def _learn(self, kept: _Kept, row: int, quantized: Quantized) -> None:
        """A row's values do not depend on the reader, so two threads may note the same."""
        rows = slice(row, row + len(quantized.weight))
        with self._changed:
            kept.scale[rows] = quantized.scale
            if kept.zero is not None and quantized.zero is not None:
                kept.zero[rows] = quantized.zero
            kept.is_known[rows] = True
            self._changed.notify_all()

    def _wait(self, kept: _Kept, begin: int, end: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or bool(kept.is_known[begin:end].all()))
            if self._is_stopped:
                raise LoadCancelledError("packing was stopped")

    def _drop(self, matrix: QuantizedMatrix, kept: _Kept, count: int) -> None:
        with self._changed:
            kept.left_elements -= count
            if kept.left_elements == 0:
                del self._kept[matrix.name]


def _quantize(matrix: QuantizedMatrix, weights: Floats, row: int, moments: InputMoments | None) -> Quantized:
    bad = first_unusable(weights)
    if bad is not None:
        raise CheckpointError(
            f"tensor {matrix.name}, row {row + bad}: it holds a number that is no weight (NaN, infinite or huge)",
            where=matrix.name,
            hint="Is the model sound? Without --quantize it is packed as it is.",
        )
    if matrix.bits == 8:
        return quantize_int8(weights, matrix.group_size)
    return quantize_int4(weights, matrix.group_size, asymmetric=matrix.has_zero, moments=moments)


def _copy_overlap(rows: NDArray[np.generic], at: int, out: Bytes, out_at: int) -> None:
    """Copy the bytes of `rows`, which begin at byte `at` of their tensor, to where `out`, which
    begins at `out_at`, overlaps them.
    """
    data = rows.reshape(-1).view(np.uint8)
    begin, end = max(at, out_at), min(at + data.size, out_at + out.size)
    out[begin - out_at : end - out_at] = data[begin - at : end - at]
