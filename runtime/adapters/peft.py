"""PEFT's LoRA adapters: adapter_config.json read strictly, and the adapter's matrices planned against a base.

Every option that would change the result and is not implemented is refused by name, and so is one that is unknown
here. Pure but for `fill`, which gets the bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ...loader.errors import CheckpointError
from ...loader.format.safetensors import TensorEntry, decode_object
from ..errors import AdapterError
from ..models.adapter import (
    MAX_RANK,
    AdapterPart,
    AdapterPlace,
    AdapterSite,
    AdapterWeights,
    Module,
    modules_of,
)
from ..models.decoder_config import DecoderConfig
from ..tensors import DType, Tensor, aligned_empty, from_float32, to_float32
from .patterns import Pattern, StepBudget

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERNS = 4096
MAX_TARGETS = 1024
ALL_LINEAR = "all-linear"

# Options without effect on what a finished adapter computes.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "fan_in_fan_out",  # of bases that store inputs first; A and B are alike
        "inference_mode",
        "layers_pattern",
        "loftq_config",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",  # of use_qalora
        "revision",
        "runtime_config",
        "task_type",
    }
)
# Beginnings that leave the base's weights as they are; PiSSA, OLoRA, CorDA and LoftQ change them.
_INITS: tuple[Any, ...] = (None, True, False, "gaussian", "eva", "orthogonal")
_READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "bias",
    }
)
_DTYPES = {"BF16": DType.BF16, "F16": DType.F16, "F32": DType.F32}
_TENSOR = re.compile(
    r"base_model\.model\.(?:(?:model\.(?:language_model\.)?|gpt_neox\.)layers|transformer\.h)"
    r"\.(\d{1,5})\.([A-Za-z0-9_.]+)\.lora_([AB])\.weight"
)
_PLAIN = re.compile(r"[A-Za-z0-9_.]{1,256}")


class PeftConfig(Struct, frozen=True):
    """Of an adapter_config.json: only what changes the result."""

    rank: int
    alpha: float
    use_rslora: bool
    targets: tuple[str, ...] | Pattern | None  # ends of module names; None: all linear modules of layers
    excluded: tuple[str, ...] | Pattern  # of the targets
    layers: frozenset[int] | None  # None: all
    # Their first that fits a module counts.
    rank_pattern: tuple[tuple[str | Pattern, int], ...]
    alpha_pattern: tuple[tuple[str | Pattern, float], ...]

    @classmethod
    def parse(cls, data: bytes) -> PeftConfig:
        """Raises `AdapterError` for what is no such config, and for options that are not implemented."""
        try:
            fields = decode_object(data, where=CONFIG_NAME)
        except CheckpointError as error:
            raise AdapterError(error.message) from error
        _check_options(fields)
        targets, layers = fields.get("target_modules"), _layers(fields.get("layers_to_transform"))
        if layers is not None and isinstance(targets, str) and targets != ALL_LINEAR:
            raise AdapterError(
                f"{CONFIG_NAME}: layers_to_transform and a regular expression in target_modules exclude each other",
                hint="List the names of the modules, or name the layers in the expression.",
            )
        budget = StepBudget()
        return cls(
            rank=_whole(fields, "r", 1, MAX_RANK),
            alpha=_number(fields.get("lora_alpha"), "lora_alpha"),
            use_rslora=_flag(fields, "use_rslora"),
            targets=None if targets == ALL_LINEAR else _modules("target_modules", targets, budget),
            excluded=_modules("exclude_modules", fields["exclude_modules"], budget)
            if fields.get("exclude_modules")
            else (),
            layers=layers,
            rank_pattern=tuple(
                (key, _whole({"rank_pattern": value}, "rank_pattern", 1, MAX_RANK))
                for key, value in _pattern(fields, "rank_pattern", budget)
            ),
            alpha_pattern=tuple(
                (key, _number(value, "alpha_pattern"))
                for key, value in _pattern(fields, "alpha_pattern", budget)
            ),
        )

    def rank_of(self, module: str) -> int:
        """Of a module by its full name. Like all here, raises `AdapterError` where expressions take too
        long to match.
        """
        return next((rank for key, rank in self.rank_pattern if _fits(module, key)), self.rank)

    def factor_of(self, module: str) -> float:
        alpha = next((own for key, own in self.alpha_pattern if _fits(module, key)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def wants(self, layer: int, module: str) -> bool:
        """True if the adapter changes this module of this layer."""
        if self.layers is not None and layer not in self.layers:
            return False
        return (self.targets is None or _fits_any(module, self.targets)) and not _fits_any(
            module, self.excluded
        )

    @property
    def named(self) -> tuple[str, ...]:
        """The ends of module names that `target_modules` lists."""
        return self.targets if isinstance(self.targets, tuple) else ()


class ModulePlan(Struct, frozen=True):
    """One module's two matrices as they are stored."""

    module: Module
    factor: float
    a: TensorEntry  # (rank, num_in)
    b: TensorEntry  # (num_out, rank)

    @property
    def rank(self) -> int:
        return self.a.shape[0]


