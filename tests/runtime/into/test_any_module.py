"""Modules of many architectures compute right while their weights arrive, in whatever order they do.

All memory is poisoned with NaN first: what is computed with too early shows in the outputs.
"""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
import torch
from tests.support.any_modules import ARCHITECTURES, BY_NAME, Architecture, original
from tests.support.inspection import hooks_of
from tests.support.load import patience_s
from tests.support.poisoned import PoisonedLoad
from torch import nn

import teneral
from teneral.loader.artifact import open_artifact
from teneral.runtime.into.gates import find_gates
from teneral.runtime.into.slots import find_slots

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)


def empty(architecture: Architecture) -> nn.Module:
    with teneral.empty_weights():
        return architecture.build()


def use(architecture: Architecture, module: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return architecture.use(module)


def are_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


def identities(module: nn.Module) -> dict[str, int]:
    """Of every parameter and buffer, under each of its names."""
    tensors = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {name: id(tensor) for name, tensor in tensors}


def left_behind(module: nn.Module) -> list[str]:
    """What a load has put on modules."""
    return [
        name
        for name, each in module.named_modules()
        if each._forward_pre_hooks or each._state_dict_pre_hooks or "_apply" in vars(each)
    ]


@each_architecture
@pytest.mark.parametrize(
    ("stored", "seed"),
    [("plain", None), ("plain", 1), ("packed", 2), ("packed", 3)],
    ids=["plain-backwards", "plain-random-1", "packed-random-2", "packed-random-3"],
)
def test_outputs_are_right_while_weights_arrive_in_any_order(architecture, stored, seed):
    expected = original(architecture)
    module = empty(architecture)
    before, hooks_before = identities(module), left_behind(module)
    arrival = PoisonedLoad(module, getattr(expected, stored).reopen())
    groups = [group.index for group in reversed(arrival.manifest.groups)]
    if seed is not None:
        random.Random(f"{architecture.name} {seed}").shuffle(groups)
    with arrival.load, arrival.arriving(groups):
        outputs = use(architecture, module)
        arrival.load.wait()
    assert are_equal(outputs, expected.outputs)
    assert are_equal(use(architecture, module), expected.outputs)
    assert identities(module) == before
    assert left_behind(module) == hooks_before == []
    for name, tensor in expected.module.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name


@each_architecture
def test_without_its_gates_a_module_computes_with_the_poison(architecture):
    module = empty(architecture)
    arrival = PoisonedLoad(module, original(architecture).plain.reopen())
    for hooks in hooks_of(arrival.load):
        hooks.remove()
    try:
        outputs = use(architecture, module)
    except (RuntimeError, ValueError):  # generation may refuse to go on with NaN
        return
    finally:
        arrival.load.close()
    assert not are_equal(outputs, original(architecture).outputs)


@each_architecture
def test_without_one_gate_a_module_computes_with_the_poison(architecture):
    """Each gate that alone waits for some group is taken away in turn, while that group stays out."""
    expected = original(architecture)
    num_tried = 0
    for index, groups in groups_of_gates(architecture):
        module = empty(architecture)
        arrival = PoisonedLoad(module, expected.plain.reopen())
        hooks_of(arrival.load)[index].remove()
        arrival.arrive(set(range(len(arrival.manifest.groups))) - groups)
        try:
            assert not are_equal(use(architecture, module), expected.outputs)
        except (RuntimeError, ValueError):  # generation may refuse to go on with NaN
            pass
        finally:
            arrival.load.close()
        num_tried += 1
    assert num_tried >= 2


def groups_of_gates(architecture: Architecture) -> list[tuple[int, set[int]]]:
    """The numbers of gates that wait for groups for which no other gate waits, and those groups."""
    module, manifest = architecture.build(), open_artifact(original(architecture).plain)
    group_of = {
        id(tensor): manifest.by_name[name].group
        for slot in find_slots(module).slots
        for tensor in slot.tensors
        for name in slot.names
        if name in manifest.by_name
    }
    waits = [
        {group_of[id(each)] for each in gate.tensors if id(each) in group_of} for gate in find_gates(module)
    ]
    count = Counter(group for groups in waits for group in groups)
    return [
        (index, groups) for index, groups in enumerate(waits) if groups and all(count[g] == 1 for g in groups)
    ]


@pytest.mark.parametrize(
    ("name", "last_before"),
    [
        ("llama", "model.layers.2"),
        ("bert", "encoder.layer.2"),
        ("t5", "encoder.block.1"),
        ("convolutional", "blocks.2"),
    ],
)
def test_a_forward_goes_as_far_as_its_weights_have_come(name, last_before):
    """The last group stays out: what needs only those before it is computed meanwhile."""
    architecture = BY_NAME[name]
    module = empty(architecture)
    arrival = PoisonedLoad(module, original(architecture).plain.reopen())
    reached = threading.Event()
    module.get_submodule(last_before).register_forward_hook(lambda *_: reached.set())
    outputs: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outputs.extend(use(architecture, module)), daemon=True)
    thread.start()
    arrival.arrive(group.index for group in arrival.manifest.groups[:-1])
    assert reached.wait(patience_s(30))
    assert not outputs
    arrival.arrive()
    thread.join(patience_s(30))
    arrival.load.close()
    assert are_equal(outputs, original(architecture).outputs)


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "t5", "bart", "whisper"])
def test_tied_weights_stay_tied(name):
    architecture = BY_NAME[name]
    module = empty(architecture)
    arrival = PoisonedLoad(module, original(architecture).plain.reopen())
    arrival.arrive()
    with arrival.load:
        arrival.load.wait()
    assert module.get_output_embeddings().weight is module.get_input_embeddings().weight
