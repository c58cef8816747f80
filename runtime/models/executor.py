"""The protocols of executors: the methods that decoders and encoders need, and their refusals.

A backend makes an executor from a spec and weights, and passes it to the model: models import no
executor. Each lists the features that it implements, and refuses, with a reason, every spec with
others: nothing is computed silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import asdict

from ..kv.storage import KVKind
from ..step.batch import Int64s, StepBatch
from ..tensors import DType
from .decoder_config import Sublayers
from .matrices import DecoderWeights
from .spec import DecoderSpec, EncoderSpec, are_alike

if TYPE_CHECKING:
    from .encoder_weights import EncoderWeights

Activations = Any  # (T, hidden_size) in the spec's dtype, in a form of the executor's own
Floats = npt.NDArray[np.float32]

Accepts = Callable[[Any], bool]


class Executor(Protocol):
    """Computes a decoder's steps. One thread at a time; long calls release the GIL.

    The decoder opens the gates: weights read by a call have arrived, and do not change during the
    call. The executor checks token ids, slots and block tables before they are used as indexes: an
    id outside the vocabulary raises, it never reads.
    """

    @property
    def name(self) -> str:
        """The backend's name, for logs and metrics."""

    @property
    def numerics(self) -> str:
        """The identity of its rounding: backend, version, instruction set. Executors of one name
        compute bit-identical keys and values from the same tokens, which they can share in
        snapshots.
        """

    @property
    def is_batch_invariant(self) -> bool:
        """True if the bits of a row's results depend on no other row of its step, nor on their number."""

    @property
    def runs_layers_together(self) -> bool:
        """True if one call for several layers is faster than a call for each."""

    @property
    def takes_adapters(self) -> bool:
        """True if a step's spans may have adapters (`models/adapter.py`). Others are given none."""

    @property
    def routes_apart(self) -> bool:
        """True for a `RoutingExecutor`. For others, a layer waits for all of its experts."""

    @property
    def scores_in_strips(self) -> bool:
        """True for a `StripExecutor`. For others, logits wait for the whole head."""

    def embed(self, batch: StepBatch) -> Activations:
        """The rows of the batch's tokens. Reads no other rows of the embeddings."""

    def begin(self, batch: StepBatch, kv: Any) -> Any:
        """The state that all layers share in one pass over this batch, for `layers`. Reads no
        weights. `kv` is from `new_kv`.
        """

    def layers(self, step: Any, first: int, end: int, x: Activations) -> Activations:
        """Compute the layers [first, end) on x: writes the rows' keys and values, and then attends.
        x may be changed, and is not used again. `step` is from `begin`, for the batch whose rows x
        has.
        """

    def logits(self, x: Activations, rows: Int64s) -> Any:
        """Logits (R, vocab_size) fp32 of these rows of the last layer's output; R may be 0. A new
        array on the host; on a device the input of the backend's sampler.
        """

    def states(self, x: Activations, rows: Int64s) -> Floats:
        """The final norm of these rows of the last layer's output, (R, hidden_size) fp32: the inputs of the head. A new
        array on the host.
        """

    def join(self, parts: Sequence[Activations]) -> Activations:
        """Concatenate the rows: two passes that met continue as one."""

    def select(self, x: Activations, rows: Int64s) -> Activations:
        """Select these rows, ascending: some sequences have left the pass."""

    def new_kv(self, num_blocks: int, block_size: int, kind: KVKind) -> Any:
        """Empty storage for keys and values, a `KVPool` of num_blocks times `kv_block_bytes`, and for as
        many recurrent states of models that have some. Its memory is not touched before it is written.
        Raises `ModelError` for a kind that this executor lacks.
        """

    def kv_block_bytes(self, block_size: int, kind: KVKind) -> int:
        """The bytes of one block in the storage of `new_kv`."""


class RoutingExecutor(Executor, Protocol):
    """Computes a layer with a mixture in two calls, which together give the bits of `layers`. What
    a row gives must not depend on other rows: between the calls, rows may be joined or selected.
    """

    def route(self, step: Any, layer: int, x: Activations) -> tuple[Activations, Int64s]:
        """Compute a layer up to its router. Returns x, for `experts`, and the experts that each row
        has chosen, (T, num_used), ascending. Reads no experts.
        """

    def experts(self, step: Any, layer: int, x: Activations) -> Activations:
        """Compute the rest of that layer. Reads the chosen experts alone."""


class StripExecutor(Executor, Protocol):
    """Computes logits in strips, as rows of the head arrive."""

    def strip(self, x: Activations, rows: Int64s, first: int, end: int) -> Floats:
        """The columns [first, end) of `logits`, bit for bit: (R, end - first) fp32, a new array. Reads no other rows
        of the head.
        """


class StatefulExecutor(Executor, Protocol):
    """Computes models with recurrent states."""

    def new_kv(self, num_blocks: int, block_size: int, kind: KVKind, num_states: int | None = None) -> Any:
        """The same, for this many states."""


class TextBatch(Struct, frozen=True, eq=False):
    """Texts as tokens, back to back, without padding."""

    tokens: Int64s  # (T,)
    starts: Int64s  # (N + 1,), ascending from 0 to T: text i has the tokens [starts[i], starts[i + 1]), at least one
    # (T,): each token's row of the table of types, where there is one; None: 0 for all.
    types: Int64s | None = None