class AdapterPlan(Struct, frozen=True):
    layers: tuple[tuple[ModulePlan, ...], ...]  # by place, then column
    dtype: DType  # of all arrays in memory

    @property
    def size_bytes(self) -> int:
        """Of the arrays."""
        numbers = sum(
            plan.rank * (plan.module.num_in + plan.module.num_out) for layer in self.layers for plan in layer
        )
        return numbers * self.dtype.size_bytes

    def allocate(self) -> AdapterWeights:
        """Arrays without content."""
        return AdapterWeights(tuple(_allocate(layer, self.dtype) for layer in self.layers), self.size_bytes)

    def fill(self, weights: AdapterWeights, layer: int, content: Callable[[TensorEntry], memoryview]) -> None:
        """One layer's content; `content` has the bytes of a matrix. Raises `AdapterError` for numbers that are not
        finite.
        """
        for place, site in weights.layers[layer].items():
            plans = [plan for plan in self.layers[layer] if plan.module.place is place]
            first = 0
            for plan, part in zip(plans, site.parts, strict=True):
                site.a.array[first : first + plan.rank] = _matrix(plan.a, content(plan.a), self.dtype)
                part.b.array[:] = _matrix(plan.b, content(plan.b), self.dtype).T
                first += plan.rank


def plan_adapter(peft: PeftConfig, entries: Mapping[str, TensorEntry], base: DecoderConfig) -> AdapterPlan:
    """The place of each tensor of the adapter in the base. Raises `AdapterError` unless they are exactly those that the
    config announces, in the shapes that it and the base give.
    """
    found = _matrices(entries)
    layers: list[tuple[ModulePlan, ...]] = []
    named: set[str] = set()
    for layer in range(base.num_layers):
        plans = []
        for module in modules_of(base, layer):
            full = f"{base.model_names.adapted_layers}.{layer}.{module.name}"
            named.update(target for target in peft.named if _fits(full, target))
            if peft.wants(layer, full):
                plans.append(_module_plan(peft, module, full, found.pop((layer, module.name), {})))
        layers.append(tuple(plans))
    if missing := set(peft.named) - named:
        names = dict.fromkeys(
            each.name for layer in range(base.num_layers) for each in modules_of(base, layer)
        )
        raise AdapterError(
            f"target_modules names {min(missing)!r}, which is no projection of this base that adapters may change",
            hint=f"These are {', '.join(names)}.",
        )
    if found:
        layer, name = min(found)
        raise AdapterError(
            f"the adapter changes {name} of layer {layer}, which it does not announce or the base does not have",
            hint="Adapters may change the projections of attention, but q_b_proj and kv_b_proj, and of dense MLPs and "
            "shared experts, but not their gate, in the layers of the base.",
        )
    if not any(layers):
        raise AdapterError("the adapter changes nothing of this base")
    dtypes = {entry.dtype for layer in layers for plan in layer for entry in (plan.a, plan.b)}
    return AdapterPlan(tuple(layers), DType.BF16 if dtypes == {"BF16"} else DType.F32)


def _module_plan(peft: PeftConfig, module: Module, full: str, pair: dict[str, TensorEntry]) -> ModulePlan:
    rank = peft.rank_of(full)
    shapes = {"A": (rank, module.num_in), "B": (module.num_out, rank)}
    for side, shape in shapes.items():
        entry = pair.get(side)
        if entry is None:
            raise AdapterError(f"the adapter has no lora_{side} of {full}, although it announces it")
        if entry.dtype not in _DTYPES:
            raise AdapterError(f"{entry.name} is {entry.dtype}: adapters may be in BF16, F16 or F32")
        if entry.shape != shape:
            raise AdapterError(
                f"{entry.name} has shape {entry.shape}, but rank {rank} and the base give {shape}",
                hint="Serve the base that the adapter was trained on.",
            )
    return ModulePlan(module, peft.factor_of(full), pair["A"], pair["B"])


