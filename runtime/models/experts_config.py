"""Mixtures of experts in a decoder's config.json, as validated values."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from .fields import MAX_EXPERTS, MAX_WIDTH, Fields


class ClampedSwiglu(Struct, frozen=True):
    """g / (1 + exp(-alpha · g)) · (u + 1), rounded once, of g = min(gate, limit) and u = up clipped to ±limit."""

    alpha: float
    limit: float


class ExpertShares(enum.StrEnum):
    """The functions that make shares of a router's scores, in fp32."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"  # of each score by itself


class Experts(Struct, frozen=True):
    """A mixture of experts in place of a layer's MLP: each token goes through those few whose shares are highest.

    Shares are made of the router's scores, and weights of the shares. Outputs are rounded once they are weighted, and
    added in the order of the experts; then that of the shared expert, if there is one.
    """

    num: int
    num_used: int  # by each token
    size: int  # intermediate size of each
    layers: tuple[bool, ...]  # whether each layer has them; others have an MLP
    sum_to_1: bool  # the weights of those that are used; otherwise they are shares of all
    rounds_weights: bool  # to the model's dtype
    has_bias: bool = False  # the router and each expert's gate, up and down
    swiglu: ClampedSwiglu | None = None  # in place of activation(gate) · up
    shares: ExpertShares = ExpertShares.SOFTMAX
    wide_scores: bool = False  # scores are fp32; otherwise rounded to the model's dtype
    has_correction: bool = (
        False  # a number for each expert is added to its share to choose, not to its weight
    )
    num_groups: int = 1  # equal runs of experts; those of other groups than the used ones are not chosen
    num_groups_used: int = 1  # with the highest share, or two highest corrected ones together
    sum_eps: float = 0.0  # added to the sum of shares that weights are divided by, with `sum_to_1`
    factor: float = 1.0  # of weights, behind that
    shared_size: int = 0  # intermediate size of the shared expert, which all tokens take; 0: there is none
    weighs_inputs: bool = False  # weights multiply experts' inputs, rounded, in place of their outputs
    has_shared_gate: bool = False  # its output is multiplied with the sigmoid of a number that a row gives
    # The shared expert is the layer's MLP; the router and the experts take the same x by norms of their own. Both
    # outputs are normalised before they are added, and each expert has a factor of its weights.
    joins_mlp: bool = False


def read_experts(
    config: Fields,
    *,
    size_key: str,
    layers: Sequence[bool],
    sum_to_1: bool,
    rounds_weights: bool,
    has_bias: bool = False,
    swiglu: ClampedSwiglu | None = None,
) -> Experts:
    """A mixture in these layers. Files of transformers 5 say `num_local_experts`, others mostly `num_experts`."""
    keys = ("num_experts", "n_routed_experts", "num_local_experts")
    num = config.integer(next((key for key in keys if key in config), keys[-1]), low=1, high=MAX_EXPERTS)
    return Experts(
        num,
        config.integer("num_experts_per_tok", low=1, high=num),
        config.integer(size_key, low=1, high=MAX_WIDTH),
        tuple(layers),
        sum_to_1,
        rounds_weights,
        has_bias,
        swiglu,
    )


def read_groups(config: Fields, experts: Experts, default: tuple[int, int] = (1, 1)) -> tuple[int, int]:
    """Groups of experts, and how many of them each token uses. Raises `ModelError` for those that do not fit."""
    num_groups = config.integer("n_group", low=1, high=experts.num, default=default[0])
    if experts.num % num_groups:
        raise config.wrong("n_group", f"but must divide the number of experts, {experts.num}")
    used = config.integer("topk_group", low=1, high=num_groups, default=default[1])
    if experts.num_used > experts.num // num_groups * used:
        raise config.wrong(
            "topk_group", f"but {experts.num_used} experts are chosen, more than their groups have"
        )
    return num_groups, used


def read_sigmoid_experts(
    config: Fields,
    layers: Sequence[bool],
    *,
    factor: float,
    groups: tuple[int, int] = (1, 1),
) -> Experts:
    """DeepSeek V3's kind of mixture in these layers, with these defaults: sigmoids as shares, corrections, groups of
    experts, shared ones. Raises `ModelError`.
    """
    common = read_experts(
        config,
        size_key="moe_intermediate_size",
        layers=layers,
        sum_to_1=config.boolean("norm_topk_prob", default=True),
        rounds_weights=False,
    )
    num_groups, used = read_groups(config, common, groups)
    num_shared = config.integer("n_shared_experts", low=0, high=MAX_EXPERTS, default=1)
    return replace(
        common,
        shares=ExpertShares.SIGMOID,
        wide_scores=True,
        has_correction=True,
        num_groups=num_groups,
        num_groups_used=used,
        sum_eps=1e-20,
        factor=config.number("routed_scaling_factor", low=1e-6, high=1e6, default=factor),
        shared_size=num_shared * common.size,
    )
