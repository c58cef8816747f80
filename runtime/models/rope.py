"""Rotary position embedding: frequencies by type, tables of cosines and sines, and the rotation itself.

A table grows on demand and is made in fp32, then rounded to what the model computes in, as transformers
does. Nothing is computed before the first forward pass: torch's thread pool must not have run in a
process that may still fork.

Dynamic NTK stretches its base with the context. Keys that are already in a cache cannot be turned again,
so the base is set once, for the longest context that is admitted: up to `max_position_embeddings` that is
transformers' own result, and beyond it one consistent model, where re-stretching at each step would leave
old and new keys on different bases.
"""

from __future__ import annotations

import math

import torch

from .rope_config import RopeConfig, RopeType

SMALLEST_TABLE = 512  # positions


class RopeTable:
    """Cosines and sines, (positions, rotary_dim) each. Not thread-safe: one forward pass at a time."""

    def __init__(self, rope: RopeConfig, max_context: int, dtype: torch.dtype) -> None:
        self._rope = rope
        self._max_context = max_context
        self._dtype = dtype
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    def rows(self, positions: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of these positions, all below `end`: (T, 1, rotary_dim) each, to broadcast over heads.

        The first half of each sine is negated, which is what `rotate_` wants.
        """
        if end > len(self._cos) or self._cos.device != positions.device:
            self._grow(end, positions.device)
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines as they are now: they are replaced, not changed, when they grow."""
        return self._cos, self._sin

    def _grow(self, end: int, device: torch.device) -> None:
        doubled = 1 << (max(end, SMALLEST_TABLE) - 1).bit_length()
        length = max(end, min(doubled, self._max_context))
        frequencies, scale = frequencies_of(self._rope, self._max_context)
        # (length, rotary_dim / 2), in radians
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self._cos = torch.cat((cos, cos), dim=-1).to(device, self._dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device, self._dtype)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turns in place the first rotary_dim dimensions of each head of x (T, heads, head_dim).

    `cos` and `sin` are from `RopeTable.rows`. Dimension i pairs with i + rotary_dim / 2, as in the
    checkpoints that transformers writes.
    """
    part = x[..., : cos.shape[-1]]
    crossed = part.roll(cos.shape[-1] // 2, -1).mul_(sin)
    part.mul_(cos).add_(crossed)


def frequencies_of(rope: RopeConfig, max_context: int) -> tuple[torch.Tensor, float]:
    """(frequencies (rotary_dim / 2,) fp32 in radians a position, what cos and sin are scaled by)."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    match rope.rope_type:
        case RopeType.LINEAR:
            frequencies = 1.0 / rope.theta**exponents / rope.factor
        case RopeType.DYNAMIC:
            frequencies = 1.0 / _ntk_theta(rope, max_context) ** exponents
        case RopeType.LLAMA3:
            frequencies = _llama3(rope, 1.0 / rope.theta**exponents)
        case RopeType.YARN:
            frequencies = _yarn(rope, 1.0 / rope.theta**exponents)
        case RopeType.DEFAULT:
            frequencies = 1.0 / rope.theta**exponents
    return frequencies, rope.attention_factor


def _ntk_theta(rope: RopeConfig, max_context: int) -> float:
    stretch = rope.factor * max(max_context, rope.max_positions) / rope.max_positions - (rope.factor - 1.0)
    return float(rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Keeps what turns often within the pretraining's context, slows down what turns seldom."""
    turns = rope.original_max_positions * frequencies / (2.0 * math.pi)
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1.0 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """YaRN's "NTK by parts" (arXiv 2309.00071, section 3.2)."""
    low, high = _yarn_dimension(rope, rope.beta_fast), _yarn_dimension(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = (torch.arange(len(frequencies), dtype=torch.float32) - low) / (high - low)
    slowed = ramp.clamp(0.0, 1.0)
    return frequencies / rope.factor * slowed + frequencies * (1.0 - slowed)


def _yarn_dimension(rope: RopeConfig, turns: float) -> float:
    """The dimension whose frequency makes this many turns within the pretraining's context."""
    positions_a_radian = rope.original_max_positions / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(positions_a_radian) / (2 * math.log(rope.theta))
