"""The MLP of a layer in torch, and mixtures of several."""

from __future__ import annotations

import torch

from ...models.experts_config import ClampedSwiglu, ExpertShares
from ...models.matrices import DecoderLayerWeights, Projection
from ...models.spec import DecoderSpec
from .layers import Linear, Product, RMSNorm, RoundedInputs, activation, clamped_swiglu, product_of
from .tensors import to_torch


def layer_product(spec: DecoderSpec, projection: Projection, device: torch.device) -> Product:
    """Of a layer's inputs, rounded where the model rounds them."""
    product = product_of(projection, device)
    return RoundedInputs(product) if spec.rounds_inputs else product


class GatedMLP:
    """down(activation(gate(x)) * up(x)), or with `swiglu` down(swiglu(gate(x), up(x))), or without a gate
    down(activation(up(x))).
    """

    def __init__(
        self,
        spec: DecoderSpec,
        gate_up: Projection | None,
        down: Projection | None,
        device: torch.device,
        swiglu: ClampedSwiglu | None = None,
        inner_norm: RMSNorm | None = None,
    ) -> None:
        assert gate_up is not None
        assert down is not None
        self.gate_up = layer_product(spec, gate_up, device)
        self.activation = activation(spec.activation)
        self.down = layer_product(spec, down, device)
        self.swiglu = swiglu
        self.has_gate = spec.gated_mlp
        self.inner_norm = inner_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inner = self._inner(x)
        return self.down(inner if self.inner_norm is None else self.inner_norm(inner))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        if not self.has_gate:
            return self.activation(self.gate_up(x))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        if self.swiglu is not None:
            return clamped_swiglu(gate, up, self.swiglu)
        return self.activation(gate).mul_(up)


class Mixture:
    """The weighted sum of each row's experts, added in the order of the experts, and the shared one's output."""

    def __init__(self, spec: DecoderSpec, weights: DecoderLayerWeights, device: torch.device) -> None:
        assert spec.experts is not None
        assert weights.router is not None
        self.settings = spec.experts
        self.router = product_of(weights.router, device)
        self.experts = [
            GatedMLP(spec, each.gate_up, each.down, device, spec.experts.swiglu) for each in weights.experts
        ]

        self.correction = None if weights.correction is None else to_torch(weights.correction).float()
        self.shared = (
            GatedMLP(spec, weights.gate_up, weights.down, device) if weights.gate_up is not None else None
        )

        gate = weights.shared_gate
        self.shared_gate = None if gate is None else product_of(gate, device)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of the experts that each row chooses, and their numbers: (T, num_used) each."""
        settings = self.settings
        if settings.wide_scores and isinstance(self.router, Linear):
            scores = self.router.in_float32(x)
        else:
            scores = self.router(x).float()
        shares = (
            scores.sigmoid() if settings.shares is ExpertShares.SIGMOID else torch.softmax(scores, dim=-1)
        )
        numbers = shares if self.correction is None else shares + self.correction
        if self.correction is None and settings.shares is ExpertShares.SIGMOID:
            numbers = scores  # which order as sigmoids do, and are not all 1 where they are high
        if settings.num_groups_used < settings.num_groups:
            groups = numbers.view(len(x), settings.num_groups, -1)
            num_best = 1 if self.correction is None else min(2, groups.shape[-1])
            best = groups.topk(num_best, dim=-1).values.sum(-1)
            others = best.argsort(dim=-1, descending=True, stable=True)[:, settings.num_groups_used :]
            index = others.unsqueeze(-1).expand(-1, -1, groups.shape[-1])
            numbers = groups.scatter(1, index, float("-inf")).view(numbers.shape)
        chosen = torch.topk(numbers, settings.num_used, dim=-1).indices
        weights = shares.gather(-1, chosen)
        if settings.sum_to_1:
            weights = weights / (weights.sum(-1, keepdim=True) + settings.sum_eps)
        weights = weights * settings.factor
        return (weights.to(x.dtype) if settings.rounds_weights else weights), chosen

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self._route(x)
        out = torch.zeros_like(x)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, places = torch.where(chosen == number)
            own, expert = weights[rows, places].unsqueeze(-1), self.experts[number]
            made = (
                expert((x[rows] * own).to(x.dtype)) if self.settings.weighs_inputs else expert(x[rows]) * own
            )
            out[rows] += made.to(x.dtype)
        if self.shared is None:
            return out
        made = self.shared(x)
        return out + (made if self.shared_gate is None else self.shared_gate(x).sigmoid() * made)
