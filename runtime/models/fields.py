"""Values out of a model's JSON files, each with a type and bounds; and the fields of config.json
that decoders and encoders state in the same way: the family, the sizes, the activation, the norms.

These files come from anywhere, so a value is taken only as what it claims to be: no text for a
number, no NaN, no true for 1. Every complaint names the key, says what was found, and what is
allowed. `null` counts as absent, as it does for the libraries that write these files.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from ..errors import ModelError

T = TypeVar("T")
# What each architecture means by an activation's name; `backends/torch/layers.py` computes them.
ACTIVATIONS = (
    *("silu", "swish", "gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    *("relu", "relu2", "quick_gelu"),
)


class Norm(enum.StrEnum):
    """Kinds of norms over rows; sums are fp32. Layer norms may have a bias, which is added before rounding."""

    RMS = "rms"  # x / rms(x), rounded to the model's dtype, times the weight
    RMS_WIDE = "rms_wide"  # x / rms(x) times the weight, rounded once
    RMS_PLUS_ONE = "rms_plus_one"  # x / rms(x) times (1 + weight), rounded once
    LAYER = "layer"  # (x - mean(x)) / deviation(x) times the weight, rounded once
    LAYER_PLUS_ONE = "layer_plus_one"  # likewise times (1 + weight); there is a bias


MAX_LAYERS = 1_024
MAX_WIDTH = 1 << 20  # of hidden and intermediate states
MAX_HEADS = 4_096
MAX_HEAD_DIM = 1_024
MAX_EXPERTS = 1_024
MAX_VOCABULARY = 1 << 24


_OTHERS = "--backend transformers serves others that an installed transformers knows, slowly."
QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # older tools write the second one
# Of a model with a vision tower, where its decoder looks for them.
_OF_WHOLE_MODEL = (*QUANTIZATION_KEYS, "dtype", "torch_dtype")


class Fields:
    """A JSON object read key by key. `where` is put before a key in messages, as in "rope_scaling."; `older` has the
    older names of keys, which messages state where the file does.
    """

    def __init__(
        self,
        data: Any,
        *,
        file: str = "config.json",
        where: str = "",
        older: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if not isinstance(data, Mapping):
            raise ModelError(
                f"{file}: {where.rstrip('.') or 'the file'} must be an object, but is {_short(data)}"
            )
        self._data = data
        self._file = file
        self._where = where
        self._older = older

    def __contains__(self, key: object) -> bool:
        return self._data.get(key) is not None

    def renamed(self, names: Mapping[str, str]) -> Fields:
        """The same fields, those of older names (the keys) under their newer ones, in place of what these had."""
        found = self.replaced({new: self._data[old] for old, new in names.items() if old in self})
        found._older = {**self._older, **{new: old for old, new in names.items()}}
        return found

    def replaced(self, values: Mapping[str, Any]) -> Fields:
        """The same fields with these values in place of those that they had."""
        return Fields({**self._data, **values}, file=self._file, where=self._where, older=self._older)

    def filled(self, defaults: Mapping[str, Any]) -> Fields:
        """The same fields, with these in place of absent ones."""
        given = {key: value for key, value in self._data.items() if value is not None}
        return Fields({**defaults, **given}, file=self._file, where=self._where, older=self._older)

    def states(self, key: str) -> bool:
        """True if the key is there at all: for the few where `null` says something else than nothing does."""
        return key in self._data

    def get(self, key: str) -> Any:
        """The value as it is; None when absent."""
        return self._data.get(key)

    def integer(self, key: str, *, low: int, high: int, default: int | None = None) -> int:
        """A whole number in [low, high]. Without a `default` the key must be there."""
        value = self.optional_integer(key, low=low, high=high)
        if value is not None:
            return value
        return self._required(key, default)

    def optional_integer(self, key: str, *, low: int, high: int) -> int | None:
        value = self._data.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"but must be a whole number from {low} to {high}")
        return value

    def number(self, key: str, *, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]. Without a `default` the key must be there."""
        value = self.optional_number(key, low=low, high=high)
        if value is not None:
            return value
        return self._required(key, default)

    def optional_number(self, key: str, *, low: float, high: float) -> float | None:
        value = self._data.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, f"but must be a number from {low:g} to {high:g}")
        # The comparison comes first, for an integer of a thousand digits has no float; NaN fails it as well.
        if not low <= value <= high or not math.isfinite(value):
            raise self.wrong(key, f"but must be a number from {low:g} to {high:g}")
        return float(value)

    def numbers(self, key: str, *, length: int, low: float, high: float) -> tuple[float, ...]:
        """A list of that many finite numbers in [low, high], which must be there."""
        value = self._data.get(key)
        if value is None:
            return self._required(key, None)
        if (
            not isinstance(value, list)
            or len(value) != length
            or any(isinstance(one, bool) or not isinstance(one, (int, float)) for one in value)
            or not all(low <= one <= high for one in value)
        ):
            raise self.wrong(key, f"but must be a list of {length} numbers from {low:g} to {high:g}")
        return tuple(float(one) for one in value)

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self._data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "but must be true or false")
        return value

    def choice(self, key: str, allowed: Collection[str], *, default: str | None = None) -> str:
        """One of `allowed`. Without a `default` the key must be there."""
        value = self._data.get(key)
        if value is None:
            return self._required(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.wrong(key, "which is not supported", hint=f"Supported: {', '.join(sorted(allowed))}.")
        return value

    def text(self, key: str) -> str:
        value = self._data.get(key)
        if value is None:
            return self._required(key, None)
        if not isinstance(value, str):
            raise self.wrong(key, "but must be a string")
        return value

    def texts(self, key: str) -> list[str] | None:
        """A list of strings; None when absent."""
        value = self._data.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "but must be a list of strings")
        return value

    @property
    def is_quantised(self) -> bool:
        return any(key in self for key in QUANTIZATION_KEYS)

    def refuse_others(self, known: Collection[str], *, hint: str = "") -> None:
        """Raises `ModelError` for a key that is there and not `known`."""
        for key, value in self._data.items():
            if key not in known and value is not None:
                raise ModelError(f"{self._file}: unknown field {self._where}{key:.80}", hint=hint)

    def wrong(self, key: str, complaint: str, *, hint: str = "") -> ModelError:
        """The error for a key whose value cannot be used."""
        value, older = _short(self._data.get(key)), self._older.get(key)
        name = older if older is not None and older in self else key
        return ModelError(f"{self._file}: {self._where}{name} is {value}, {complaint}", hint=hint)

    def _required(self, key: str, default: T | None) -> T:
        if default is None:
            either = f"{self._older[key]} or {key}" if key in self._older else key
            raise ModelError(f"{self._file} has no {self._where}{either}")
        return default


