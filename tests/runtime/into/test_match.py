from __future__ import annotations

import pytest
import torch
from tests.support.checkpoints import model_store, random_content
from torch import nn

from teneral.loader.artifact import open_artifact
from teneral.runtime.errors import ModelError
from teneral.runtime.into.match import WeightsMismatchError, match_weights, rename_all
from teneral.runtime.into.slots import find_slots


def manifest_of(**shapes):
    """Names have their dots as two underscores."""
    dtyped = {
        name.replace("__", "."): (s if isinstance(s[0], str) else ("F32", s)) for name, s in shapes.items()
    }
    return open_artifact(model_store({name: random_content(*each) for name, each in dtyped.items()}))


def match(module, manifest, *, strict=True, rename=None):
    return match_weights(find_slots(module), manifest, strict=strict, rename=rename)


def test_every_slot_gets_the_tensor_of_its_name():
    found = match(nn.Linear(3, 2), manifest_of(weight=(2, 3), bias=(2,)))
    assert {filling.slot.name: filling.entry.name for filling in found.fillings} == {
        "weight": "weight",
        "bias": "bias",
    }
    assert (found.missing_keys, found.unexpected_keys) == ((), ())


def test_what_is_missing_and_what_is_unexpected_is_named():
    with pytest.raises(
        WeightsMismatchError, match=r"not in the file: bias; 1 of the file's .* module: other"
    ) as error:
        match(nn.Linear(3, 2), manifest_of(weight=(2, 3), other=(2,)))
    assert (error.value.missing_keys, error.value.unexpected_keys) == (("bias",), ("other",))


def test_without_strict_it_is_only_reported():
    found = match(nn.Linear(3, 2), manifest_of(weight=(2, 3), other=(2,)), strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (("bias",), ("other",))


def test_another_shape_is_refused_even_without_strict():
    with pytest.raises(WeightsMismatchError, match=r"weight is \[2, 3\], the file has \[3, 2\]") as error:
        match(nn.Linear(3, 2), manifest_of(weight=(3, 2), bias=(2,)), strict=False)
    assert error.value.mismatched_keys == ("weight",)


def test_another_kind_of_number_is_refused():
    with pytest.raises(WeightsMismatchError, match=r"weight is torch.float32, the file has I8"):
        match(nn.Linear(3, 2), manifest_of(weight=("I8", (2, 3)), bias=(2,)))


def test_many_names_are_cut_short():
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))
    with pytest.raises(WeightsMismatchError, match=r"20 of the module's .* \(20 in all\)") as error:
        match(module, manifest_of(other=(2,)))
    assert len(error.value.missing_keys) == 20


@pytest.mark.parametrize(
    ("file_names", "module_names", "renamed"),
    [
        (["a.x", "a.y"], ["a.x", "a.y"], ["a.x", "a.y"]),
        (["model.a", "model.b", "lm_head"], ["a", "b"], ["a", "b", "lm_head"]),
        (["a", "b"], ["model.a", "model.b", "lm_head"], ["model.a", "model.b"]),
        (["a", "b", "score.w"], ["model.a", "model.b", "score.w"], ["model.a", "model.b", "score.w"]),
        (["x", "y"], ["a", "b"], ["x", "y"]),
    ],
)
def test_one_prefix_that_makes_names_fit_is_found(file_names, module_names, renamed):
    assert list(rename_all(file_names, module_names, None).values()) == renamed


def test_the_user_renames_and_leaves_out():
    table = {"w": "weight", "b": "bias", "step": None}
    found = match(nn.Linear(3, 2), manifest_of(w=(2, 3), b=(2,), step=(1,)), rename=table.get)
    assert {filling.slot.name: filling.entry.name for filling in found.fillings} == {
        "weight": "w",
        "bias": "b",
    }


def test_two_names_that_become_one_are_refused():
    with pytest.raises(WeightsMismatchError, match=r"(b and w|w and b) both become weight"):
        match(nn.Linear(3, 2), manifest_of(w=(2, 3), b=(2,)), rename=lambda name: "weight")


def test_buffers_that_the_module_computes_are_neither_missing_nor_unexpected():
    module = nn.Linear(3, 2)
    module.register_buffer("positions", torch.arange(3), persistent=False)
    assert not match(module, manifest_of(weight=(2, 3), bias=(2,))).missing_keys
    stored = match(module, manifest_of(weight=(2, 3), bias=(2,), positions=("I64", (3,))))
    assert len(stored.fillings) == 2
    assert not stored.unexpected_keys


def test_one_of_a_tied_weights_names_is_enough():
    module = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    module["head"].weight = module["embed"].weight
    for name in ("embed__weight", "head__weight"):
        assert not match(module, manifest_of(**{name: (4, 3)})).missing_keys


def test_weights_on_the_meta_device_must_be_in_the_file():
    with pytest.raises(WeightsMismatchError, match="on the meta device, so without values: bias"):
        match(nn.Linear(3, 2, device="meta"), manifest_of(weight=(2, 3)), strict=False)


def test_computed_buffers_on_the_meta_device_are_refused_with_the_way_out():
    module = nn.Linear(3, 2)
    module.register_buffer("positions", torch.arange(3, device="meta"), persistent=False)
    with pytest.raises(ModelError, match=r"positions is on the meta device(.|\n)*empty_weights"):
        find_slots(module)


def test_lazy_and_sparse_parameters_are_refused():
    with pytest.raises(ModelError, match="lazy module"):
        find_slots(nn.LazyLinear(3))
    module = nn.Module()
    module.table = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(ModelError, match=r"table is a torch\.sparse_coo"):
        find_slots(module)
