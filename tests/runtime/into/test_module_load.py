from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable

import pytest
import safetensors.torch
import torch
from tests.support.any_modules import BY_NAME, original, randomize, save
from tests.support.inspection import weights_of
from tests.support.load import patience_s
from tests.support.memory_store import MemoryStore
from tests.support.paced import reads_of
from tests.support.poisoned import PoisonedLoad
from torch import nn

import teneral
from teneral.loader.errors import (
    InsufficientMemoryError,
    IntegrityError,
    LoadCancelledError,
    UnavailableError,
    UsageError,
)
from teneral.loader.format.manifest import Tier
from teneral.loader.load.options import LoadOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.errors import ModelError
from teneral.runtime.into.match import WeightsMismatchError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.arange(10)


def filled(*, seed: int = 0) -> Net:
    net = Net()
    randomize(net, seed=seed)
    return net


def store_of(module: nn.Module, *, packed: bool = False, with_ties: bool = False) -> MemoryStore:
    plain = MemoryStore({"model.safetensors": save(module, with_ties=with_ties)})
    if not packed:
        return plain
    store = MemoryStore()
    pack(plain, store, threads=1)
    return store


def runs_into(call: Callable[[], object], error: type[Exception]) -> str:
    with pytest.raises(error) as raised:
        call()
    return "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])


def load_all(module: nn.Module, store: MemoryStore, **options) -> PoisonedLoad:
    arrival = PoisonedLoad(module, store, **options)
    arrival.arrive()
    with arrival.load:
        arrival.load.wait()
    return arrival


# where weights go


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_values_are_converted_to_the_modules_dtype(dtype):
    stored = filled().to(torch.bfloat16)
    net = Net().to(dtype)
    arrival = PoisonedLoad(net, store_of(stored, packed=True))
    with arrival.arriving(reversed(range(len(arrival.manifest.groups)))), torch.inference_mode():
        logits = net(TOKENS)
    assert logits.dtype == dtype
    assert torch.equal(logits, stored.to(dtype)(TOKENS))
    arrival.load.close()


def test_values_that_were_converted_leave_nothing_of_the_file_in_memory():
    arrival = PoisonedLoad(Net(), store_of(filled().to(torch.bfloat16)))
    stored = weakref.ref(weights_of(arrival.load))
    arrival.arrive()
    arrival.load.wait()
    gc.collect()
    assert stored() is None
    assert arrival.load.progress().parts_decoded == len(arrival.manifest.parts)
    arrival.load.close()


def test_layouts_that_are_not_contiguous_stay():
    convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    stored = nn.Conv2d(3, 4, 2)
    stride = convolution.weight.stride()
    load_all(convolution, store_of(stored))
    assert convolution.weight.stride() == stride != stored.weight.stride()
    assert torch.equal(convolution.weight, stored.weight)


def test_parameters_that_are_views_of_one_memory_stay_so():
    net, stored = Net(), filled()
    flat = torch.zeros(160)
    net.embed.weight.data, net.head.weight.data = flat[:80].view(10, 8), flat[80:].view(10, 8)
    load_all(net, store_of(stored))
    assert torch.equal(flat.view(2, 10, 8), torch.stack([stored.embed.weight, stored.head.weight]))
    assert net.head.weight.data_ptr() == flat[80:].data_ptr()


def test_objects_tied_by_their_memory_stay_so():
    net, stored = Net(), filled()
    net.head.weight = nn.Parameter(net.embed.weight.data)
    stored.head.weight = stored.embed.weight
    load_all(net, store_of(stored))
    assert net.head.weight is not net.embed.weight
    assert net.head.weight.data_ptr() == net.embed.weight.data_ptr()
    assert torch.equal(net(TOKENS), stored(TOKENS))


@pytest.mark.parametrize("packed", [False, True])
def test_tied_weights_may_be_stored_under_each_name(packed):
    net, stored = Net(), filled()
    net.head.weight, stored.head.weight = net.embed.weight, stored.embed.weight
    load_all(net, store_of(stored, packed=packed, with_ties=True))
    assert torch.equal(net(TOKENS), stored(TOKENS))


def test_tied_weights_that_differ_in_the_file_are_refused_by_name():
    net = Net()
    net.head.weight = net.embed.weight
    arrival = PoisonedLoad(net, store_of(filled()))
    arrival.arrive()
    message = runs_into(arrival.load.wait, ModelError)
    assert "embed.weight and head.weight are one tensor in the module, but head.weight is another" in message
    runs_into(lambda: net(TOKENS), ModelError)
    arrival.load.close()