def _matrices(entries: Mapping[str, TensorEntry]) -> dict[tuple[int, str], dict[str, TensorEntry]]:
    """By layer and module name: A and B."""
    found: dict[tuple[int, str], dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise AdapterError(
                f"the adapter has a tensor {name[:200]!r}, which is no LoRA matrix of a decoder's layer",
                hint="DoRA, trained embeddings, heads and biases are not supported.",
            )
        found.setdefault((int(match[1]), match[2]), {})[match[3]] = entry
    return found


def _allocate(plans: Iterable[ModulePlan], dtype: DType) -> dict[AdapterPlace, AdapterSite]:
    by_place: dict[AdapterPlace, list[ModulePlan]] = {}
    for plan in plans:
        by_place.setdefault(plan.module.place, []).append(plan)
    return {
        place: AdapterSite(
            _empty((sum(plan.rank for plan in own), own[0].module.num_in), dtype),
            tuple(
                AdapterPart(_empty((plan.rank, plan.module.num_out), dtype), plan.module.first, plan.factor)
                for plan in own
            ),
        )
        for place, own in by_place.items()
    }


def _empty(shape: tuple[int, int], dtype: DType) -> Tensor:
    return Tensor(dtype, aligned_empty(shape, dtype.numpy))


def _matrix(entry: TensorEntry, data: memoryview, dtype: DType) -> npt.NDArray[Any]:
    """The entry's matrix in this dtype, which holds its numbers exactly. Raises `AdapterError` for one that would make
    every answer NaN.
    """
    stored = _DTYPES[entry.dtype]
    array = np.frombuffer(data, stored.numpy).reshape(entry.shape)
    if not _is_finite(array, stored):
        raise AdapterError(
            f"{entry.name} has numbers that are NaN or infinite",
            hint="The training that made it has diverged: use an earlier checkpoint.",
        )
    return array if stored is dtype else from_float32(to_float32(array, stored), dtype)


def _is_finite(array: npt.NDArray[Any], dtype: DType) -> bool:
    if dtype is DType.BF16:  # as uint16: an exponent of ones
        return bool(((array & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(array).all())


# ---- adapter_config.json ----


def _check_options(fields: Mapping[str, Any]) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        _refuse("peft_type", kind)
    if fields.get("bias", "none") != "none":
        _refuse("bias", fields["bias"])
    if (
        not any(fields.get("init_lora_weights") is known for known in _INITS[:3])
        and fields.get("init_lora_weights") not in _INITS[3:]
    ):
        _refuse("init_lora_weights", fields["init_lora_weights"])
    for name, value in fields.items():
        # Options that are off leave the result as it is, those of later versions, too.
        if name not in _READ and name not in _WITHOUT_EFFECT and not _is_off(value):
            _refuse(name, value)


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ([], {})


def _refuse(name: str, value: Any) -> NoReturn:
    raise AdapterError(
        f"{CONFIG_NAME}: {name[:100]} = {str(value)[:100]} is not supported",
        hint="Plain LoRA adapters of linear layers are: docs/adapters.md lists the options.",
    )


def _whole(fields: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not low <= value <= high:
        raise AdapterError(f"{CONFIG_NAME}: {name} is {str(value)[:100]}, but must be from {low} to {high}")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e6:
        raise AdapterError(f"{CONFIG_NAME}: {name} is {str(value)[:100]}, but must be a number")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise AdapterError(f"{CONFIG_NAME}: {name} must be true or false")
    return value


def _modules(name: str, value: Any, budget: StepBudget) -> tuple[str, ...] | Pattern:
    """Ends of module names, or a regular expression for whole ones."""
    if isinstance(value, str):
        return Pattern(value, budget, option=name)
    if not isinstance(value, list) or not 0 < len(value) <= MAX_TARGETS:
        _refuse(name, value)
    for each in value:
        if not isinstance(each, str) or not _PLAIN.fullmatch(each):
            _refuse(name, each)
    return tuple(value)


def _layers(value: Any) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    numbers = [value] if type(value) is int else value
    if not isinstance(numbers, list) or any(type(each) is not int or each < 0 for each in numbers):
        _refuse("layers_to_transform", value)
    return frozenset(numbers)


def _pattern(fields: Mapping[str, Any], name: str, budget: StepBudget) -> list[tuple[str | Pattern, Any]]:
    """Ends of module names, or regular expressions for them, with the value of each."""
    value = fields.get(name) or {}
    if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
        _refuse(name, value)
    return [
        (key if _PLAIN.fullmatch(key) else Pattern(rf"(.*\.)?({key})", budget, option=name), own)
        for key, own in value.items()
    ]


def _fits(module: str, pattern: str | Pattern) -> bool:
    """True if the module has this end, or matches."""
    if isinstance(pattern, Pattern):
        return pattern.matches(module)
    return module == pattern or module.endswith(f".{pattern}")


def _fits_any(module: str, patterns: tuple[str, ...] | Pattern) -> bool:
    if isinstance(patterns, Pattern):
        return patterns.matches(module)
    return any(_fits(module, each) for each in patterns)