class EncoderExecutor(Protocol):
    """Computes an encoder's batches. Like `Executor` unless stated otherwise."""

    @property
    def name(self) -> str: ...

    @property
    def runs_layers_together(self) -> bool: ...

    def embed(self, batch: TextBatch) -> Activations:
        """norm(word + position + type) of each token."""

    def layers(self, batch: TextBatch, first: int, end: int, x: Activations) -> Activations:
        """Compute the layers [first, end) on x. x may be changed, and is not used again."""

    def finish(self, batch: TextBatch, x: Activations) -> Floats:
        """(N, spec.num_columns): pooled and normalised states, or a classifier's scores. A new array."""


class ComputeDtype(Struct, frozen=True):
    """The compute dtype that a backend has chosen, with the reason."""

    stored: DType  # of the weights that are not integers
    dtype: DType  # of activations, keys and values
    why: str

    @property
    def attributes(self) -> dict[str, str]:
        """The attributes for the timeline."""
        return {"stored_dtype": self.stored.label, "compute_dtype": self.dtype.label, "why": self.why}

    def describe(self, backend: str) -> str:
        return f"weights in {self.stored.label}, computing in {self.dtype.label} by {backend}: {self.why}"


class ExecutorFactory(Protocol):
    """A backend's factory of executors for models."""

    @property
    def name(self) -> str:
        """The backend's name in `--backend`."""

    def compute_dtype(self, stored: DType, *, is_quantised: bool, is_encoder: bool = False) -> ComputeDtype:
        """Choose for weights stored so; for quantised weights, `stored` is the dtype of the
        non-integer ones.
        """

    def refuses_decoder(self, spec: DecoderSpec, weights: DecoderWeights) -> str | None:
        """The reason why this backend does not support the model; None: it does."""

    def refuses_encoder(self, spec: EncoderSpec, weights: EncoderWeights) -> str | None: ...

    def decoder(self, spec: DecoderSpec, weights: DecoderWeights) -> Executor:
        """Make the executor of a model that it does not refuse. Reads no content of the weights."""

    def encoder(self, spec: EncoderSpec, weights: EncoderWeights) -> EncoderExecutor: ...


def any_value(value: Any) -> bool:
    """For fields of which an executor implements every value."""
    return True


def one_of(*values: Any) -> Accepts:
    """For fields of which it implements only these values."""
    return lambda value: value in values


def any_of(names: str) -> Mapping[str, Accepts]:
    """Entries of these fields, whose names are in one text, for an executor that implements every value."""
    return dict.fromkeys(names.split(), any_value)


def none_of(names: str) -> Mapping[str, Accepts]:
    """Entries of these fields for an executor that implements none of them: they are None, False, 0 or empty."""
    return dict.fromkeys(names.split(), one_of(None, False, 0, ()))


# The fields that only scale an executor's loops.
SIZES = any_of("vocab_size hidden_size intermediate_size num_layers num_heads norm_eps attention_scale")

# What the native core alone implements, for executors without it.
NATIVE_ALONE: Mapping[str, Accepts] = {
    **none_of("delta_nets mamba layer_scalars layer_inputs streams laurel_rank source_len"),
    "sublayers": lambda kinds: set(kinds) == {Sublayers.BOTH},
    "layer_shapes": are_alike,
    "gate_cuts": lambda cuts: set(cuts) == {None},
}
# And what comes with it, and with images.
WITHOUT_NATIVE: Mapping[str, Accepts] = {
    **NATIVE_ALONE,
    **none_of(
        "value_norms gated_attention rotary_axes num_deep_rows takes_images whole_images windowed_images"
    ),
    **dict.fromkeys(("mlp_output_scale", "gate_scale", "attention_output_scale"), one_of(1.0)),
}


def native_alone(spec: DecoderSpec) -> str | None:
    """The field of the spec that the native core alone implements; None where there is no such."""
    return next((name for name, accepts in NATIVE_ALONE.items() if not accepts(getattr(spec, name))), None)


def refusal_of(
    spec: DecoderSpec | EncoderSpec, implemented: Mapping[str, Accepts], executor: str
) -> str | None:
    """The reason why `executor` does not support this model; None: it does.

    `implemented` has an entry for each field that the executor knows, nested ones as "rotary.dim",
    which tells whether it implements the field's value. A field without an entry is unknown to the
    executor: refused with any value.
    """
    for name, value in _fields_of(spec):
        accepts = implemented.get(name)
        if accepts is None:
            return f"{executor} does not know {name}"
        if not accepts(value):
            return f"{executor} does not implement {name} = {value!s:.80}"
    return None


def _fields_of(value: Struct, prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, inner in asdict(value).items():
        if isinstance(inner, Struct):
            found += _fields_of(inner, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", inner))
    return found


def refusal_of_formats(weights: DecoderWeights, table: Mapping[type[Any], Any], backend: str) -> str | None:
    """Why a backend with these formats cannot compute the layers' matrices; None where it can. Matrices
    that are not settled yet, such as GPTQ's, become integers, which every backend computes.
    """
    for layer in weights.layers:
        for projection in (
            *(layer.qkv, layer.output, layer.gate_up, layer.down),
            *(layer.query_up, layer.key_value_up),
            *(() if layer.inputs is None else (layer.inputs.gate, layer.inputs.up)),
            *(() if layer.mamba is None else (layer.mamba.inputs, layer.mamba.output)),
            *(() if layer.laurel is None else (layer.laurel.down, layer.laurel.up)),
            *(() if layer.cross is None else (layer.cross.query, layer.cross.keys, layer.cross.output)),
        ):
            if projection is None or not projection.is_settled:
                continue
            for matrix in projection.matrices():
                if type(matrix) not in table:
                    return f"{backend} does not multiply with a {type(matrix).__name__}"
    return None