def test_weights_tied_in_the_artifact_but_not_in_the_module_are_not_tied():
    stored = filled()
    stored.head.weight = stored.embed.weight
    net = Net()
    load_all(net, store_of(stored, packed=True, with_ties=True))
    assert torch.equal(net.head.weight, net.embed.weight)
    assert net.head.weight.data_ptr() != net.embed.weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_module_on_the_meta_device_gets_memory_and_keeps_its_objects(dtype):
    with torch.device("meta"):
        net = Net().to(dtype)
        net.head.weight = net.embed.weight
        net.register_buffer("scale", torch.empty(2))
    stored = filled()
    stored.head.weight = stored.embed.weight
    stored.register_buffer("scale", torch.ones(2))
    before = {name: id(tensor) for name, tensor in net.state_dict(keep_vars=True).items()}
    load_all(net, store_of(stored))
    assert {name: id(tensor) for name, tensor in net.state_dict(keep_vars=True).items()} == before
    assert isinstance(net.embed.weight, nn.Parameter)
    assert torch.equal(net(TOKENS), stored.to(dtype)(TOKENS))


def test_what_the_file_lacks_keeps_its_values():
    net, stored = filled(seed=1), filled()
    head = net.head.weight.clone()
    del stored.head
    arrival = load_all(net, store_of(stored), strict=False)
    assert arrival.load.missing_keys == ("head.weight",)
    assert torch.equal(net.head.weight, head)
    assert torch.equal(net.embed.weight, stored.embed.weight)


def test_an_optimizer_made_before_the_load_trains_the_module():
    net, stored = Net(), filled()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    arrival = PoisonedLoad(net, store_of(stored))
    with arrival.load, arrival.arriving(range(len(arrival.manifest.groups))):
        loss = net(TOKENS).square().mean()
        loss.backward()
        optimizer.step()
    expected = stored.embed.weight - 0.1 * net.embed.weight.grad
    assert torch.equal(net.embed.weight, expected)
    assert net(TOKENS).square().mean() < loss


# what waits


def test_a_part_of_the_module_may_be_called_alone():
    net, stored = Net(), filled()
    arrival = PoisonedLoad(net, store_of(stored))
    arrival.arrive([arrival.group_of("layers.1.up.weight")])
    x = torch.ones(2, 8)
    assert torch.equal(net.layers[1](x), stored.layers[1](x))
    assert torch.equal(net.layers[1].up(x), stored.layers[1].up(x))
    assert not arrival.load.is_ready()
    arrival.load.close()


def test_hooks_that_read_weights_find_them():
    net, stored = Net(), filled()
    seen: list[torch.Tensor] = []
    net.layers[0].register_forward_pre_hook(lambda layer, _: seen.append(layer.up.weight.clone()))
    arrival = PoisonedLoad(net, store_of(stored))
    with arrival.load, arrival.arriving(range(len(arrival.manifest.groups))):
        net(TOKENS)
    assert torch.equal(seen[0], stored.layers[0].up.weight)


def test_waiting_for_a_part_makes_it_readable():
    net, stored = Net(), filled()
    arrival = PoisonedLoad(net, store_of(stored))
    arrival.arrive([arrival.group_of("head.weight")])
    arrival.load.wait(net.head)
    assert torch.equal(net.head.weight, stored.head.weight)
    with pytest.raises(TimeoutError):
        arrival.load.wait(timeout_s=0.01)
    arrival.load.close()


@pytest.mark.parametrize(
    ("take", "dtype"),
    [
        (lambda net: net, torch.float32),
        (lambda net: net.to(torch.bfloat16), torch.bfloat16),
        (lambda net: net.double(), torch.float64),
    ],
)
def test_taking_the_weights_waits_for_them(take, dtype):
    net, stored = Net(), filled()
    arrival = PoisonedLoad(net, store_of(stored))
    with arrival.load, arrival.arriving(range(len(arrival.manifest.groups))):
        state = take(net).state_dict()
    assert {tensor.dtype for tensor in state.values()} == {dtype}
    for name, tensor in stored.state_dict().items():
        assert torch.equal(state[name], tensor.to(dtype))


def test_a_module_is_copied_and_pickled_only_when_it_is_whole():
    net, stored = Net(), filled()
    arrival = PoisonedLoad(net, store_of(stored))
    assert "still arriving" in runs_into(lambda: copy.deepcopy(net), UsageError)
    assert "still arriving" in runs_into(lambda: pickle.dumps(net), UsageError)
    arrival.arrive()
    arrival.load.wait()
    arrival.load.close()
    assert torch.equal(copy.deepcopy(net)(TOKENS), stored(TOKENS))
    assert torch.equal(pickle.loads(pickle.dumps(net))(TOKENS), stored(TOKENS))


def test_many_threads_may_call_the_module_at_once():
    net, stored = Net().to(torch.float64), filled()
    arrival = PoisonedLoad(net, store_of(stored))
    outputs: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: outputs.append(net(TOKENS)), daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    with arrival.load, arrival.arriving(reversed(range(len(arrival.manifest.groups)))):
        for thread in threads:
            thread.join(patience_s(30))
    assert len(outputs) == 8
    assert all(torch.equal(output, stored.double()(TOKENS)) for output in outputs)


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_module_is_loaded_whole_before_it_can_be_called(tmp_path, whole):
    stored = filled()
    (tmp_path / "model.safetensors").write_bytes(save(stored))
    net = Net()
    net.layers[1] = torch.compile(net.layers[1], backend="eager")
    compiled = torch.compile(net, backend="eager") if whole else net
    with teneral.load_into(compiled, tmp_path) as load:
        assert load.is_ready()
        assert all(not module._forward_pre_hooks for module in compiled.modules())
        with torch.no_grad():
            assert torch.equal(compiled(TOKENS), stored(TOKENS))


