from __future__ import annotations

import torch
from torch import nn

from teneral.runtime.into.gates import find_gates


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU())])

    def forward(self, x):
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.token = nn.Parameter(torch.zeros(4))
        self.more = nn.ParameterList([torch.zeros(2), torch.zeros(3)])
        self.parts = nn.ModuleDict(
            {"norm": nn.LayerNorm(4), "head": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))}
        )

    def forward(self, x):
        return x


def names_of(module):
    return [gate.name for gate in find_gates(module)]


def test_blocks_of_a_stack_and_subtrees_without_one_are_gates():
    assert names_of(Model()) == ["embed", "blocks.0", "blocks.1", "parts.norm", "parts.head", ""]


def test_a_gate_covers_all_that_is_below_it():
    model = Model()
    gate = find_gates(model)[1]
    assert set(gate.members) == set(model.blocks[0].modules())
    assert {id(tensor) for tensor in gate.tensors} == {id(tensor) for tensor in model.blocks[0].parameters()}


def test_a_module_outside_a_stack_waits_for_its_own_parameters_and_for_those_of_lists_that_are_never_called():
    model = Model()
    gate = find_gates(model)[-1]
    assert gate.members == (model,)
    assert [id(each) for each in gate.tensors] == [id(model.token), *map(id, model.more)]


def test_a_module_without_a_stack_is_one_gate():
    assert names_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == [""]


def test_a_sequence_of_alike_blocks_is_a_stack_and_one_of_different_models_is_looked_into():
    def block():
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    assert names_of(nn.Sequential(block(), block())) == ["0", "1"]
    assert names_of(nn.Sequential(Model(), nn.Linear(2, 2)))[:3] == ["0.embed", "0.blocks.0", "0.blocks.1"]


def test_a_sequence_with_a_forward_of_its_own_is_not_taken_apart():
    class Own(nn.Sequential):
        def forward(self, x):
            return x @ self[0][0].weight

    def block():
        return nn.Sequential(nn.Linear(2, 2))

    assert names_of(Own(block(), block())) == [""]


def test_a_shared_module_is_a_member_of_one_gate():
    shared = Block()
    model = nn.ModuleList([shared, shared, Block()])
    gates = find_gates(model)
    members = [member for gate in gates for member in gate.members]
    assert [gate.name for gate in gates] == ["0", "2"]
    assert len(members) == len(set(members))


def test_every_tensor_belongs_to_a_gate():
    for model in (
        Model(),
        nn.ModuleDict({"only": nn.ParameterList([torch.zeros(2)])}),
        nn.Transformer(8, 2, 1, 1, 8, batch_first=True),
    ):
        covered = {id(tensor) for gate in find_gates(model) for tensor in gate.tensors}
        assert covered == {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
