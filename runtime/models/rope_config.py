"""Rotary position embedding as a model's config.json asks for it, and how far it lets a context reach.

It reads both spellings: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling`
(transformers 4). It computes no frequencies: `rotary.py` does, with numpy, which reading a config does without.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ..errors import ModelError
from .fields import Fields

LOCAL_KIND = "sliding_attention"
LAYER_KINDS = ("full_attention", LOCAL_KIND)  # that may have a rotary embedding each
_NO_SPELLINGS: Mapping[str, str] = {}

MAX_POSITIONS = 1 << 24  # positions are multiplied in float32, which holds whole numbers exactly up to here


class RopeType(enum.StrEnum):
    """How the frequencies are stretched for contexts longer than those of the pretraining."""

    DEFAULT = "default"
    LINEAR = "linear"  # all divided by `factor`
    DYNAMIC = "dynamic"  # NTK: the base grows with the context (see `backends/torch/layers.py` for when)
    LLAMA3 = "llama3"  # low ones divided, high ones kept, those between interpolated
    YARN = "yarn"  # likewise by rotations within the pretraining's context, and the result is scaled
    # Those of a part of the head, as if all of it turned; the others are 0. Of families that spell it.
    PROPORTIONAL = "proportional"
    LONGROPE = "longrope"  # each divided by a factor of its own, with others beyond the pretraining's context


class RopeConfig(Struct, frozen=True):
    """Parameters of one rotary embedding; those that its type does not use keep their defaults."""

    rope_type: RopeType
    theta: float
    rotary_dim: int  # how many of a head's dimensions turn; even
    max_positions: int  # max_position_embeddings
    original_max_positions: int  # the context of the pretraining
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # cos and sin are multiplied by it
    score_factor: float = 1.0  # DeepSeek's models multiply attention scores by it
    short_factors: tuple[float, ...] = ()  # (rotary_dim / 2,) of longrope, within the pretraining's context
    long_factors: tuple[float, ...] = ()  # beyond it
    num_turning: int = 0  # of proportional, the frequencies that are not 0

    @classmethod
    def from_fields(
        cls,
        config: Fields,
        *,
        head_dim: int,
        max_positions: int,
        kind: str = "",
        theta_key: str = "rope_theta",
        default_theta: float = 10_000.0,
        default_original: int | None = None,
        may_be_partial: bool = False,
        default_partial: float = 1.0,
        spellings: Mapping[str, str] = _NO_SPELLINGS,
        may_have_alpha: bool = False,
    ) -> RopeConfig:
        """`kind` names the one for layers of this kind, of families that have several; `theta_key` where older files
        keep its base. `default_original` is the pretraining's context of files that do not state it, `spellings` are
        older names of types. With `may_have_alpha`, a file's alpha stretches the base, and nothing depends on a text's
        length.
        """
        key, rope = _rope_fields(config, kind)
        rope_type = _rope_type(rope, spellings)
        theta = (
            rope.number("rope_theta", low=2.0, high=1e12)
            if "rope_theta" in rope
            else config.number(theta_key, low=2.0, high=1e12, default=default_theta)
        )
        if may_have_alpha and rope_type is RopeType.DYNAMIC and rope.get("alpha"):
            theta *= rope.number("alpha", low=1e-3, high=1e6) ** (head_dim / (head_dim - 2))
            rope_type = RopeType.DEFAULT
        if rope_type is RopeType.PROPORTIONAL:
            return _proportional(rope, theta, head_dim, max_positions)
        partial_at = rope if "partial_rotary_factor" in rope else config
        rotary_dim = _rotary_dim(partial_at, head_dim, default_partial, may_be_partial=may_be_partial)
        if rope_type is RopeType.DEFAULT:
            return cls(rope_type, theta, rotary_dim, max_positions, max_positions)

        # Some files keep the pretraining's context outside; then that one counts.
        original_at = config if "original_max_position_embeddings" in config else rope
        original = original_at.integer(
            "original_max_position_embeddings",
            low=1,
            high=MAX_POSITIONS,
            default=default_original or max_positions,
        )
        implied = max_positions / original if rope_type in (RopeType.YARN, RopeType.LONGROPE) else None
        factor = rope.number("factor", low=1e-3, high=1e6, default=implied)
        common = (rope_type, theta, rotary_dim, max_positions, original, factor)
        if rope_type is RopeType.LLAMA3:
            low, high = _llama3_factors(rope, key)
            return cls(*common, low_freq_factor=low, high_freq_factor=high)
        if rope_type is RopeType.YARN:
            return cls(
                *common,
                beta_fast=rope.number("beta_fast", low=1e-3, high=1e6, default=32.0),
                beta_slow=rope.number("beta_slow", low=1e-3, high=1e6, default=1.0),
                truncate=rope.boolean("truncate", default=True),
                attention_factor=_yarn_attention_factor(rope, factor),
                score_factor=_yarn_scale(
                    factor, rope.number("mscale_all_dim", low=0.0, high=1e6, default=0.0)
                )
                ** 2,
            )
        if rope_type is RopeType.LONGROPE:
            length = rotary_dim // 2
            return cls(
                *common,
                attention_factor=_longrope_attention_factor(rope, factor, original),
                short_factors=rope.numbers("short_factor", length=length, low=1e-3, high=1e6),
                long_factors=rope.numbers("long_factor", length=length, low=1e-3, high=1e6),
            )
        return cls(*common)

    @property
    def max_context(self) -> int:
        """The default maximum of a sequence's tokens.

        Linear stretching multiplies the positions that were trained, YaRN those of the pretraining; Llama
        3 files state the stretched number already. Dynamic NTK is exact up to `max_position_embeddings`,
        and changes the model beyond (see `rotary.py`), so going beyond has to be asked for; as with longrope, whose
        other factors begin behind the context of the pretraining.
        """
        if self.rope_type is RopeType.LONGROPE:
            return min(self.max_positions, self.original_max_positions)
        if self.rope_type is RopeType.LINEAR:
            return min(MAX_POSITIONS, max(self.max_positions, int(self.max_positions * self.factor)))
        if self.rope_type is RopeType.YARN:
            return min(MAX_POSITIONS, max(self.max_positions, int(self.original_max_positions * self.factor)))
        return self.max_positions

    @property
    def longest_context(self) -> int:
        """Tokens that a sequence may have where that is asked for: not less than `max_context`."""
        if self.rope_type is RopeType.LONGROPE:
            return max(self.max_context, self.max_positions)
        if self.rope_type is RopeType.DYNAMIC:
            return min(MAX_POSITIONS, max(self.max_positions, int(self.max_positions * self.factor)))
        return self.max_context


def _rope_fields(config: Fields, kind: str) -> tuple[str, Fields]:
    """The object that describes the rotary embedding of layers of this kind, empty when there is none, and its key."""
    key = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    data = config.get(key)
    rope = Fields({} if data is None else data, where=f"{key}.")
    nested = [name for name in LAYER_KINDS if name in rope]
    if kind and nested:
        if config.get("rope_scaling") not in (None, {}, data):
            raise _contradiction()
        return f"{key}.{kind}", Fields({} if kind not in rope else rope.get(kind), where=f"{key}.{kind}.")
    if kind == LOCAL_KIND:
        return key, Fields({})  # older files have its base, and nothing else
    other = config.get("rope_scaling")
    if (
        other
        and isinstance(other, Mapping)
        and isinstance(data, Mapping)
        and _stretching(data) != _stretching(other)
    ):
        raise _contradiction()
    for name in nested:
        raise rope.wrong(name, "but one embedding for all layers is all that is supported")
    return key, rope


def _contradiction() -> ModelError:
    return ModelError(
        "config.json: rope_parameters and rope_scaling contradict each other",
        hint="Remove the one that the model was not trained with.",
    )


def _rope_type(rope: Fields, spellings: Mapping[str, str]) -> RopeType:
    key = "rope_type" if "rope_type" in rope else "type"
    known = [each for each in RopeType if each is not RopeType.PROPORTIONAL]
    stated = rope.choice(key, [*known, *spellings], default="default")
    return RopeType(spellings.get(stated, stated))


def _stretching(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The settings common to both spellings: everything except the base, which only the newer one
    holds.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {"rope_type": kind} | {
        name: value for name, value in rope.items() if name not in ("rope_type", "type", "rope_theta")
    }


def _proportional(rope: Fields, theta: float, head_dim: int, max_positions: int) -> RopeConfig:
    """Gemma 4's partial rotation: the first `partial_rotary_factor` of a head's frequencies, and 0 for all others.

    `factor` divides the frequencies; the maximum context stays as it is.
    """
    partial = rope.number("partial_rotary_factor", low=0.0, high=1.0, default=1.0)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim is {head_dim}, but must be even")
    return RopeConfig(
        RopeType.PROPORTIONAL,
        theta,
        head_dim,
        max_positions,
        max_positions,
        factor=rope.number("factor", low=1e-3, high=1e6, default=1.0),
        num_turning=int(partial * head_dim // 2),
    )


def _rotary_dim(fields: Fields, head_dim: int, default: float, *, may_be_partial: bool) -> int:
    """The rotated dimensions of a head. In most families transformers turns whole heads: it ignores another
    factor, or fails by it.
    """
    partial = fields.number("partial_rotary_factor", low=0.0, high=1.0, default=default)
    if partial != 1.0 and not may_be_partial:
        raise fields.wrong("partial_rotary_factor", "but models of this family turn all of a head")
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or rotary_dim < 2:
        if partial == 1.0:
            raise ModelError(f"config.json: head_dim is {head_dim}, but must be even")
        raise fields.wrong(
            "partial_rotary_factor", f"but must turn an even number of a head's {head_dim}, not {rotary_dim}"
        )
    return rotary_dim


def _llama3_factors(rope: Fields, key: str) -> tuple[float, float]:
    low = rope.number("low_freq_factor", low=1e-3, high=1e6)
    high = rope.number("high_freq_factor", low=1e-3, high=1e6)
    if high < low:
        raise ModelError(
            f"config.json: {key}.high_freq_factor is {high:g}, but must be at least low_freq_factor, {low:g}"
        )
    return low, high


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    stated = rope.optional_number("attention_factor", low=0.0, high=1e6)
    if stated is not None:
        return stated
    mscale = rope.number("mscale", low=0.0, high=1e6, default=0.0)
    mscale_all_dim = rope.number("mscale_all_dim", low=0.0, high=1e6, default=0.0)
    if mscale and mscale_all_dim:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    """Equation 22 of the YaRN paper (arXiv 2309.00071), with DeepSeek's `mscale`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _longrope_attention_factor(rope: Fields, factor: float, original: int) -> float:
    """Equation 6 of the LongRoPE paper (arXiv 2402.13753), unless the file states another."""
    stated = rope.optional_number("attention_factor", low=0.0, high=1e6)
    if stated is not None:
        return stated
    return math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 and original > 1 else 1.0
