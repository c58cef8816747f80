from __future__ import annotations

import torch
from torch import nn

import teneral


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def test_large_layers_take_no_memory():
    before = resident_bytes()
    with teneral.empty_weights():
        layers = [
            nn.Linear(4096, 4096),
            nn.Embedding(4096, 4096),
            nn.Conv2d(1024, 1024, 4),
            nn.LSTM(1024, 1024),
        ]
        nn.init.xavier_uniform_(layers[0].weight)
        nn.init.normal_(layers[0].weight)
        layers[0].weight.data.normal_()
    assert sum(parameter.nbytes for layer in layers for parameter in layer.parameters()) > 220_000_000
    assert resident_bytes() - before < 40_000_000


def test_constants_and_buffers_are_as_always():
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("noise", torch.empty(8).normal_(), persistent=False)
            self.register_buffer("positions", torch.arange(8), persistent=False)

    with teneral.empty_weights():
        norm, batch_norm, rotary = nn.LayerNorm(8), nn.BatchNorm1d(8), Rotary()
    assert torch.equal(norm.weight, torch.ones(8))
    assert torch.equal(batch_norm.running_var, torch.ones(8))
    assert torch.equal(rotary.positions, torch.arange(8))
    assert rotary.noise.std() > 0


def test_outside_of_it_initialisation_is_as_always():
    with teneral.empty_weights():
        pass
    torch.manual_seed(0)
    first = nn.Linear(64, 64).weight
    torch.manual_seed(0)
    assert torch.equal(nn.Linear(64, 64).weight, first)
    assert 0.05 < first.std() < 0.1


def test_a_parameter_given_values_keeps_them():
    with teneral.empty_weights():
        parameter = nn.Parameter(torch.arange(4.0))
        parameter.data.copy_(torch.ones(4))
    assert torch.equal(parameter, torch.ones(4))