def _short(value: Any) -> str:
    """A value as a message shows it: recognisable, and never long."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"  # str() of a huge integer raises
    text = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "…"


def family_of(config: Fields, families: Mapping[str, tuple[str, ...]]) -> str:
    """The model's family, by `model_type` or else `architectures`; where both are there, they must agree."""
    supported = [names[0] for names in families.values()]
    hint = f"Supported architectures: {', '.join(supported)}. {_OTHERS}"
    architectures = config.texts("architectures") or []
    if "model_type" in config:
        family = str(config.get("model_type"))
        if family not in families:
            raise config.wrong(
                "model_type",
                "which is not supported",
                hint=f"Supported: {', '.join(sorted(families))}. {_OTHERS}",
            )
    else:
        family = next((key for key, names in families.items() if set(names) & set(architectures)), "")
    if not family:
        raise config.wrong("architectures", "which is not supported", hint=hint)
    if architectures and not set(families[family]) & set(architectures):
        raise ModelError(
            f"config.json: architecture {architectures[0][:80]!r} of model_type {family!r} is not supported",
            hint=hint,
        )
    return family


def shape_of(config: Fields) -> dict[str, int]:
    """The sizes that every family has."""
    return {
        "vocab_size": config.integer("vocab_size", low=1, high=MAX_VOCABULARY),
        "hidden_size": config.integer("hidden_size", low=1, high=MAX_WIDTH),
        "intermediate_size": config.integer("intermediate_size", low=1, high=MAX_WIDTH),
        "num_layers": config.integer("num_hidden_layers", low=1, high=MAX_LAYERS),
        "num_heads": config.integer("num_attention_heads", low=1, high=MAX_HEADS),
    }


def text_fields(
    config: Fields,
    family: str,
    model_type: str,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    *,
    is_tied: bool = False,
    may_be_flat: bool = False,
) -> Fields:
    """The fields of the decoder inside a model that also has a vision tower. Its own `model_type` must be this one.
    The whole model says whether embeddings are tied, and how weights are stored, as in transformers. Some files have
    the decoder's fields next to the whole model's.
    """
    given = config.get("text_config")
    if given is None and may_be_flat:
        given = {**config._data, "model_type": model_type}
    if not isinstance(given, dict):
        raise ModelError(f"config.json: a model of the family {family!r} needs a text_config")
    whole = {key: config.get(key) for key in _OF_WHOLE_MODEL if key in config}
    tied = config.boolean("tie_word_embeddings", default=is_tied)
    text = Fields({**defaults, **given, **whole, "tie_word_embeddings": tied}, where="text_config.")
    text.choice("model_type", (model_type,), default=model_type)
    return text