# how a load ends


def test_nothing_is_left_when_all_is_there():
    net = Net()
    arrival = load_all(net, store_of(filled()))
    assert arrival.paced.closed
    assert all(not module._forward_pre_hooks for module in net.modules())
    assert arrival.load.progress().parts_decoded == len(arrival.manifest.parts)
    arrival.load.close()
    net(TOKENS)


def test_the_gate_raises_the_loads_error_and_says_where_it_waited():
    net = Net()
    arrival = PoisonedLoad(net, store_of(filled()))
    parts = arrival.manifest.parts_of(arrival.group_of("layers.1.up.weight"), Tier.DRAFT)
    arrival.paced.fail(lambda: UnavailableError("the store is away"), reads_of(arrival.manifest, *parts))
    arrival.arrive(range(2))
    arrival.arrive()
    for _ in range(2):
        message = runs_into(lambda: net(TOKENS), UnavailableError)
        assert "the store is away" in message
        assert "waited for its weights" in message
    runs_into(arrival.load.wait, UnavailableError)
    arrival.load.close()


def test_damaged_weights_are_never_computed_with():
    stored = filled()
    arrival = PoisonedLoad(Net(), store_of(stored, packed=True))
    arrival.paced.spoil(times=1000)
    arrival.arrive()
    runs_into(arrival.load.wait, IntegrityError)
    arrival.load.close()


def test_a_module_whose_load_was_cut_short_refuses_to_compute_until_it_is_loaded_anew():
    net, stored = Net(), filled()
    cut_short = PoisonedLoad(net, store_of(stored))
    cut_short.load.close()
    runs_into(lambda: net(TOKENS), LoadCancelledError)
    load_all(net, store_of(stored))
    assert torch.equal(net(TOKENS), stored(TOKENS))


def test_a_module_can_be_loaded_again_but_not_twice_at_once(tmp_path):
    first, second = filled(seed=1), filled(seed=2)
    net = Net()
    arrival = PoisonedLoad(net, store_of(first))
    (tmp_path / "model.safetensors").write_bytes(save(second))
    assert "being loaded already" in runs_into(lambda: teneral.load_into(net, tmp_path), UsageError)
    assert "being loaded already" in runs_into(
        lambda: teneral.load_into(net.layers[0], tmp_path, strict=False), UsageError
    )
    arrival.arrive()
    arrival.load.wait()
    arrival.load.close()
    assert torch.equal(net(TOKENS), first(TOKENS))
    with teneral.load_into(net, tmp_path) as load:
        load.wait()
    assert torch.equal(net(TOKENS), second(TOKENS))


@pytest.mark.parametrize(
    ("options", "error"),
    [({"options": LoadOptions(available_bytes=1)}, InsufficientMemoryError), ({}, WeightsMismatchError)],
)
def test_a_refused_module_is_left_as_it_was(tmp_path, options, error):
    stored, net = filled(), filled(seed=1)
    if error is WeightsMismatchError:
        stored.head = nn.Linear(8, 11, bias=False)
    safetensors.torch.save_file(stored.state_dict(), tmp_path / "model.safetensors")
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in net.state_dict().items()}
    runs_into(lambda: teneral.load_into(net, tmp_path, **options), error)
    assert all(not module._forward_pre_hooks for module in net.modules())
    for name, tensor in net.state_dict().items():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])


def test_what_is_no_module_is_refused(tmp_path):
    assert "not into a dict" in runs_into(lambda: teneral.load_into({}, tmp_path), UsageError)


# addresses, and models with and without a head


def test_an_artifact_by_its_pin_and_a_single_file_will_do(tmp_path):
    stored = filled()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(save(stored))
    pin = pack(FileStore(folder), FileStore(tmp_path / "artifact"), threads=1).pin
    for address in (pin, tmp_path / "artifact", folder, folder / "model.safetensors", f"file://{folder}"):
        net = Net()
        with teneral.load_into(net, address):
            assert torch.equal(net(TOKENS), stored(TOKENS))


def test_a_model_with_a_head_fills_the_model_without():
    whole = original(BY_NAME["llama"])
    with teneral.empty_weights():
        body = BY_NAME["llama"].build().model
    arrival = load_all(body, whole.packed.reopen(), strict=False)
    assert arrival.load.unexpected_keys == ("lm_head.weight",)
    assert torch.equal(
        body(TOKENS[None]).last_hidden_state, whole.module.model(TOKENS[None]).last_hidden_state
    )


def test_a_model_without_a_head_fills_the_model_with():
    whole = original(BY_NAME["llama"]).module
    with teneral.empty_weights():
        model = BY_NAME["llama"].build()
    arrival = load_all(model, store_of(whole.model), strict=False)
    assert arrival.load.missing_keys == ("lm_head.weight",)
    assert torch.equal(
        model.model(TOKENS[None]).last_hidden_state, whole.model(TOKENS[None]).last_hidden_state
    )
