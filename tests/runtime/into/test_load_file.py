from __future__ import annotations

import gc
import inspect

import pytest
import safetensors.torch
import torch

import teneral
from teneral.loader.errors import CheckpointError, IntegrityError, NotFoundError, UsageError
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.content import Base
from teneral.loader.tools.pack.pack import pack

TENSORS = {
    "layers.0.weight": torch.randn(300, 200),
    "layers.1.weight": torch.randn(500, 301).bfloat16(),
    "half": torch.randn(7).half(),
    "float8": torch.randn(16).to(torch.float8_e4m3fn),
    "double": torch.randn(3, dtype=torch.float64),
    "complex": torch.randn(3, dtype=torch.complex64),
    "mask": torch.tensor([True, False]),
    "int": torch.arange(5),
    "byte": torch.arange(5, dtype=torch.uint8),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
}


@pytest.fixture
def path(tmp_path):
    safetensors.torch.save_file(TENSORS, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert got[name].contiguous().view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8)), (
            name
        )


def test_it_gives_what_safetensors_gives(path):
    assert_same(teneral.load_file(path), safetensors.torch.load_file(path))


@pytest.mark.parametrize("address", ["{path}", "{folder}", "file://{path}", "file://{folder}"])
def test_a_file_a_folder_and_an_address_will_do(path, address):
    assert_same(teneral.load_file(address.format(path=path, folder=path.parent)), TENSORS)


def test_a_file_under_any_name_and_relative_to_here_will_do(path, monkeypatch):
    path.rename(path.parent / "weights")
    monkeypatch.chdir(path.parent)
    assert_same(teneral.load_file("weights"), TENSORS)


def test_one_file_of_several_is_only_that_one(path):
    safetensors.torch.save_file({"other": torch.ones(1)}, path.parent / "other.safetensors")
    assert_same(teneral.load_file(path), TENSORS)


def test_an_artifact_will_do_pinned_or_not(path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("artifact")
    result = pack(FileStore(path.parent), FileStore(folder))
    assert_same(teneral.load_file(folder), TENSORS)
    assert_same(teneral.load_file(result.pin), TENSORS)
    with pytest.raises(IntegrityError):
        teneral.load_file(f"{folder}@b3:{'0' * 64}")


def test_the_tensors_are_writable_and_outlive_the_file(path):
    tensors = teneral.load_file(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    path.unlink()
    gc.collect()
    assert_same(tensors, TENSORS)
    tensors["int"] += 1
    assert torch.equal(tensors["int"], torch.arange(1, 6))
    assert torch.equal(tensors["layers.0.weight"], TENSORS["layers.0.weight"])


def test_a_tensor_has_a_storage_of_its_own_size_and_outlives_the_others(path):
    tensor = teneral.load_file(path)["layers.0.weight"]
    gc.collect()
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert torch.equal(tensor, TENSORS["layers.0.weight"])


def test_a_device_is_where_they_go(path):
    tensors = teneral.load_file(path, device="meta")
    assert {str(tensor.device) for tensor in tensors.values()} == {"meta"}
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tensor.shape for name, tensor in TENSORS.items()
    }


@pytest.mark.parametrize("name", ["no.safetensors", "no", "weights.safetensors/no.safetensors"])
def test_nothing_there_is_a_file_not_found_error(path, name):
    with pytest.raises(FileNotFoundError, match=name) as error:
        teneral.load_file(path.parent / name)
    assert isinstance(error.value.__cause__, NotFoundError)


def test_a_damaged_file_is_refused(path):
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        teneral.load_file(path)


def test_one_file_cannot_be_pinned(path):
    with pytest.raises(UsageError, match="only packed artifacts can be pinned"):
        teneral.load_file(f"{path}@b3:{'0' * 64}")


def as_called(function):
    """What a caller may write: names, kinds and defaults of the parameters, in their order."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


def test_it_can_be_called_as_the_installed_safetensors_can():
    theirs, ours = as_called(safetensors.torch.load_file), as_called(teneral.load_file)
    assert [each for each in ours if each in theirs] == theirs  # releases before 0.8 have no `backend`
    by_position = [each for each in theirs if each[1] is not inspect.Parameter.KEYWORD_ONLY]
    assert ours[: len(by_position)] == by_position
    assert all(each[2] is not inspect.Parameter.empty for each in ours if each not in theirs)


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_backends_of_safetensors_are_accepted_and_change_nothing(path, backend):
    assert_same(teneral.load_file(path, "cpu", backend=backend), TENSORS)


@pytest.mark.parametrize("backend", ["io_uring", "MMAP", "", None, 3])
def test_other_backends_are_refused_before_anything_is_read(tmp_path, backend):
    with pytest.raises(UsageError, match=r"backend .* 'mmap' or 'pread'") as error:
        teneral.load_file(tmp_path / "no.safetensors", backend=backend)
    assert repr(backend) in str(error.value)


def test_the_backend_cannot_be_given_by_position(path):
    with pytest.raises(TypeError):
        teneral.load_file(path, "cpu", "mmap")


# -- fine-tunes stored as differences


@pytest.fixture
def based(tmp_path):
    """A base and the differences of a fine-tune to it, with the fine-tune's tensors."""
    tuned = {
        name: tensor * 1.01 if tensor.dtype in (torch.float32, torch.bfloat16) else tensor
        for name, tensor in TENSORS.items()
    }
    for name, tensors in (("base", TENSORS), ("tuned", tuned)):
        (tmp_path / name).mkdir()
        safetensors.torch.save_file(tensors, tmp_path / name / "model.safetensors")
    pack(FileStore(tmp_path / "base"), FileStore(tmp_path / "packed"))
    pack(
        FileStore(tmp_path / "tuned"),
        FileStore(tmp_path / "differences"),
        base=Base(FileStore(tmp_path / "packed")),
    )
    return tmp_path, tuned


def test_differences_and_their_base_give_the_fine_tune(based):
    folder, tuned = based
    assert_same(teneral.load_file(folder / "differences", base=folder / "packed"), tuned)
    with pytest.raises(UsageError, match="only the differences to"):
        teneral.load_file(folder / "differences")
    with pytest.raises(IntegrityError, match="is not the base"):
        teneral.load_file(folder / "differences", base=folder / "base")
    with pytest.raises(UsageError, match="it has no base"):
        teneral.load_file(folder / "packed", base=folder / "packed")
    with pytest.raises(UsageError, match="is one file"):
        teneral.load_file(folder / "base" / "model.safetensors", base=folder / "packed")


def test_a_module_gets_differences_added_to_their_base(based):
    folder, tuned = based
    module = torch.nn.Module()
    module.layers = torch.nn.ModuleList(
        torch.nn.Linear(columns, rows, bias=False, dtype=dtype)
        for rows, columns, dtype in ((300, 200, torch.float32), (500, 301, torch.bfloat16))
    )
    load = teneral.load_into(module, folder / "differences", strict=False, base=folder / "packed")
    with load:
        load.wait()
    for name, parameter in module.named_parameters():
        assert parameter.equal(tuned[name]), name
